"""The command diff: where two runs part, and why, as far as their records show it.

It trains nothing. Where the samples are the same and their bytes are not, it reads the samples of
that step again from both datasets, and names those that differ.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TextIO

import torch

from ddp_runs.replay_records import Digests, differing, other_machine, read_digests
from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import read_run
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.ledger import DIGESTS
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.sampler import EpochOrder, share_of
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import ANY_FAILURE, ConfigError, RunFolderError
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.earlier_run import SAVED_SETTINGS, find_folder
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.typed_command import own_command, shell_command
from hardened_ddp.settings.wording import counted, listed

# Settings that change no weight: what is written and watched, and how long is waited.
_HARMLESS = {
    *("--backend", "--timeout_s", "--eval_batch_size", "--eval_every", "--log_interval"),
    *("--time_limit", "--hang_after_s", "--output_dir", "--run_name", "--resume", "--debug"),
    *("--checkpoint_every_steps", "--checkpoint_every_epochs", "--keep_last", "--keep_milestones"),
    *("--ledger", "--digests", "--metrics", "--best_metric", "--max_errors"),
}
_SHOWN = 8
"""Of a list, so that all fits on a screen."""

_PARTED = {
    "samples": "it takes other samples",
    "left out": "one run left it out",
    "data": "the same samples, of other bytes",
    "ranks": "the same samples, on another number of ranks",
    "loss": "the same samples, of the same bytes, give another loss",
    "gradient": "the same loss, another gradient",
}


def run_diff(options: Mapping[str, str], *, output: TextIO) -> int:
    """Print where two runs part; return 0 if they do nowhere, else 1. Raises RunFolderError."""
    names = options["run"].splitlines()
    if len(names) != 2:
        raise ConfigError(f"diff compares two runs, found {len(names)}", fix="name two run folders")
    folders = [find_folder(name, Path("runs")) for name in names]
    both = one, two = read_digests(folders[0]), read_digests(folders[1])
    shared = [number for number in one.steps if number in two.steps]
    if not shared:
        spans = [f"{min(digests.steps)} to {max(digests.steps)}" for digests in both]
        raise RunFolderError(
            f"no step has digests in both runs: one has those of {spans[0]}, the other {spans[1]}",
            fix="compare runs that did the same steps",
        )
    unlike_at = ((n, one.steps[n].parts_from(two.steps[n])) for n in shared)
    step, what = next((found for found in unlike_at if found[1]), (shared[-1], ""))
    a, b = facts = [digests.facts_at(step) for digests in both]
    unlike = differences(a, b)
    faults = [sum(event.kind in FAULTS for event in read_run(folder).events) for folder in folders]
    lines = [f"{name + ':':10}{listed(found) or 'the same'}" for name, found in unlike.items()]
    lines.append(f"{'faults:':10}{faults[0]} in the first run, {faults[1]} in the second")
    if not what:
        lines.append(f"equal in all {counted(len(shared), 'step')} that both have")
    else:
        orders = [(own["settings"].get("--seed"), own["num_samples"]) for own in facts]
        if what == "data" and orders[0] != orders[1]:  # a place in another order
            what = "samples"
        lines.append(f"they part at step {step}: {_PARTED[what]}")
        named = name_samples(one, two, step) if what == "data" else []
        changed = compare_sources(one, two, step, unlike["code"])
        more = [*named, *reasons(unlike, changed, what, bool(named)), *side_by_side(one, two, step)]
        lines += [f"  {line}" for line in more]
        lines.append(f"look at it: {own_command('replay', folders[0], '--step', str(step))}")
    print("\n".join(lines), file=output)
    return int(bool(what))


def differences(one: Json, two: Json) -> dict[str, list[str]]:
    """Say how far two starts differ: in settings that can change a number, code, data and so on."""
    a, b, code, other = one["settings"], two["settings"], one["code"], two["code"]
    ranks = one["world_size"], two["world_size"]
    return {
        "settings": differing(a, b, [name for name in {**a, **b} if name not in _HARMLESS]),
        "code": [name for name in {**code, **other} if code.get(name) != other.get(name)],
        "data": [] if one["data"] == two["data"] else ["another dataset, by its fingerprint"],
        "machine": other_machine(one, two),
        "ranks": [] if ranks[0] == ranks[1] else [f"{ranks[0]} / {ranks[1]}"],
    }


def reasons(
    unlike: Mapping[str, list[str]], changed: Sequence[str], what: str, is_known: bool
) -> list[str]:
    """Say what explains a difference. is_known: its samples are named."""
    found = []
    if names := listed(unlike["settings"]):
        found.append(f"settings differ: {names}")
    if names := listed(unlike["code"]):
        found.append("\n    ".join([f"the code differs: {names}", *changed[:_SHOWN]]))
    if names := listed(unlike["machine"]):
        found.append(f"the machine differs: {names}: the same sums, rounded otherwise")
    if what == "ranks":
        found.append(
            "other ranks: the same sums, added up in another order; what a model draws, such as "
            "dropout, follows from the rank"
        )
    if what == "left out":
        found.append("a sample or a step failed in one run only: see skipped_samples.jsonl")
    if is_known:
        return found
    if len(found) > 1:
        found.append("which of them it is: replay the step with one of them at a time")
    return found or [
        "nothing recorded differs: a device that is not deterministic (train both with "
        "--deterministic), code, data or variables outside of what is recorded, or a memory fault; "
        "replay both: the run that its replay contradicts is the one at fault"
    ]


def side_by_side(one: Digests, two: Digests, first: int) -> list[str]:
    """Show what both runs recorded of the step where they part, and of the next ones."""
    lines = []
    for number in range(first, first + 3):
        if number in one.steps and number in two.steps:
            pair = [(step.loss, step.main) for step in (one.steps[number], two.steps[number])]
            (loss, a), (other, b) = pair
            line = f"step {number}: loss {loss:.6g} / {other:.6g}; gradient norm {a.norm:.4g} / "
            line += f"{b.norm:.4g}; learning rate {a.rate:.3g} / {b.rate:.3g}; "
            line += f"samples {a.size} / {b.size}"
            lines.append(line.replace("; gradient norm nan / nan", ""))
    return lines


def compare_sources(one: Digests, two: Digests, step: int, names: Sequence[str]) -> list[str]:
    """Write the commands that compare modules, by the copies that both runs kept of them."""
    commands = []
    for name in names:
        hashes = [digests.facts_at(step)["code"].get(name) for digests in (one, two)]
        paths = [
            d.run / DIGESTS / f"{name}-{h}.py" for d, h in zip((one, two), hashes, strict=True)
        ]
        if all(path.is_file() for path in paths):
            commands.append(f"look at it: {shell_command('diff', *paths)}")
    return commands


def name_samples(one: Digests, two: Digests, step: int) -> list[str]:
    """Name the samples whose bytes differ, by reading them again, or those that may do so."""
    suspects = sorted(suspects_of(one, two, step))
    if not suspects:
        return [
            "which sample it is, is not known: the order of this dataset is not that of indices"
        ]
    try:
        found = differing_samples(one, two, suspects)
    except ANY_FAILURE as error:  # WHY broad: the user's dataset
        return [f"the samples can't be read again: {error}", f"it is some of {listed(suspects)}"]
    some = "sample" if len(suspects) == 1 else f"some of {len(suspects)} samples:"
    if found:
        return [f"sample {found[0]} differs", *(f"and sample {name}" for name in found[1:_SHOWN])]
    return [
        "read again now, both datasets give the same: one of them has changed since its run",
        f"it is {some} {listed(suspects)}",
    ]


def suspects_of(one: Digests, two: Digests, step: int) -> set[int]:
    """Return the samples that all steps with other bytes share, and no step with equal ones has.

    Of the epochs after the first difference too: each takes the samples in another order. If there
    are none, several samples differ: then those of the first such step.
    """
    facts = one.facts_at(step)
    size, seed = int(facts["num_samples"]), int(facts["settings"]["--seed"])
    order_of = lru_cache(2)(partial(EpochOrder, size, seed))
    others, first, innocent = list[set[int]](), set[int](), set[int]()
    for number, left in one.steps.items() if size else ():
        a, other = left.main, two.steps.get(number)
        if other is None or (a.start, a.size) != (other.main.start, other.main.size):
            continue
        for rank in left.ranks.keys() & other.ranks.keys():
            ends = share_of(a.size, rank=rank, world_size=left.facts["world_size"])
            taken = {*order_of(a.epoch).take(*(a.start + end for end in ends)).tolist()}
            if left.ranks[rank].batches == other.ranks[rank].batches:
                innocent |= taken
            else:
                others.append(taken)
                first |= taken if number == step else set()
    return first.intersection(*others) - innocent or first - innocent or first


def differing_samples(one: Digests, two: Digests, suspects: Sequence[int]) -> list[str]:
    """Read samples from the datasets of both runs; name those that differ, with their files."""
    sources = []
    for digests in (one, two):
        config = resolve(Request(config_file=str(digests.run / SAVED_SETTINGS))).config
        data = build_data(config.data, leaves_out=True, task=config.task.task, evaluates=False)
        sources.append((data.train, Fetcher(data.train, seed=config.device.seed)))
    found = []
    for index in suspects:
        a, b = (_bytes_of(fetcher, index) for _, fetcher in sources)
        if a != b:
            files = [file_of(dataset, index) for dataset, _ in sources]
            found.append(f"{index} ({' / '.join(files)})" if any(files) else str(index))
    return found


def _bytes_of(fetcher: Fetcher, index: int) -> list[bytes]:
    batch = fetcher[(0, torch.tensor([index]))]
    leaves = tensors_of((batch.inputs, batch.targets))
    return [part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in leaves]
