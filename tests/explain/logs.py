"""Logs that explain is tested on, their forms, and what it says of them.

composed.txt: failures that this machine can't have, made from the format strings of their sources:
one for each cause without a program in failing.txt, which needs GPUs, NCCL, InfiniBand, broken
hardware, Slurm, Kubernetes, Windows, macOS, or a package that the tests do not need. `{rank}` and
`{other}` are numbers that a test chooses, `\\n` is the end of a line. healthy.txt: logs without a
failure, with all that looks like one and is none. templates.txt: what stands in many logs. FORMS:
prefixes of launchers, schedulers and containers, line ends, colours, healthy lines between, and
logs that were cut.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ddp_doctor.explain.command import run_explain
from tests.marks import sections

_TEMPLATES = sections(Path(__file__).with_name("templates.txt"))
PEER = _TEMPLATES["a lost peer"].strip()


@dataclass(frozen=True, slots=True)
class Composed:
    """A line of composed.txt: one line of a log, or the last line of a traceback."""

    code: str
    kind: str
    """line: of no rank; rank: a traceback, whose rank must be named; job: one that blames nobody"""

    text: str


_LINES = Path(__file__).with_name("composed.txt").read_text(encoding="utf-8").splitlines()
LOGS = [Composed(*line.replace("\\n", "\n").split(" ", 2)) for line in _LINES]

WITHOUT_LOG = {
    "nccl-timeout": "timeouts() makes its logs",
    **dict.fromkeys(["stop-silent", "lost-finished-rank", "memory-gpu-weights"], "short_logs.txt"),
    "nccl-aborted": "needs NCCL and GPUs, and a second failure",
    "killed-outside": "in no log: in the run folder, TestFiles",
}
"""The causes that have neither a program nor a log here, and why."""


def log_of(case: Composed, *, rank: int, other: int) -> str:
    """Make a log: a few healthy lines, then the failure."""
    text = case.text.format(rank=rank, other=other)
    lines = [f"epoch 1 step {step} loss 1.{step} lr 3e-4" for step in range(8)]
    return joined(lines, of_rank(rank, traceback_of(text)) if case.kind != "line" else [text])


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


def joined(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"


def traceback_of(last: str, *, line: int = 57) -> list[str]:
    """Make a traceback that ends with this exception."""
    return [
        "Traceback (most recent call last):",
        f'  File "/home/ana/train.py", line {line}, in <module>',
        "    main(args)",
        f'  File "/home/ana/train.py", line {line - 20}, in main',
        "    loss = step(model, batch)",
        "           ^^^^^^^^^^^^^^^^^^",
        '  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, '
        "in _call",
        "    return self._call_impl(*args, **kwargs)",
        *last.splitlines(),
    ]


def timeouts(seqs: dict[int, int], *, world_size: int) -> str:
    """Make the log of an NCCL timeout: the number of the collective in which each rank waits."""
    lines = [f"Starting with {world_size} processes", "epoch 1 step 10 loss 2.1"]
    for form in _TEMPLATES["an NCCL timeout"].splitlines():
        lines += [form.format(rank=rank, seq=seq, before=seq - 1) for rank, seq in seqs.items()]
    return joined(lines)


def waiting(calls: str) -> str:
    """Make the log of an NCCL timeout of what each rank waits in: ALLREDUCE 90, BROADCAST 90.

    untold as the last word: no line tells in which group.
    """
    *words, last = [call.split() for call in calls.split(", ")]
    words += [last] * (last != ["untold"])
    text = timeouts({rank: int(seq) for rank, (_, seq) in enumerate(words)}, world_size=len(words))
    for rank, (op, _) in enumerate(words):
        text = re.sub(rf"(\[rank{rank}\].*OpType=)ALLREDUCE", rf"\g<1>{op}", text)
    return text if last in words else re.sub(r".*failure detected.*\n", "", text)


def with_other_size(text: str, *, rank: int) -> str:
    """Have one rank wait in a collective of 7 elements."""
    return re.sub(rf"(\[rank{rank}\].*NumelIn=)\d+", r"\g<1>7", text)


def block_of(failures: dict[int, int], *, root: int, host: str = "node1") -> str:
    """Make torchrun's last block: the exit status of each failed rank."""

    def entry(index: int, rank: int) -> str:
        pid, status = 4000 + rank, failures[rank]
        told = f"Signal {-status} (SIGKILL) received by PID {pid}" if status < 0 else (
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        )  # fmt: skip
        facts = {"index": index, "host": host, "rank": rank, "status": status, "pid": pid}
        return _TEMPLATES["a rank in torchrun's block"].format(**facts, told=told)

    others = "".join(entry(i + 1, rank) for i, rank in enumerate(failures) if rank != root)
    others = others or "  <NO_OTHER_FAILURES>\n"
    return _TEMPLATES["torchrun's block"].format(others=others, root=entry(0, root))


