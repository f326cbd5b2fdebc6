"""The command report: one HTML file of a run, or of several side by side, which needs no network.

Owns its text, its tables and how Plotly gets into it: compressed, which the browser unpacks, so
that the page has 2 MB and not 5. All text from the run folder is escaped.
Does not own: what is plotted (report_plots.py).
"""

import base64
import gzip
import html
import json
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from ddp_runs import report_plots
from ddp_runs.report_plots import ACCOUNT, Figure, moment
from ddp_runs.run_files import RunView, mirror_words, read_run
from ddp_runs.watch import duration
from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.run_json import number_of
from hardened_ddp.reporting.sinks import write_whole
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.earlier_run import find_folder
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.schema import flatten
from hardened_ddp.settings.wording import as_typed, counted, listed, printable

_MOST_ROWS = 300
_GOOD_SHARE = 0.7
_NOT_TRAINING = [name for name in ACCOUNT if name != "training"]
_STATES = {  # how a verdict begins; of others with the state's own name
    "stopped": "Stopped as it was told to, and saved,",
    "running": "Still running,",
    "dead": "Ended without a word",
    "unknown": "Not known how it ended,",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1180px;
  padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { border-bottom: 1px solid #ddd; margin-top: 2em; }
h3 { margin: 1.2em 0 0.3em; }
table { border-collapse: collapse; margin: 0.6em 0; font-size: 0.92em; display: block;
  overflow-x: auto; }
th, td { border: 1px solid #ddd; padding: 0.25em 0.6em; text-align: left; vertical-align: top; }
th { background: #f5f5f5; } tr.other td { background: #fff6e5; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 0.8em; }
.plot { min-height: 200px; } .wide { grid-column: 1 / -1; }
.bad { color: #b00020; } .quiet { color: #666; } .quiet:empty, .bad:empty { display: none; }
.verdict { font-size: 1.07em; padding: 0.7em 1em; background: #f4f6f8; border-left: 5px solid #888;
  border-radius: 3px; }
.verdict.finished { border-color: #2ca02c; background: #f1f8f1; }
.verdict.failed, .verdict.dead { border-color: #d62728; background: #fcf1f1; }
.verdict.stopped, .verdict.running { border-color: #1f77b4; background: #f0f5fa; }
"""
_SCRIPT = """
async function drawAll() {
  const packed = atob(document.getElementById("plotly").textContent.trim());
  const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const figure of figures) {
    const layout = Object.assign({
      title: {text: figure.title, font: {size: 15}, x: 0.02},
      margin: {l: 60, r: 15, t: 45, b: 80}, height: 360, hoverlabel: {align: "left"},
      font: {family: "system-ui, sans-serif", color: "#333"},
      legend: {font: {size: 11}, orientation: "h", y: -0.24, yanchor: "top"},
    }, figure.layout);
    layout.yaxis = Object.assign({automargin: true, exponentformat: "power"}, layout.yaxis);
    const options = {responsive: true, displayModeBar: false};
    await Plotly.newPlot(figure.id, figure.data, layout, options);
  }
  document.body.dataset.drawn = figures.length;
}
drawAll().catch((error) => {
  document.getElementById("trouble").textContent = "The plots can't be drawn: " + error;
});
"""


def run_report(options: Mapping[str, str], *, output: TextIO) -> int:
    """Write the report and say where it is. Raises RunFolderError."""
    from plotly.offline import get_plotlyjs

    names = options["run"].splitlines()
    folders = [find_folder(name, Path(options["output_dir"])) for name in names]
    short = [folder.resolve().name for folder in folders]
    shown = [str(f) if short.count(n) > 1 else n for f, n in zip(folders, short, strict=True)]
    runs = {name: read_run(folder) for name, folder in zip(shown, folders, strict=True)}
    page = page_of(runs, str(get_plotlyjs()))
    place = folders[0] if len(folders) == 1 else Path(options["output_dir"])
    path = Path(options["output"] or place / "report.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # WHY not resolved: what /dev/stdout leads to is no path if it is a pipe
        write_whole(path if path.is_fifo() else path.resolve(), page)
    except OSError as error:
        raise RunFolderError(
            f"the report can't be written to {path}: {error.strerror}",
            fix="give another place: --output report.html",
        ) from error
    size = path.stat().st_size / 1e6
    output.write(f"{as_typed(path)}: {size:.1f} MB; open it in a browser, it needs no network\n")
    return 0


def page_of(runs: Mapping[str, RunView], plotly: str) -> str:
    """Write the page of one run, or of several side by side.

    runs: by the name that the page shows; plotly: the library's JavaScript.
    """
    figures, title = list[Figure](), f"Training report: {', '.join(runs)}"
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">made {moment(time.time())[:19]} UTC by the command report'
        '</p><p id="trouble" class="bad"></p>',
        *(_verdict(f"{name}: " if len(runs) > 1 else "", run) for name, run in runs.items()),
        '<div class="plots">',
        _place(report_plots.goodput_plot(runs), figures, is_wide=True),
        *(_place(figure, figures) for figure in report_plots.curve_plots(runs)),
        "</div>",
        _overview(runs),
    ]
    for name, run in runs.items():
        body.append(_one_run(name, run, figures))
    body.append(_settings(runs))
    packed = base64.b64encode(gzip.compress(plotly.encode(), 9, mtime=0)).decode()
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            f'<script type="text/plain" id="plotly">{packed}</script>',
            f'<script type="application/json" id="figures">{_json(figures)}</script>',
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _place(figure: Figure, figures: list[Figure], *, is_wide: bool = False) -> str:
    """Keep a figure for the script, and return its place in the page; none without data."""
    if not figure["data"]:
        return ""
    figure["id"] = f"plot-{len(figures)}"
    figures.append(figure)
    return f'<div class="plot{" wide" if is_wide else ""}" id="{figure["id"]}"></div>'


def _verdict(name: str, run: RunView) -> str:
    """Write how a run went, above everything else."""
    head, *others = map(_text, sentences_of(run))
    lines = "".join(f"<br>{sentence}." for sentence in others)
    return f'<p class="verdict {run.state}"><b>{_text(name)}{head}.</b>{lines}</p>'


def sentences_of(run: RunView) -> list[str]:
    """Say whether it finished, how it went, what it survived and lost, and what is unusual."""
    account, total = run.account, run.main.total_steps
    head = f"{_STATES.get(run.state, run.state.capitalize())} at step {run.step:,}"
    head += f" of {total:,}" if total else ""
    head += f" after {duration(account['wall'])}" if account else ""
    return [part for part in (head, _went(run), _survived(run), _unusual(run)) if part]


def _went(run: RunView) -> str:
    words, (_, losses) = list[str](), run.curve("loss/train")
    if len(losses) > 1:
        went = "fell" if losses[-1] < losses[0] else "rose" if losses[-1] > losses[0] else "stayed"
        words.append(f"the loss {went} from {losses[0]:.4g} to {losses[-1]:.4g}")
    if "step" in run.best:
        metric = str(run.best.get("metric", "value")).removesuffix("/test")
        words.append(f"best {metric} {number_of(run.best, 'value'):.4g} at step {run.best['step']}")
    text = "; ".join(words)
    return text[:1].upper() + text[1:]


def _survived(run: RunView) -> str:
    """Say which faults it came through, and what that cost."""
    account = run.account
    num_restarts = sum(bool(attempt.get("start_up")) for attempt in run.attempts[1:])
    kinds = [event.kind for event in run.events if event.kind != "hang" or event.level == "ERROR"]
    counts = [(len(run.failures), "failure"), (num_restarts, "restart")]
    counts += [(kinds.count(kind), kind) for kind in ("hang", "rollback")]
    counts.append((kinds.count("retry"), "retried step"))
    told = [counted(number, noun) for number, noun in counts if number]
    if run.left_out:
        told.append(f"{counted(len(run.left_out), 'sample')} left out")
    if not told:
        return "No fault" if run.attempts or run.events else ""
    went_on = "It came through" if run.state in ("finished", "stopped", "running") else "It had"
    restarts = sum(number_of(attempt, "start_up") for attempt in run.attempts[1:])
    gone = account.get("down", 0.0) + account.get("lost", 0.0) + restarts
    share = f" ({gone / account['wall']:.1%})" if gone else ""
    return f"{went_on} {', '.join(told)}; time lost by them: {duration(gone)}{share}"


def _unusual(run: RunView) -> str:
    found = []
    account = run.account
    if account and account["goodput"] < _GOOD_SHARE:
        largest = max(_NOT_TRAINING, key=lambda name: account.get(name, 0.0))
        share = account[largest] / account["wall"]
        found.append(f"goodput is {account['goodput']:.0%}: {ACCOUNT[largest][0]} took {share:.0%}")
    steps, losses = run.curve("loss/train")
    if bad := [step for step, loss in zip(steps, losses, strict=True) if loss != loss]:
        found.append(f"the loss is NaN at step {bad[0]}")
    if num_slow := sum(event.kind == "slow" for event in run.events):
        found.append(f"{counted(num_slow, 'warning')} of a slow rank")
    if run.problems:
        found.append(f"{counted(len(run.problems), 'file')} that can't be read or believed")
    return f"Unusual: {'; '.join(found)}" if found else ""


def _overview(runs: Mapping[str, RunView]) -> str:
    columns = [_facts_of(run) for run in runs.values()]
    return _table(["", *runs], [[name, *(each[name] for each in columns)] for name in columns[0]])


def _facts_of(run: RunView) -> dict[str, str]:
    account, total = run.account, run.main.total_steps
    results = ", ".join(f"{name} {values[-1]:.5g}" for name, (_, values) in run.tested.items())
    saved = listed([step for step, _ in run.checkpoints], 16) or "none"
    settings = {name: value.strip("'\"") for name, value, _ in run.settings}
    return {
        "folder": str(run.folder),
        "state": run.state,
        "step": f"{run.step} of {total}" if total else str(run.step),
        "result": results or "no evaluation",
        "ranks": _ranks(run),
        "wall time": duration(account["wall"]) if account else "",
        "goodput": f"{account['goodput']:.1%}" if account else "",
        "attempts": str(len(run.attempts)),
        "faults": ", ".join(run.faults) or "none",
        "samples left out": str(len(run.left_out)),
        "checkpoints": f"{saved}; best: {run.best['step']}" if "step" in run.best else saved,
        "mirror": mirror_words(run) or "none",
        "data": settings.get("dataset", ""),
        "model": settings.get("model", ""),
    }


def _one_run(name: str, run: RunView, figures: list[Figure]) -> str:
    parts = [f"<h2>{_text(name)}</h2>", '<div class="plots">']
    if run.attempts or run.events or run.checkpoints:
        parts.append(_place(report_plots.attempts_plot(run), figures, is_wide=True))
    parts += [_place(report_plots.rank_plot(run), figures), "</div>"]
    if run.problems:
        parts.append("<h3>Files that can't be read or believed</h3>")
        parts.append(_table(["file"], [[problem] for problem in run.problems]))
    events = [
        [f"{moment(e.time)[:19]} UTC", e.step, e.kind, listed(e.ranks, 16), e.text]
        for e in run.events
    ]
    parts.append("<h3>Events</h3>" + _table(["time", "step", "kind", "ranks", "what"], events))
    failures = [[f"{number_of(f, 'step'):.0f}", str(f.get("error", f))[:500]] for f in run.failures]
    if failures:
        parts.append("<h3>Attempts that failed</h3>" + _table(["step", "why"], failures))
    if run.left_out:
        keys = list(dict.fromkeys(key for entry in run.left_out for key in entry))[:8]
        rows = [[str(entry.get(key, ""))[:300] for key in keys] for entry in run.left_out]
        parts.append("<h3>Samples left out</h3>" + _table(keys, rows))
    of_process, of_versions = ("host", "pid"), ("torch", "python", "cuda", "system")
    ranks = [
        [
            *(rank.rank, *map(rank.process.get, of_process)),
            *(f"{rank.device} {rank.device_name}", rank.backend),
            *map(rank.versions.get, of_versions),
        ]
        for rank in run.ranks
    ]
    head = ["rank", "host", "process", "device", "backend", "torch", "Python", "CUDA", "system"]
    parts.append("<h3>Ranks, machines and versions</h3>" + _table(head, ranks))
    return "\n".join(parts)


def _settings(runs: Mapping[str, RunView]) -> str:
    """Write what is not at its default first; what differs between the runs is marked."""
    values = [{name: (value, source) for name, value, source in r.settings} for r in runs.values()]
    defaults = {name: yaml_word(value) for name, value in flatten(Config()).items()}
    changed, others, marked = list[list[str]](), list[list[str]](), list[bool]()
    for name in dict.fromkeys(name for of_run in values for name in of_run):
        cells = [of_run.get(name, ("", "")) for of_run in values]
        is_other = len({value for value, _ in cells}) > 1
        row = [name, *(f"{v}   ({s})" if s and s != "default" else v for v, s in cells)]
        # WHY the value too: after a resume, all values come from the run
        is_set = (s not in ("default", "run", "") or v != defaults.get(name) for v, s in cells)
        if is_other or any(is_set):
            changed.append(row)
            marked.append(is_other)
        else:
            others.append(row)
    head = ["setting", *runs]
    page = f"<h2>Settings</h2>\n{_table(head, changed, marked=marked)}"
    if others:
        table = _table(head, others)
        page += f"\n<details><summary>{len(others)} at their default</summary>{table}</details>"
    return page


def _table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, marked: Sequence[bool] = ()
) -> str:
    if not rows:
        return '<p class="quiet">none</p>'
    lines = ["<table><tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>"]
    for number, row in enumerate(rows[:_MOST_ROWS]):
        kind = ' class="other"' if number < len(marked) and marked[number] else ""
        cells = ["" if cell is None else str(cell) for cell in row]
        lines.append(f"<tr{kind}>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    lines.append("</table>")
    if len(rows) > _MOST_ROWS:
        lines.append(f'<p class="quiet">and {len(rows) - _MOST_ROWS} more</p>')
    return "\n".join(lines)


def _ranks(run: RunView) -> str:
    sizes = [f"{number_of(a, 'world_size'):.0f}" for a in run.attempts if a.get("world_size")]
    shown = listed([size for size, _ in groupby(sizes)], 6)
    return f"{shown or len(run.ranks)} x {run.main.device_name}"


def _text(value: str) -> str:
    return html.escape(printable(value))


def _json(value: Any) -> str:  # Any: JSON
    """Write JSON inside of a script element, where "</" would end it; NaN becomes null."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(value, cls=PlotlyJSONEncoder)
    return text.replace("</", "<\\/").replace("<!", "<\\!")
