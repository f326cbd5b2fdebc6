"""The command diff: where two runs part, and why, as far as their records show it.

It trains nothing. Where the samples are the same and their bytes are not, it reads the samples of
that step again from both datasets, and names those that differ.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch

from ddp_runs.replay_records import Digests, differing, other_machine, read_digests
from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import read_run
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.sampler import EpochOrder
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import ANY_FAILURE, ConfigError, RunFolderError
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.earlier_run import SAVED_SETTINGS, find_folder
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import counted, listed

# Settings that change no weight: what is written and watched, and how long is waited.
_HARMLESS = {
    *("--backend", "--timeout_s", "--eval_batch_size", "--eval_every", "--log_interval"),
    *("--time_limit", "--hang_after_s", "--output_dir", "--run_name", "--resume", "--debug"),
    *("--checkpoint_every_steps", "--checkpoint_every_epochs", "--keep_last", "--keep_milestones"),
    *("--ledger", "--digests", "--metrics", "--best_metric", "--max_errors"),
}
_PARTED = {
    "samples": "it takes other samples",
    "left out": "one run left it out: see skipped_samples.jsonl",
    "data": "the same samples, of other bytes",
    "ranks": "the same samples on another number of ranks, so the same sums are added up in "
    "another order; what a model draws, such as dropout, follows from the rank",
    "loss": "the same samples, of the same bytes, give another loss",
    "gradient": "the same loss, another gradient",
}
_NOTHING = "nothing recorded differs: a device that is not deterministic (train both with "
_NOTHING += "--deterministic), or what is not recorded; replay both: the run that its replay "
_NOTHING += "contradicts is the one at fault"


def run_diff(options: Mapping[str, str], *, output: TextIO) -> int:
    """Print where two runs part; return 0 if they do nowhere, else 1. Raises RunFolderError."""
    names = options["run"].splitlines()
    if len(names) != 2:
        raise ConfigError(f"diff compares two runs, found {len(names)}", fix="name two run folders")
    folders = [find_folder(name, Path("runs")) for name in names]
    one, two = map(read_digests, folders)
    shared = [number for number in one.steps if number in two.steps]
    if not shared:
        spans = [f"{min(digests.steps)} to {max(digests.steps)}" for digests in (one, two)]
        raise RunFolderError(
            f"no step has digests in both runs: one has those of {spans[0]}, the other {spans[1]}",
            fix="compare runs that did the same steps",
        )
    unlike_at = ((n, one.steps[n].parts_from(two.steps[n])) for n in shared)
    step, what = next((found for found in unlike_at if found[1]), (shared[-1], ""))
    a, b = one.facts_at(step), two.facts_at(step)
    unlike = differences(a, b)
    faults = [sum(event.kind in FAULTS for event in read_run(folder).events) for folder in folders]
    lines = [f"{name + ':':10}{listed(found) or 'the same'}" for name, found in unlike.items()]
    lines.append(f"{'faults:':10}{faults[0]} in the first run, {faults[1]} in the second")
    if not what:
        lines.append(f"equal in all {counted(len(shared), 'step')} that both have")
    else:
        orders = [(facts["settings"].get("--seed"), facts["num_samples"]) for facts in (a, b)]
        if what == "data" and orders[0] != orders[1]:  # a place in another order
            what = "samples"
        named = name_samples(one, two, step) if what == "data" else []
        lines.append(f"they part at step {step}: {_PARTED[what]}")
        if not any(unlike.values()) and what in ("loss", "gradient"):
            named = [_NOTHING]
        lines += [f"  {line}" for line in [*named, *side_by_side(one, two, step)]]
        lines.append(f"look at it: {own_command('replay', folders[0], '--step', str(step))}")
    print("\n".join(lines), file=output)
    return int(bool(what))


def differences(one: Json, two: Json) -> dict[str, list[str]]:
    """Say how far two starts differ: in settings that can change a number, code, data and so on."""
    a, b, code, other = one["settings"], two["settings"], one["code"], two["code"]
    return {
        "settings": differing(a, b, [name for name in {**a, **b} if name not in _HARMLESS]),
        "code": [name for name in {**code, **other} if code.get(name) != other.get(name)],
        "data": [] if one["data"] == two["data"] else ["another dataset, by its fingerprint"],
        "machine": other_machine(one, two),
        "ranks": differing(one, two, ["world_size"]),
    }


def side_by_side(one: Digests, two: Digests, first: int) -> list[str]:
    """Show what both runs recorded of the step where they part, and of the next ones."""
    lines = []
    for number in range(first, first + 3):
        if number in one.steps and number in two.steps:
            a, b = one.steps[number], two.steps[number]
            line = f"step {number}: loss {a.loss:.6g} / {b.loss:.6g}; gradient norm "
            line += f"{a.main.norm:.4g} / {b.main.norm:.4g}; learning rate {a.main.rate:.3g} / "
            lines.append(f"{line}{b.main.rate:.3g}; samples {a.main.size} / {b.main.size}")
    return lines


def name_samples(one: Digests, two: Digests, step: int) -> list[str]:
    """Name the samples of a step whose bytes differ, by reading them from both datasets again."""
    facts, window = one.facts_at(step), one.steps[step].main
    if not facts["num_samples"]:
        return ["which sample it is, is not known: its order does not follow from the seed"]
    order = EpochOrder(facts["num_samples"], int(facts["settings"]["--seed"]), window.epoch)
    taken = order.take(window.start, window.start + window.size).tolist()
    found, sources = [], []
    try:
        for digests in (one, two):
            config = resolve(Request(config_file=str(digests.run / SAVED_SETTINGS))).config
            data = build_data(config.data, leaves_out=True, task=config.task.task, evaluates=False)
            sources.append((data.train, Fetcher(data.train, seed=config.device.seed)))
        for index in taken:
            a, b = (_bytes_of(fetcher, index) for _, fetcher in sources)
            if a != b:
                files = [file_of(dataset, index) for dataset, _ in sources]
                found.append(f"{index} ({' / '.join(files)})" if any(files) else str(index))
    except ANY_FAILURE as error:  # WHY broad: the user's dataset
        return [f"the samples can't be read again: {error}", f"it is some of {listed(taken)}"]
    changed = "read again now, both datasets give the same: one of them has changed since its run; "
    changed += f"it is some of samples {listed(taken)}"
    return [f"sample {name} differs" for name in found[:8]] or [changed]


def _bytes_of(fetcher: Fetcher, index: int) -> list[bytes]:
    batch = fetcher[(0, torch.tensor([index]))]
    leaves = tensors_of((batch.inputs, batch.targets))
    return [part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in leaves]