def made_of(text: str) -> tuple[str, list[str]]:
    """Make a log of a text of ours; give it, and the words of each @says.

    PREFIX@raises LAST, or PEER: a traceback; @torchrun RANK:STATUS ... root RANK: its last block;
    @timeouts RANK:SEQ ... of SIZE, after LAST WORDS, if there are; @waiting CALLS; @goodbye: what
    NCCL says of a rank that leaves; PREFIX@objects JSON: a traceback whose lines stand for %s.
    """
    lines: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        kinds = "says|raises|objects|torchrun|timeouts|waiting|goodbye"
        found = re.fullmatch(rf"(.*)@({kinds})(?: (.*))?", line)
        prefix, kind, given = found.groups("") if found else (line, "", "")
        told, *last_words = given.split(", after ")
        numbers = {int(rank): int(n) for rank, n in re.findall(r"(\d+):(-?\d+)", told)}
        match kind:
            case "says":
                words.append(given)
            case "raises":
                last = PEER if given == "PEER" else given
                lines += [prefix + part for part in traceback_of(last)]
            case "objects":
                raised = traceback_of("KeyError: 'label'")
                lines += [given.replace("%s", json.dumps(prefix + part)[1:-1]) for part in raised]
            case "torchrun":
                lines += block_of(numbers, root=int(given.split()[-1])).splitlines()
            case "timeouts":
                log = timeouts(numbers, world_size=int(told.split()[-1])).splitlines()
                lines += [*log[:2], *last_words, *log[2:]]
            case "waiting":
                lines += waiting(given).splitlines()
            case _:
                told = _TEMPLATES["a process group that is left"].strip() if kind else ""
                lines.append(prefix + told)
    return joined(lines), words


_BARS = "".join(
    f"\rEpoch 1:  {i}%|###       | {i}/100 [00:0{i % 10}<00:20, 4.1it/s, loss=0.{i}]"
    for i in range(10, 99)
)
HEALTHY = {
    **sections(Path(__file__).with_name("healthy.txt")),
    "progress bars": _BARS + "\n",
    "bars at the end of the line": _BARS.replace("\r", "\n") + "\n",
    "error as a metric": "step 10 train_error 0.31 val_error=0.29 error: 0.30\n" * 50,
}
ENDED = {
    *("lightning", "trainer", "slurm", "deepspeed", "told to stop, and saved", "this suite"),
    *("a retried download", "exception that was ignored", "a logged exception", "status 0"),
    *("a restart that succeeded", "addresses of Docker Desktop, and training in Chinese"),
    *("late checkpoints", "diffusers", "a time limit, and a later job that finished"),
}
"""Those that say that the job ended as it should; the others only stop."""

_TRAINING = _TEMPLATES["training"].splitlines()
Form = Callable[[str], str]


def each_line(form: Form) -> Form:
    """Change every line."""
    return lambda text: joined([form(line) for line in text.splitlines()])


def with_healthy_lines(text: str) -> str:
    """Put training output between the lines."""
    chance = random.Random(len(text))
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if chance.random() < 0.3:
            lines.append(chance.choice(_TRAINING))
    return joined(lines)


def with_much_around(text: str) -> str:
    """Put hundreds of lines of training output before and after."""
    many = joined(_TRAINING * 40)
    return f"{many}{text}{many}"


def cut_top(text: str) -> str:
    """Lose the first lines, up to the second one of the traceback."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "Traceback" in line), 4)
    return joined(lines[start + 1 :])


def cut_end(text: str) -> str:
    """Lose what follows, in the middle of a line."""
    return text.rstrip("\n") + "\n[rank99]:[E1122 08:08:33.1 ProcessGr"


FORMS: Mapping[str, Form] = {
    "as it is": lambda text: text,
    "docker": each_line(lambda line: f"2026-11-22T08:08:33.123456789Z {line}"),
    "kubectl": each_line(lambda line: f"[pod/job-worker-0/pytorch] {line}"),
    "container runtime": each_line(lambda line: f"2026-11-22T08:08:33.123456789Z stderr F {line}"),
    "srun on one task": each_line(lambda line: f"0: {line}"),
    "torchrun tee": each_line(lambda line: f"[default0]:{line}"),
    "colours": each_line(lambda line: f"\x1b[31m{line}\x1b[0m"),
    "windows": each_line(lambda line: line + "\r"),
    "logging": each_line(lambda line: f"[2026-11-22 08:08:33,123][ERROR] {line}"),
    "mpirun": each_line(lambda line: f"[1,0]<stderr>:{line}"),
    "ray": each_line(lambda line: f"(RayTrainWorker pid=3112, ip=10.0.0.7) {line}"),
    "a notebook": each_line(lambda line: f"       {json.dumps(line + chr(10))},"),
    "gcloud's JSON": each_line(lambda line: f'    "textPayload": {json.dumps(line)},'),
    "healthy lines between": with_healthy_lines,
    "much around": with_much_around,
    "cut at the top": cut_top,
    "cut at the end": cut_end,
}


def explain(*logs: Path) -> dict[str, Any]:
    """Give what --json writes. Any: JSON."""
    output = StringIO()
    status = run_explain([str(log) for log in logs], wants_json=True, output=output)
    found: dict[str, Any] = json.loads(output.getvalue())
    assert status == (1 if found["verdict"] == "unknown" else 0)
    return found


def explain_text(text: str, folder: Path) -> dict[str, Any]:
    """Explain a text as a file."""
    (log := folder / "train.log").write_text(text, encoding="utf-8")
    return explain(log)


def code_of(found: dict[str, Any]) -> str:
    return str(found["cause"]["code"]) if found["cause"] else str(found["verdict"])


def rank_of(found: dict[str, Any]) -> int | None:
    """Return the rank that is named, if it is one."""
    return found["guilty"][0]["rank"] if len(found["guilty"]) == 1 else None
