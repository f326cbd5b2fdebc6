"""Draws the pictures of the documents as SVG: python -m docs.pictures.draw

Owns: the pictures of docs/CONCEPTS.md and docs/READING_ORDER.md, and the curves of the first run
(from docs/first_run.txt). What was lost at each fault is read from docs/PEERS_ON_FAULTS.md.
tests/docs/test_docs.py compares the files with what is drawn here.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
RUN_TOOLS = "ddp_runs"
BLUE, ORANGE, GREEN, RED, GREY = "#3b6fb6", "#d98324", "#3f8f4f", "#b8433d", "#8a8f98"
LIGHT = {BLUE: "#dbe6f4", ORANGE: "#f8e6d0", GREEN: "#dcefdf", RED: "#f4dcda", GREY: "#ececee"}


class Picture:
    """An SVG under construction; lengths in pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(
        self, at: tuple[float, float], size: tuple[float, float], text: str = "", color: str = GREY
    ) -> None:
        """Draw a rectangle with its text in the middle."""
        (x, y), (width, height) = at, size
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{LIGHT[color]}" stroke="{color}"/>'
        )
        if text:
            self.text((x + width / 2, y + height / 2 + 4.5), text, anchor="middle")

    def text(
        self, at: tuple[float, float], text: str, *, anchor: str = "start", bold: bool = False
    ) -> None:
        """Write a line of text; at is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._lines.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}"{weight}>{escaped}</text>'
        )

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, both: bool = False
    ) -> None:
        """Draw an arrow, with a tip at its end or at both."""
        tips = 'marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if both else "")
        self._lines.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="#333" {tips}/>'
        )

    def curve(self, points: list[tuple[float, float]], color: str) -> None:
        """Draw lines from point to point, with a dot at each."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._lines.append(
            f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        self._lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points
        ]

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])


def dp_and_ddp() -> str:
    """Draw one process with threads beside one process for each GPU."""
    picture = Picture(760, 330, "DataParallel and DistributedDataParallel")
    picture.text((20, 26), "DataParallel: one process, one thread per GPU", bold=True)
    picture.box((20, 40), (340, 230))
    picture.box((95, 55), (190, 56), "GPU 0: model, loss, sum", BLUE)
    for index in range(3):
        x = 35 + index * 110
        picture.box((x, 190), (100, 60), f"GPU {index + 1}: copy", ORANGE)
        picture.arrow((150 + index * 25, 115), (x + 40, 186))
        picture.arrow((x + 60, 186), (190 + index * 25, 115))
    picture.text((20, 292), "each step: the model out, outputs and gradients back;")
    picture.text((20, 310), "GPU 0 does more than the others; one GIL for all")
    picture.text((400, 26), "DDP: one process per GPU", bold=True)
    for index in range(4):
        x = 400 + index * 88
        picture.box((x, 40), (80, 230))
        picture.text((x + 40, 60), f"rank {index}", anchor="middle")
        for row, (label, color) in enumerate(
            [("samples", GREEN), ("model", BLUE), ("loss", BLUE), ("gradient", ORANGE)]
        ):
            picture.box((x + 6, 70 + row * 49), (68, 40), label, color)
        if index < 3:
            picture.arrow((x + 76, 237), (x + 92, 237), both=True)
    picture.text((400, 292), "each step: only gradients, between neighbours,")
    picture.text((400, 310), "while backward still runs; equal work for all")
    return picture.svg()


def ring() -> list[list[list[str]]]:
    """Play a ring all-reduce of 4 ranks: for each step, what each rank has in each of 4 parts."""
    parts = [[{rank} for _ in range(4)] for rank in range(4)]
    steps = [[["".join(map(str, sorted(part))) for part in row] for row in parts]]
    for step in range(6):
        shift = step if step < 3 else step - 3 - 1
        before = [[set(part) for part in row] for row in parts]
        for rank in range(4):
            part = (rank - shift) % 4
            parts[(rank + 1) % 4][part] |= before[rank][part]
        steps.append([["".join(map(str, sorted(part))) for part in row] for row in parts])
    return steps


