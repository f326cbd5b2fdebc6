"""The command drill: the list, one drill, all of them, and the table for the documents.

Its exit status is 0 if all verdicts are as expected, 1 if not, 2 for an unknown name or a wrong
setting.
"""

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddp_drills.fault import Fault
from ddp_drills.faults import all_faults, find
from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import nearest, shown

if TYPE_CHECKING:
    from ddp_drills.compare import Verdict
    from ddp_drills.runner import Drills
    from ddp_drills.work import Work

ALL = "all"
_CAPTION = "Measured by `drill all --table` on"
_OF_THE_DRILL: tuple[str, ...] = ("run_name", "output_dir", "resume", "ledger", "model", "dataset")
_OF_THE_DRILL += ("model_args", "dataset_args", "single_gpu", "time_limit")


def run_drills(request: Request, *, output: TextIO, env: Mapping[str, str]) -> int:
    """Run the command drill. Raises ConfigError for an unknown name or a wrong setting."""
    name = request.options["name"]
    if not name:
        _say(output, list_faults())
        return 0
    faults, num_ranks = read_order(request)
    work = read_work(request, num_ranks)
    folder = Path(tempfile.mkdtemp(prefix="drill-"))
    drills = prepare(work, folder, env)
    _say(output, [f"undisturbed run: {work.model} on {work.dataset}, {work.num_ranks} ranks ..."])
    try:
        reference = drills.reference()
        _say(output, [f"the undisturbed run took {reference.wall_s:.1f} s"])
        verdicts = report(drills, faults, output)
    except RuntimeError as error:
        _say(output, [f"FAIL: {error}", f"see {folder}"])
        return 1
    if table := request.options["table"]:
        write_table(Path(table), markdown(verdicts, num_ranks))
    if all(verdict.passed for verdict in verdicts):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    _say(output, [f"the files of the runs are in {folder}"])
    return 1


def report(drills: "Drills", faults: Sequence[Fault], output: TextIO) -> "list[Verdict]":
    verdicts = []
    for fault in faults:
        verdicts.append(drills.run(fault))
        is_table = len(faults) > 1 and verdicts[-1].passed
        _say(output, [row_of(verdicts[-1])] if is_table else lines_of(verdicts[-1]))
    if len(faults) > 1:
        num_failed = sum(not verdict.passed for verdict in verdicts)
        _say(output, [f"{len(verdicts)} drills: {num_failed or 'none'} failed"])
    return verdicts


def read_order(request: Request) -> tuple[list[Fault], int]:
    """Read which faults, on how many ranks. Raises ConfigError."""
    name, ranks = request.options["name"], request.options["ranks"]
    if not ranks.isdigit() or not 1 <= int(ranks) <= 64:
        raise ConfigError(
            f"--ranks: found {shown(ranks)}, needs a whole number from 1 to 64",
            fix=own_command("drill", "--help"),
        )
    fault = find(name)
    if fault is None and name != ALL:
        near = nearest(name, [*(known.name for known in all_faults()), ALL])
        listed = "they are listed by the command in the next line"
        meant = f"did you mean {near}?" if near else listed
        raise ConfigError(f"no drill is called {shown(name)}; {meant}", fix=_list_command())
    num_ranks = int(ranks)
    if fault is not None and fault.min_ranks > num_ranks:
        raise ConfigError(
            f"drill {name} needs {fault.min_ranks} ranks or more, not {num_ranks}",
            fix=own_command("drill", name, "--ranks", str(fault.min_ranks)),
        )
    chosen = [fault] if fault else [f for f in all_faults() if f.min_ranks <= num_ranks]
    return chosen, num_ranks


