"""The plots of the command report, as figures of Plotly: plain data, no library.

Owns what is plotted, and how many points at most. Does not own: the page (report.py).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ddp_runs.run_files import RunView
from ddp_runs.watch import ranks_of, spans_decades, spikes_of
from hardened_ddp.reporting.rank_status import WAITS, RankStatus
from hardened_ddp.reporting.run_json import number_of
from hardened_ddp.settings.wording import counted

Figure = dict[str, Any]  # Any: JSON

# Of a curve. A longer one keeps the first, the lowest, the highest and the last of each part.
MOST_POINTS = 1500
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_PARTS = {
    "data": "#ff7f0e",
    "forward": "#1f77b4",
    "backward": "#2ca02c",
    "optimizer": "#9467bd",
    WAITS[0]: "#7f7f7f",
    "other waits": "#c7c7c7",
}
ACCOUNT = {
    "training": ("training", "#2ca02c"),
    "start_up": ("start-up", "#1f77b4"),
    "data_wait": ("waiting for data", "#ff7f0e"),
    "evaluation": ("evaluation", "#9467bd"),
    "checkpoint": ("checkpoints", "#8c564b"),
    "lost": ("steps that were done twice", "#d62728"),
    "down": ("being down between attempts", "#7f7f7f"),
}
SYMBOLS = {  # what happened to a run, with its mark and its color
    "checkpoint": ("line-ns-open", "#8c564b"),
    "failure": ("x", "#d62728"),
    "restart": ("triangle-right", "#1f77b4"),
    "error": ("x", "#d62728"),
    "hang": ("hourglass", "#d62728"),
    "spike": ("triangle-up", "#d62728"),
    "rollback": ("triangle-left", "#ff7f0e"),
    "retry": ("circle", "#ff7f0e"),
    "left out": ("circle-open", "#ff7f0e"),
    "data": ("square", "#ff7f0e"),
    "slow": ("diamond", "#bcbd22"),
    "survivor save": ("star", "#2ca02c"),
    "resize": ("diamond-wide", "#17becf"),
    "stop": ("square", "#1f77b4"),
}
# What has a step, the gravest first.
_ON_CURVES: tuple[str, ...] = ("failure", "hang", "spike", "rollback", "retry", "left out", "data")
_ON_CURVES += ("survivor save", "restart")
_MOST_MARKS = 400
_MEMORY = ("memory/rss_mib", "memory/gpu_peak_mib", "memory/gpu_reserved_mib")
_SCALED = ("loss", "perplexity", "gradient norm")


def curve_plots(runs: Mapping[str, RunView]) -> list[Figure]:
    """Plot every curve of metrics.jsonl over the steps, all runs in one plot."""
    names = list(dict.fromkeys(n for run in runs.values() for p in run.points for n in p.values))
    metrics = dict.fromkeys(n.rpartition("/")[0] for n in names if n.endswith(("/train", "/test")))
    figures = [_curves(runs, m, {f"{m}/train": "train", f"{m}/test": "test"}) for m in metrics]
    for name in names:
        if name.startswith(("optimizer/", "speed/")):
            title = name.partition("/")[2].replace("_", " ")
            figures.append(_curves(runs, title, {name: ""}))
    memory = {n: n.partition("/")[2].removesuffix("_mib") for n in names if n in _MEMORY}
    if memory:
        figures.append(_curves(runs, "memory of rank 0, MiB", memory))
    return figures


def _curves(runs: Mapping[str, RunView], title: str, names: Mapping[str, str]) -> Figure:
    """Plot curves of the same kind, a color for each run and a dash for each name, and faults."""
    traces, seen = list[Figure](), list[float]()
    dashes = ("solid", "dot", "dash", "dashdot")
    for index, (label, run) in enumerate(runs.items()):
        for number, (name, short) in enumerate(names.items()):
            steps, values = thinned(*run.curve(name))
            if not steps:
                continue
            seen += [value for value in values if math.isfinite(value)]
            # WHY: the markers of many points hide the curve, and one point alone has no line
            fewest = 100 if name.endswith("/test") else 3
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(steps) < fewest else "lines",
                    "name": f"{label} {short}".strip() if len(runs) > 1 or not short else short,
                    "x": steps,
                    "y": values,
                    "line": {"color": COLORS[index % len(COLORS)], "dash": dashes[number % 4]},
                }
            )
        if name := next((name for name in names if run.curve(name)[0]), ""):
            traces += _marks_on_curve(run, name, label if len(runs) > 1 else "")
    layout: Figure = {"xaxis": {"title": {"text": "step"}}, "yaxis": {}}
    if title in _SCALED and seen and min(seen) > 0:
        layout["yaxis"] = {"type": "log" if spans_decades(seen) else "linear"}
    return {"title": title, "data": traces, "layout": layout}


def _marks_on_curve(run: RunView, name: str, label: str) -> list[Figure]:
    """Mark on a curve what happened to the run, with its text under the mouse."""
    steps, values = run.curve(name)
    at: dict[int, list[tuple[str, str]]] = {}
    for step, kind, text in marks_of(run):
        at.setdefault(step, []).append((kind, f"{kind}, step {step}: {shortened(text)}"))
    kinds = {step: min((k for k, _ in told), key=_ON_CURVES.index) for step, told in at.items()}
    traces = []
    for kind in _ON_CURVES:
        # WHY: a failure and the restart after it are at one step, and one mark would hide the other
        found = sorted(step for step, gravest in kinds.items() if gravest == kind)[-_MOST_MARKS:]
        if not found:
            continue
        at_curve = [values[max(0, bisect_right(steps, step) - 1)] for step in found]
        texts = ["<br>".join(text for _, text in at[step]) for step in found]
        traces.append(_marks(kind, found, at_curve, texts, name=f"{label} {kind}".strip()))
    return traces


def marks_of(run: RunView) -> list[tuple[int, str, str]]:
    """List what happened at which step: its kind, and its text; in the order of the steps."""
    failures = [(int(number_of(f, "step")), str(f.get("error", ""))) for f in run.failures]
    found = [(step, "failure", text) for step, text in failures]
    told = {step for step, _ in failures}
    for event in run.events:
        # WHY: a hang that ended an attempt is its failure
        is_told = event.kind == "hang" and event.step in told
        if event.step is not None and event.kind in _ON_CURVES and not is_told:
            found.append((event.step, event.kind, event.text))
    found += [(step, "spike", f"look: {command}") for step, _, command in spikes_of(run)]
    for number, attempt in enumerate(run.attempts[1:], start=2):
        # WHY: only after a rollback an attempt has no start-up of its own
        kind = "restart" if attempt.get("start_up") else "rollback"
        step = int(number_of(attempt, "first_step"))
        size = counted(int(number_of(attempt, "world_size")), "rank")
        text = f"attempt {number} begins here, on {size}"
        found += [] if any(f[:2] == (step, kind) for f in found) else [(step, kind, text)]
    for entry in run.left_out:
        text = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "step")
        found.append((int(number_of(entry, "step")), "left out", text))
    return sorted(found, key=lambda mark: mark[0])


def shortened(text: str, *, most: int = 160) -> str:
    text = text.replace("<", "&lt;")
    return text if len(text) <= most else text[: most - 3] + "..."


def goodput_plot(runs: Mapping[str, RunView]) -> Figure:
    """Plot where the wall time of each run went."""
    traces = []
    for part, (label, color) in ACCOUNT.items():
        seconds = [round(run.account.get(part, 0.0), 3) for run in runs.values()]
        bar = {"type": "bar", "orientation": "h", "name": label, "marker": {"color": color}}
        traces += [bar | {"y": list(runs), "x": seconds}] if any(seconds) else []
    words = [f"{name} {run.account['goodput']:.1%}" for name, run in runs.items() if run.account]
    # WHY reversed: Plotly begins at the bottom, and the table above it begins with the first run
    axis = {"autorange": "reversed"}
    layout = {"barmode": "stack", "height": 180 + 40 * len(runs), "yaxis": axis}
    title = f"where the time went, in seconds; goodput: {', '.join(words) or 'not known'}"
    return {"title": title, "data": traces, "layout": layout}


def rank_plot(run: RunView) -> Figure:
    """Plot the parts of the step time of each rank: a mean over the newest start."""
    times = {rank.rank: _parts_of(rank) for rank in run.ranks if rank.steps_here > 0}
    labels, traces = [f"rank {rank}" for rank in times], []
    for name, color in _PARTS.items():
        values = [round(1000 * parts.get(name, 0.0), 4) for parts in times.values()]
        bar = {"type": "bar", "name": name, "x": labels, "y": values, "marker": {"color": color}}
        traces += [bar] if any(values) else []
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "ms per step"}}}
    return {"title": "step time by rank, newest start", "data": traces, "layout": layout}


def _parts_of(rank: RankStatus) -> dict[str, float]:
    """Return the seconds of each part per step of a rank."""
    spent = rank.at_work_s()
    num_steps = 1 if rank.split_s else rank.steps_here
    waits = {"other waits": sum(spent.get(name, 0.0) for name in WAITS[1:])}
    return {name: seconds / num_steps for name, seconds in (spent | waits).items()}


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Keep at most about MOST_POINTS points of a curve, with all its extremes."""
    count = len(steps)
    if count <= MOST_POINTS:
        return list(steps), list(values)
    num_parts = MOST_POINTS // 4
    kept: set[int] = set()
    for part in range(num_parts):
        numbers = range(part * count // num_parts, (part + 1) * count // num_parts)
        finite = [i for i in numbers if math.isfinite(values[i])] or list(numbers)
        by_value = sorted(finite, key=lambda i: values[i])
        kept |= {numbers[0], by_value[0], by_value[-1], numbers[-1]}
    chosen = sorted(kept)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def attempts_plot(run: RunView) -> Figure:
    """Plot the attempts of a run on a time axis, with everything that happened to it."""
    texts = _attempt_texts(run)
    colors = ["#9ecae1" if n % 2 else "#c6dbef" for n in range(len(run.attempts))]
    bar: Figure = {"type": "bar", "orientation": "h", "name": "attempt", "showlegend": False}
    bar |= {"text": texts, "hovertext": texts, "hoverinfo": "text", "textposition": "inside"}
    bar |= {"marker": {"color": colors, "line": {"color": "#3182bd", "width": 1}}}
    bar |= {"base": [moment(a["began_at"]) for a in run.attempts], "insidetextanchor": "start"}
    bar |= {"x": [1000 * max(0.5, a["now"] - a["began_at"]) for a in run.attempts]}
    traces = [bar | {"y": ["attempts"] * len(run.attempts)}]
    happened = {"checkpoint": [(at, f"checkpoint of step {step}") for step, at in run.checkpoints]}
    for event in run.events:
        if event.kind in SYMBOLS and event.kind != "checkpoint":
            text = f"{event.kind}: {ranks_of(event.ranks)}: {event.text}"
            happened.setdefault(event.kind, []).append((event.time, text))
    for kind in (kind for kind in SYMBOLS if happened.get(kind)):
        found = happened[kind][-_MOST_MARKS:]
        moments, texts = [moment(at) for at, _ in found], [shortened(text) for _, text in found]
        traces.append(_marks(kind, moments, [kind] * len(found), texts, shows="text+x"))
    layout = {"xaxis": {"type": "date"}, "barmode": "overlay", "height": 320}
    layout["hovermode"] = "closest"
    return {"title": "attempts, and what happened (times in UTC)", "data": traces, "layout": layout}


def _marks(
    kind: str, x: list[Any], y: list[Any], texts: list[str], *, name: str = "", shows: str = "text"
) -> Figure:  # Any: a step, a time, a value, or a name
    """Draw a mark for each time that something happened, with its text under the mouse."""
    symbol, color = SYMBOLS[kind]
    trace = {"type": "scatter", "mode": "markers", "name": name or kind, "hoverinfo": shows}
    marker = {"symbol": symbol, "color": color, "size": 10, "line": {"width": 1}}
    return {**trace, "x": x, "y": y, "text": texts, "marker": marker}


def _attempt_texts(run: RunView) -> list[str]:
    found = []
    for number, attempt in enumerate(run.attempts, start=1):
        # WHY: an attempt that wrote no end has failed or was killed, unless it is the newest start
        is_newest = number == len(run.attempts) and attempt["now"] >= run.main.began_at
        ended = attempt.get("ended") or (run.state if is_newest else "failed or killed")
        ranks = int(number_of(attempt, "world_size"))
        size = f", {counted(ranks, 'rank')}" if ranks else ""
        steps = f"{attempt['first_step']:.0f} to {attempt['step']:.0f}"
        found.append(f"{number}: steps {steps}{size}, {ended}")
    return found


def moment(seconds: float) -> str:
    """Write a time as Plotly reads it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    except (ValueError, OverflowError, OSError):
        return "1970-01-01 00:00:00"