def ring_all_reduce() -> str:
    """Draw the steps of a ring all-reduce, each with what every rank holds."""
    picture = Picture(920, 290, "A ring all-reduce of four ranks")
    picture.text((20, 26), "Ring all-reduce: 4 ranks, a gradient in 4 parts", bold=True)
    picture.text(
        (20, 46), "A cell says of which ranks it has the sum: 12 is the sum of ranks 1 and 2."
    )
    picture.text(
        (20, 64), "In each step each rank sends one part to the next rank, rank 3 to rank 0."
    )
    for index, rows in enumerate(ring()):
        x = 70 + index * 120
        label = "start" if index == 0 else f"step {index}"
        picture.text((x + 54, 92), label, anchor="middle")
        for rank, row in enumerate(rows):
            if index == 0:
                picture.text((20, 119 + rank * 32), f"rank {rank}")
            for part, ranks in enumerate(row):
                color = {1: GREY, 4: GREEN}.get(len(ranks), ORANGE)
                picture.box((x + part * 27, 100 + rank * 32), (26, 27), "", color)
                text = "all" if len(ranks) == 4 else ranks
                picture.text((x + part * 27 + 13, 118 + rank * 32), text, anchor="middle")
    picture.text((190, 252), "steps 1 to 3, reduce-scatter: each part")
    picture.text((190, 270), "becomes a complete sum on one rank")
    picture.text((550, 252), "steps 4 to 6, all-gather: the complete")
    picture.text((550, 270), "sums go round to all ranks")
    return picture.svg()


def buckets() -> str:
    """Draw backward and the all-reduces of buckets on one time axis, with and without overlap."""
    picture = Picture(760, 320, "Buckets over the time of a backward")
    layers = [("layer 4", 75), ("layer 3", 75), ("layer 2", 75), ("layer 1", 75)]
    sends = [("bucket 0: 4, 3", 110), ("bucket 1: 2, 1", 110)]

    def rows(y: float, *, starts: list[float]) -> None:
        picture.text((20, y + 20), "compute")
        picture.text((20, y + 60), "network")
        x = 100.0
        for name, width in layers:
            picture.box((x, y), (width, 30), name, BLUE)
            x += width
        for (name, width), start in zip(sends, starts, strict=True):
            picture.box((start, y + 40), (width, 30), name, ORANGE)
        end = starts[-1] + sends[-1][1]
        picture.box((end, y), (60, 30), "update", GREEN)
        picture.text((end + 66, y + 20), f"{end - 40:.0f}")

    picture.text((20, 26), "With buckets: the all-reduce starts when a bucket is full", bold=True)
    rows(40, starts=[250, 400])
    picture.text((20, 150), "Without: one all-reduce after backward", bold=True)
    rows(164, starts=[400, 510])
    picture.arrow((100, 262), (740, 262))
    picture.text((740, 280), "time", anchor="end")
    picture.text(
        (20, 280), "Backward reaches the last layer first, so bucket 0 has the last layers."
    )
    picture.text(
        (20, 300), "The number says when the update is done, counted from the start of backward."
    )
    return picture.svg()


FAULTS = {
    "kill-rank": "kill -9 of a rank",
    "term": "SIGTERM",
    "cut-checkpoint": "checkpoint cut in half",
    "oom": "a rank out of memory",
    "hang": "a rank hangs",
    "nan": "NaN on one rank",
}
PEERS = {
    **{"torch's tutorial": "torchrun alone", "Accelerate": "Accelerate", "Lightning": "Lightning"},
    **{"HF Trainer": "HF Trainer", "ddp_training.py": "this project"},
}


def loss_of(fault: str, peer: str) -> tuple[str, str]:
    """Give what a contender lost at a fault, in a word, and its color."""
    text = (DOCS / "PEERS_ON_FAULTS.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| "]
    titles = next(row for row in rows if peer in row)
    row = next(row for row in rows if row[0] == f"`{fault}`")
    lost = row[titles.index(peer)].partition(";")[0]
    if "NaN" in lost:
        return "all weights", RED
    if "no start" in row[titles.index(peer)]:
        return "cannot resume", RED
    if lost == "hangs":
        return row[titles.index(peer)].replace("hangs; ", "hangs, ").partition(";")[0], RED
    return ("nothing", GREEN) if "nothing" in lost else (lost, ORANGE)


def lost_at_a_fault() -> str:
    """Draw a table of faults and contenders, from the measured figures."""
    picture = Picture(760, 60 + 36 * (len(FAULTS) + 1), "What is lost at a fault, by whom")
    picture.text((20, 26), "What is lost at a fault, by whom (optimizer steps)", bold=True)
    for column, name in enumerate(PEERS.values()):
        picture.text((232 + column * 112, 58), name, anchor="middle", bold=True)
    for row, (fault, label) in enumerate(FAULTS.items()):
        y = 70 + row * 36
        picture.text((20, y + 20), label)
        for column, peer in enumerate(PEERS):
            lost, color = loss_of(fault, peer)
            picture.box((180 + column * 112, y), (106, 30), lost, color)
    picture.text((20, 50 + 36 * (len(FAULTS) + 1)), "Measured on 2 ranks: docs/PEERS_ON_FAULTS.md")
    return picture.svg()