def read_work(request: Request, num_ranks: int) -> "Work":
    """Read what to train. Raises ConfigError with everything that is wrong in the settings."""
    from ddp_drills.work import DEFAULTS, Work

    resolved = resolve(request, world_size=num_ranks)
    refused = [name for name in _OF_THE_DRILL[:4] if name in request.settings.values]
    if refused or resolved.config.device.single_gpu:
        names = ", ".join(f"--{name}" for name in refused or ["single_gpu"])
        raise ConfigError(f"{names}: a drill sets that by itself", fix=_list_command())
    config = resolved.config
    given = {name for name, source in resolved.sources.items() if source != "default"}
    flags = [f"--config={request.config_file}"] if request.config_file else []
    flags += [] if request.edited_file else ["--no_config"]
    flags += [f"--{name}={value}" for name, value in DEFAULTS.items() if name not in given]
    flags += [
        # WHY not always: a flag's text has no quotes
        f"--{name}={value if isinstance(value, str) else yaml_word(value)}"
        for name, value in request.settings.values.items()
        if name not in _OF_THE_DRILL
    ]
    # WHY here: the list of drills is printed without torch
    import torch

    gpus_needed = 1 if config.device.backend == "gloo" else num_ranks  # with gloo they may share
    if config.device.cpu_only or torch.cuda.device_count() < gpus_needed:
        flags.append("--cpu_only")
    else:
        flags.append("--deterministic")  # WHY: else two runs on GPUs may differ in the last bits
    return Work(
        num_ranks=num_ranks,
        model=config.model.model if given & {"model", "dataset"} else "mlp",
        model_args=config.model.model_args,
        dataset=config.data.dataset,
        dataset_args=config.data.dataset_args,
        may_download=config.data.download,
        streaming=config.data.streaming,
        flags=tuple(flags),
    )


def prepare(work: "Work", folder: Path, env: Mapping[str, str]) -> "Drills":
    """Prepare drills that start processes with this Python."""
    from ddp_drills.processes import start_ranks
    from ddp_drills.runner import Drills

    return Drills(work, folder, partial(start_ranks, env))


def list_faults() -> list[str]:
    """List names, what happens, and the expected verdict."""
    faults = all_faults()
    lines = [f"{len(faults)} drills; each compares a run with a fault to an undisturbed one."]
    for fault in faults:
        lines += [f"  {fault.name:<22} {fault.text}", f"  {'':<22}   -> {fault.verdict}"]
    words = {"one": faults[0].name, "all": ALL}
    return lines + [f"run {what}: {own_command('drill', name)}" for what, name in words.items()]


def lines_of(verdict: "Verdict") -> list[str]:
    fault = verdict.fault
    return [
        f"drill {fault.name}: {fault.text}",
        f"  the run:   {verdict.ended}",
        f"  weights:   {verdict.weights}",
        f"  ledger:    {verdict.ledger}",
        f"  time lost: {verdict.lost_s:.1f} s",
        f"  message:   {verdict.message or '(none expected)'}",
        f"  expected:  {fault.verdict}",
        *(f"  problem:   {problem}" for problem in verdict.problems),
        "PASS" if verdict.passed else "FAIL",
    ]


def row_of(verdict: "Verdict") -> str:
    word = "PASS" if verdict.passed else "FAIL"
    fault = verdict.fault
    return f"{word}  {fault.name:<22} {verdict.lost_s:5.1f} s lost  {fault.verdict}"


def write_table(path: Path, table: Sequence[str]) -> None:
    """Write the table to path; replace the table in a document that has one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (index for index, line in enumerate(lines) if line.startswith(_CAPTION))
    begin = next(found, len(lines))
    end = begin + 2  # the caption, an empty line, and then rows
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    text = "\n".join([*lines[:begin], *table, *lines[end:]])
    path.write_text(text + "\n", encoding="utf-8")


def markdown(verdicts: "Sequence[Verdict]", num_ranks: int) -> list[str]:
    import torch

    lines = [
        f"{_CAPTION} {os.cpu_count()} CPUs, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {datetime.now(UTC):%Y-%m-%d}:",
        "",
        f"| drill | what happens | expected outcome, on {num_ranks} ranks | time lost | passed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        fault = verdict.fault
        cells = [f"`{fault.name}`", fault.text, fault.verdict, f"{verdict.lost_s:.1f} s"]
        lines.append(f"| {' | '.join([*cells, 'yes' if verdict.passed else 'no'])} |")
    return lines


def _list_command() -> str:
    return f"all of them are listed by: {own_command('drill')}"


def _say(output: TextIO, lines: Sequence[str]) -> None:
    # WHY: a reader of the first lines only (drill | head) closes the pipe; that is no error.
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            output.write(line.encode("ascii", "backslashreplace").decode("ascii") + "\n")
        output.flush()
