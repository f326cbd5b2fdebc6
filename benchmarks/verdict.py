"""Medians, ratios to the bare loop, and PASS or MISS against the bars.

Owns the arithmetic and the table. A ratio is taken within one round, between runs that came right
after each other, and the median of the rounds' ratios is what counts: a machine that was slower in
one round was so for all in it. Takes values and returns values; prints nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contender_run import BASELINE, OURS, OURS_BATCHED, Measured
from workloads import NUM_EPOCHS, NUM_RANKS, Workload

FIRST_STEP_BAR = 1.05
PEAK_MEMORY_BAR = 1.05
# (field of Measured, heading of the table, format)
_COLUMNS = (
    ("steady_samples_per_s", "samples/s", ",.0f"),
    ("first_step_s", "first step s", ".2f"),
    ("peak_memory_mib", "peak MiB/rank", ",.0f"),
    ("wall_s", "wall s", ".2f"),
)

Round = Mapping[str, Measured]
"""The clean runs of one round, by contender."""


@dataclass(frozen=True, slots=True)
class Check:
    """One bar, and how this project stands to it."""

    what: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.is_met else 'MISS'}  {self.what}"


def median_of(rounds: Sequence[Round], contender: str, field: str) -> float | None:
    """Give the median of a figure; None without a clean run."""
    values = [getattr(runs[contender], field) for runs in rounds if contender in runs]
    return statistics.median(values) if values else None


def ratio_of(rounds: Sequence[Round], contender: str, field: str, *, to: str) -> float | None:
    """Give the median of the ratios within each round; None if no round has clean runs of both."""
    ratios = [
        getattr(runs[contender], field) / getattr(runs[to], field)
        for runs in rounds
        if contender in runs and to in runs
    ]
    return statistics.median(ratios) if ratios else None


def summarize(rounds: Sequence[Round], contenders: Sequence[str]) -> dict[str, dict[str, float]]:
    """Give, for each contender, each figure's median and its ratio to the bare loop."""
    fields = [name for name, _, _ in _COLUMNS] + ["step_ms", "epoch_gap_ms"]
    summary: dict[str, dict[str, float]] = {}
    for contender in contenders:
        row: dict[str, float] = {"clean_runs": sum(contender in runs for runs in rounds)}
        for field in fields:
            value = median_of(rounds, contender, field)
            ratio = ratio_of(rounds, contender, field, to=BASELINE)
            row |= {} if value is None else {field: round(value, 3)}
            row |= {} if ratio is None else {f"{field}_ratio": round(ratio, 4)}
        summary[contender] = row
    return summary


def table(workload: Workload, summary: Mapping[str, Mapping[str, float]]) -> str:
    """Write the summary for a person: the median, and behind x the ratio to the bare loop."""
    lines = [
        f"{workload.name}: {workload.about}",
        f"  {workload.samples_per_epoch:,} samples x {NUM_EPOCHS} epochs, {NUM_RANKS} ranks x "
        f"{workload.batch_size}; median over rounds, x = median of the rounds' ratios to bare",
        "  " + f"{'':16}" + "".join(f"{heading:>20}" for _, heading, _ in _COLUMNS) + "  runs",
    ]
    for contender, row in summary.items():
        cells = ""
        for field, _, form in _COLUMNS:
            value, ratio = row.get(field), row.get(f"{field}_ratio")
            text = "-" if value is None else format(value, form)
            cells += f"{text:>12}" + (f" x{ratio:6.3f}" if ratio is not None else f"{'':8}")
        lines.append(f"  {contender:16}{cells}  {int(row['clean_runs']):4}")
    return "\n".join(lines)


def check(workload: Workload, rounds: Sequence[Round], contenders: Sequence[str]) -> list[Check]:
    """Hold this project against its bars. A bar that could not be measured is missed."""
    checks = [
        _against_bare(rounds, "steady_samples_per_s", "steady", at_least=workload.steady_bar),
        _against_bare(rounds, "first_step_s", "time to first step", at_most=FIRST_STEP_BAR),
        _against_bare(rounds, "peak_memory_mib", "peak memory", at_most=PEAK_MEMORY_BAR),
    ]
    for peer in contenders:
        if peer in (OURS, OURS_BATCHED, BASELINE):
            continue
        ratio = ratio_of(rounds, OURS, "steady_samples_per_s", to=peer)
        if ratio is None:
            checks.append(Check(f"steady: not measured against {peer}", is_met=False))
        else:
            checks.append(Check(f"steady {ratio:.3f} x {peer}, needs above 1", ratio > 1))
    return checks


def _against_bare(
    rounds: Sequence[Round],
    field: str,
    what: str,
    *,
    at_least: float = 0.0,
    at_most: float = float("inf"),
) -> Check:
    ratio = ratio_of(rounds, OURS, field, to=BASELINE)
    if ratio is None:
        return Check(f"{what}: not measured", is_met=False)
    needs = f"at least {at_least:.2f}" if at_least else f"at most {at_most:.2f}"
    return Check(f"{what} {ratio:.3f} x bare, needs {needs}", at_least <= ratio <= at_most)