def products() -> str:
    """Draw the three products and the drills, what each reads, and who starts them."""
    picture = Picture(760, 402, "The three products and the drills")
    picture.box(
        (20, 20), (720, 44), "ddp_training.py: the run as one page; hands the others their command"
    )
    columns = (
        (
            "hardened_ddp",
            BLUE,
            ("trains: settings, ranks, reporting,", "data, streams, task, model,"),
        ),
        (RUN_TOOLS, GREEN, ("looks at runs: doctor, watch,", "report, verify-ledger")),
        ("ddp_doctor", ORANGE, ("helps any DDP program:", "explain a log, audit a run")),
    )
    more = (
        ("gradients, checkpoint, guard, step,", "preflight, training, export;", "imports torch"),
        ("imports the layers that own", "the files of a run"),
        ("imports nothing of the others;", "works as one folder, alone"),
    )
    for column, (title, color, lines) in enumerate(columns):
        x = 20 + column * 245
        picture.arrow((x + 115, 64), (x + 115, 92))
        picture.box((x, 94), (230, 150), color=color)
        picture.text((x + 115, 116), title, anchor="middle", bold=True)
        for row, line in enumerate((*lines, *more[column])):
            picture.text((x + 115, 142 + row * 21), line, anchor="middle")
    picture.box((20, 282), (475, 44), "run folder: checkpoints, status, metrics, ledger, logs")
    picture.box((510, 282), (230, 44), "logs and records of any program")
    picture.arrow((135, 244), (135, 280))
    picture.arrow((380, 280), (380, 246))
    picture.arrow((460, 280), (540, 246))
    picture.arrow((625, 280), (625, 246))
    drills = "ddp_drills: trains with faults from outside, and compares with an undisturbed run"
    picture.box((20, 346), (720, 44), drills, RED)
    return picture.svg()


def first_run() -> str:
    """Draw loss and accuracy over the steps, from the lines of the first run."""
    text = (DOCS / "first_run.txt").read_text(encoding="utf-8")
    num_steps = int(re.findall(r"step \d+/(\d+)", text)[0])
    train = [
        (int(step), float(loss)) for step, loss in re.findall(r"step (\d+)/\d+ +loss (\S+)", text)
    ]
    ends = re.findall(r"epoch (\d+)/(\d+)", text)
    epochs = int(ends[-1][1])
    tests = re.findall(r"epoch (\d+) done: test loss (\S+) +test accuracy (\S+)%", text)
    steps = [int(epoch) * num_steps // epochs for epoch, _, _ in tests]
    picture = Picture(760, 270, "Loss and accuracy of the first run")
    losses = [float(loss) for _, loss, _ in tests]
    top = max([loss for _, loss in train] + losses)
    low = min(float(accuracy) for _, _, accuracy in tests) - 2
    for left, title, bottom_text, top_text in (
        (60, "loss", "0", f"{top:.2f}"),
        (440, "test accuracy", f"{low:.0f} %", "100 %"),
    ):
        picture.text((left, 24), title, bold=True)
        picture.box((left, 40), (280, 180))
        picture.text((left - 6, 222), bottom_text, anchor="end")
        picture.text((left - 6, 46), top_text, anchor="end")
        picture.text((left + 280, 240), f"step {num_steps}", anchor="end")

    def at(left: int, step: int, share: float) -> tuple[float, float]:
        return left + 280 * step / num_steps, 220 - 180 * share

    picture.curve([at(60, step, loss / top) for step, loss in train], BLUE)
    picture.curve([at(60, s, loss / top) for s, loss in zip(steps, losses, strict=True)], ORANGE)
    shares = [(float(accuracy) - low) / (100 - low) for _, _, accuracy in tests]
    picture.curve([at(440, s, share) for s, share in zip(steps, shares, strict=True)], ORANGE)
    picture.text((60, 258), "blue: training; orange: test set. Drawn from the lines of the run.")
    return picture.svg()


PICTURES = {
    "products.svg": products,
    "dp_and_ddp.svg": dp_and_ddp,
    "ring_all_reduce.svg": ring_all_reduce,
    "buckets.svg": buckets,
    "lost_at_a_fault.svg": lost_at_a_fault,
    "first_run.svg": first_run,
}


def write_all() -> None:
    """Write every picture beside this file."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    write_all()
