"""The start of a run in a few lines: where it runs, what it trains, and what was decided for it.

Rank 0 logs them before the first step, and each rank what is its own, with --debug on the console.
"""

import logging
from textwrap import shorten

import torch

from hardened_ddp.data.batches.sampler import UNKNOWN_STEPS, WindowSampler
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.schema import DEFAULT, RUN, SETTINGS, flatten
from hardened_ddp.settings.wording import counted, listed
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

_MAX_NAMED = 12
_MAX_VALUE = 40


def tell_start(settings: Resolved, parts: Parts, progress: Progress) -> None:
    """Log how the run starts: on rank 0 in a few lines, and the facts of each rank."""
    lines = [_ranks_line(parts), _work_line(parts, progress), _auto_line(parts)]
    if changed := changed_settings(settings):
        lines.append("settings: " + "; ".join(changed))
    run = parts.config.run
    if run.keep_milestones:
        size_mb = sum(p.nbytes for p in parts.replica.module.parameters()) * 3 / 1e6
        kept = run.keep_last + run.keep_milestones + 1
        lines.append(
            f"checkpoints: at most {run.keep_milestones} of the whole run besides the last "
            f"{run.keep_last} and the best, about {kept * size_mb:,.0f} MB with AdamW's state"
        )
    if parts.group.is_main:
        is_again = progress.step or parts.group.launch.attempt
        parts.events.tell("restart" if is_again else "started", step=progress.step, told=lines)
        for line in lines:
            log.info("%s", line)
        if settings.not_used:
            log.warning("%s", not_used_line(settings))
    text = "local rank %d of %d, device %s, %d threads, dataset fingerprint %s"
    launch, fingerprint = parts.group.launch, parts.data.fingerprint[:16]
    place, num_threads = (launch.local_rank, launch.local_world_size), torch.get_num_threads()
    log.debug(text, *place, parts.group.device, num_threads, fingerprint)


def changed_settings(settings: Resolved) -> list[str]:
    """Say which settings are not at their default, grouped by where they come from."""
    values = flatten(settings.config)
    groups: dict[str, list[str]] = {}
    for name, source in settings.sources.items():
        if source != DEFAULT and values[name] != SETTINGS[name].default:
            place = "the continued run" if source == RUN else source.rsplit(":", 1)[0]
            word = shorten(yaml_word(values[name]), _MAX_VALUE, placeholder="...")
            groups.setdefault(place, []).append(f"{name} {word}")
    return [f"{place}: {listed(named, _MAX_NAMED)}" for place, named in groups.items()]


def not_used_line(settings: Resolved) -> str:
    """Say what was changed in config.yaml without effect on the run that is continued."""
    named = [f"{name} ({place})" for name, place in settings.not_used.items()]
    flag = f"--{next(iter(settings.not_used))} VALUE"
    return (
        f"not used: {listed(named, _MAX_NAMED)}: the continued run keeps its own values; "
        f"to change one, give it as a flag: {flag}"
    )


def _ranks_line(parts: Parts) -> str:
    group, launch = parts.group, parts.group.launch
    count = "1 rank" if group.world_size == 1 else f"{group.world_size} ranks"
    hosts = f" on {launch.num_nodes} nodes" if launch.num_nodes > 1 else ""
    attempt = f" (restart {launch.attempt})" if launch.attempt else ""
    on_gpu = group.device.type == "cuda"
    device = torch.cuda.get_device_name(group.device) if on_gpu else "CPU"
    precision = "fp32" if parts.precision.name == "off" else parts.precision.name
    sums = "no process group"
    if group.world_size > 1:
        threads = counted(torch.get_num_threads(), "thread")
        sums = f"backend {group.backend}, gradients {parts.gradients.how}, {threads}"
    by = "hand" if launch.launcher == "none" else launch.launcher
    how = f"{count}{hosts}, started by {by}{attempt}"
    return f"{how}: {device}, {sums}, precision {precision}"


def _work_line(parts: Parts, progress: Progress) -> str:
    config, world_size = parts.config, parts.group.world_size
    numbers = [p.numel() for p in parts.replica.module.parameters()]
    trained = sum(p.numel() for p in parts.gradients.local.by_name.values())
    frozen = f", {trained:,} of them trained" if trained != sum(numbers) else ""
    test = 0 if parts.data.test is None else len(parts.data.test)  # type: ignore[arg-type]  # map-style
    has_size = isinstance(parts.sampler, WindowSampler)
    size = f"{parts.sampler.size:,} samples" if has_size else "a stream"
    if isinstance(parts.sampler, WindowSampler) and (drawn := parts.sampler.sampling) is not None:
        size += f", {drawn.length:,} drawn per epoch ({drawn.name})"
    each = -(-parts.global_batch // world_size)
    micro = -(-each // max(1, parts.sampler.batch_size))
    cut = f"{world_size} x {each}" + (f" in {micro} micro-batches" if micro > 1 else "")
    done = f", {progress.step} done" if progress.step else ""
    total = parts.length.total
    steps = f"{total:,} step{'' if total == 1 else 's'}{done}"
    if not parts.length.is_known:
        steps = "steps not known"
    if parts.average is not None:
        frozen += f", {parts.average}"
    return (
        f"model {config.model.model}: {sum(numbers):,} parameters{frozen}; dataset "
        f"{config.data.dataset}: {size}{f', {test:,} to test' if test else ''}; "
        f"{parts.global_batch} per step = {cut}; {steps}"
    )


def _auto_line(parts: Parts) -> str:
    config = parts.config
    values = flatten(config)
    reader = parts.train_loader.reader
    found = {
        "task": parts.task.name,
        "amp": parts.precision.name,
        "backend": parts.group.backend,
        "num_workers": str(reader.num_workers) + (" (in memory)" if parts.data.in_memory else ""),
        "channels_last": "on" if parts.replica.inputs.channels_last else "off",
        "lr_schedule": _lr_schedule(parts),
        "checkpoint_every_steps": "measured",
    }
    if parts.group.world_size > 1:
        found["find_unused_parameters"] = "on" if parts.gradients.allows_unused else "off"
    chosen = [f"{name} {word}" for name, word in found.items() if values[name] in (None, "auto")]
    return "auto: " + (", ".join(chosen) or "nothing")


def _lr_schedule(parts: Parts) -> str:
    chosen = parts.schedule.config.lr_schedule
    if chosen == "constant" and parts.length.most == UNKNOWN_STEPS:
        return "constant (the number of steps is not known; with --max_steps N: cosine)"
    return str(chosen)
