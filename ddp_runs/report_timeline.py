"""The attempts of a run on a time axis, and what happened to it, as a figure of Plotly.

Does not own: the other plots (report_plots.py), what counts as an event (run_events.py).
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ddp_runs.report_plots import SYMBOLS, Figure, shortened
from ddp_runs.run_files import RunView
from ddp_runs.run_json import number_of
from hardened_ddp.settings.wording import counted

_MOST_MARKS = 500


def attempts_plot(run: RunView) -> Figure:
    """Plot the attempts of a run on a time axis, with everything that happened to it."""
    texts = _attempt_texts(run)
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "attempt",
            "showlegend": False,
            "y": ["attempts"] * len(run.attempts),
            "base": [_moment(number_of(a, "began_at")) for a in run.attempts],
            "x": [1000 * max(0.5, number_of(a, "now") - number_of(a, "began_at"))
                  for a in run.attempts],
            "text": texts,
            "hovertext": texts,
            "hoverinfo": "text",
            "textposition": "inside",
            "insidetextanchor": "start",
            "marker": {
                "color": ["#9ecae1" if n % 2 else "#c6dbef" for n in range(len(run.attempts))],
                "line": {"color": "#3182bd", "width": 1},
            },
        }
    ]  # fmt: skip
    marks = [
        _marks(
            "checkpoint", "line-ns-open", "#8c564b",
            [(moment, f"checkpoint of step {step}") for step, moment in run.checkpoints],
        )
    ]  # fmt: skip
    for kind, (symbol, color) in SYMBOLS.items():
        found = [
            (e.time, f"{kind}: {_ranks(e.ranks)}: {e.text}") for e in run.events if e.kind == kind
        ]
        marks.append(_marks(kind, symbol, color, found))
    data = [*bars, *(mark for mark in marks if mark["x"])]
    layout = {
        "xaxis": {"type": "date"},
        "barmode": "overlay",
        "height": 320,
        "hovermode": "closest",
    }
    return {"title": "attempts, and what happened (times in UTC)", "data": data, "layout": layout}


def _marks(
    name: str, symbol: str, color: str, found: Sequence[tuple[float, str]]
) -> dict[str, Any]:  # Any: JSON
    found = found[-_MOST_MARKS:]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [_moment(moment) for moment, _ in found],
        "y": [name] * len(found),
        "text": [shortened(text) for _, text in found],
        "hoverinfo": "text+x",
        "marker": {"symbol": symbol, "color": color, "size": 11, "line": {"width": 1}},
    }


def _attempt_texts(run: RunView) -> list[str]:
    """Say of each attempt which steps it did, and how it ended."""
    began_at = number_of(run.ranks[0], "began_at") if run.ranks else 0.0  # of the newest start
    return [
        # WHY: an attempt that wrote no end has failed or was killed, unless it is the newest start
        _attempt_text(
            number,
            attempt,
            otherwise="failed or killed"
            if number < len(run.attempts) or number_of(attempt, "now") < began_at
            else run.state,
        )
        for number, attempt in enumerate(run.attempts, start=1)
    ]


def _attempt_text(number: int, attempt: Mapping[str, Any], *, otherwise: str) -> str:
    ended = str(attempt.get("ended") or "") or otherwise
    ranks = number_of(attempt, "world_size")
    size = f", {counted(int(ranks), 'rank')}" if ranks else ""
    steps = f"{number_of(attempt, 'first_step'):.0f} to {number_of(attempt, 'step'):.0f}"
    return f"{number}: steps {steps}{size}, {ended}"


def _moment(seconds: float) -> str:
    """Write a time as Plotly reads it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    except (ValueError, OverflowError, OSError):
        return "1970-01-01 00:00:00"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
