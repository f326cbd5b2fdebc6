"""What a run leaves of each step: its samples (the ledger), and a digest that tells it from others.

A file of digests, as of the ledger, is of a rank and a start: a line of JSON, on rank 0 the facts
that explain differences, then a RECORD of each step, just before its update; the last one counts.
The gradient is summed over ranks, and clipped. WHY a share of it in each step: all of it takes some
percent of a step; a wrong gradient makes wrong weights, which show in each later share.
"""

import logging
import sys
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, LedgerWriter, next_start
from hardened_ddp.data.batches.nesting import dense_parts, tensors_of
from hardened_ddp.model.checksum import checksum
from hardened_ddp.model.plain_values import is_users
from hardened_ddp.settings.record import agreed_settings, code_hash
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

MOST_COST, _LEAST_STEPS = 0.015, 20  # auto ends digests that cost more of so many steps, or more
_SHARES = 16  # of the gradient, of which auto takes one in each step
_MOST_WAITING = 4096  # steps whose numbers are on a GPU
_BATCH_BYTES = 1 << 20  # of the batches of a step that are read for the digest


class Records:
    """Writes the ledger and the digests of one rank. Disk errors never stop training."""

    def __init__(self, parts: Parts, progress: Progress, left_out: LeftOut) -> None:
        self._parts, self._progress, self._left_out = parts, progress, left_out
        # Of the samples of each step, and of its digests. None: they are off.
        self.ledger: LedgerWriter | None = None
        self.digests: LedgerWriter | None = None
        self._mode = parts.config.run.digests
        self._gradients = parts.gradients.local.parameters if parts.group.is_main else []
        self._shares = min(_SHARES, len(self._gradients) or 1) if self._mode == "auto" else 1
        self._waiting: list[tuple[Any, ...]] = []  # records of which parts are on a GPU
        self._began_at = self.cost_s = 0.0

    def open(self, folder: Path) -> None:
        """Begin new files, for the steps from here on. Collective: all ranks."""
        self.close()
        parts, group, step = self._parts, self._parts.group, self._progress.step
        begin = partial(next_start, folder)
        start = group.run_on_main(begin, what="opening the ledger")  # collective
        new = partial(LedgerWriter, folder, start=start, rank=group.launch.rank, step=step)
        if parts.config.run.ledger:
            sampling = getattr(parts.sampler, "sampling", None)  # a stream has none
            self.ledger = new(facts=parts.sampler.ledger_facts())
            self.ledger.order_of = sampling.order if sampling and group.is_main else None
            self._left_out.begin(start)
        if self._mode != "off":
            self.digests = new(facts=facts_of_attempt(parts) if group.is_main else {}, name=DIGESTS)

    def commit(self, attempt: Attempt) -> None:
        """Record a step, before its update. Rank-local; waits for a GPU once in 4096 steps."""
        began = time.perf_counter()
        self._began_at = self._began_at or began
        parts, progress, window = self._parts, self._progress, attempt.window
        left_out, num = attempt.outcome is not Outcome.DONE, self._shares
        share = [] if left_out else self._gradients[progress.step % num :: num]
        digest = checksum([each.grad for each in share if each.grad is not None])
        rate = 1.0 * parts.optimizer.param_groups[0]["lr"]  # a copy: a tensor is changed in place
        known = progress.step, window.epoch, progress.max_micro_batch, window.start, window.size
        numbers = sum(each.double() for each in attempt.losses), attempt.count, attempt.norm, rate
        self._waiting.append(((*known, left_out, hash_of(attempt.batches)), digest, numbers))
        if not parts.is_async_device or len(self._waiting) == _MOST_WAITING:
            self._write()
        self.cost_s += time.perf_counter() - began

    def _write(self) -> None:
        """Write the records that wait. Waits for the device."""
        if self.digests is not None:
            for known, digest, numbers in self._waiting:
                self.digests.add(RECORD.pack(*known, *digest.tolist(), *map(float, numbers)))
        self._waiting.clear()

    def after_report(self) -> None:
        """Write what the device had; end digests that cost too much. Collective: all ranks."""
        self._write()
        group = self._parts.group
        if self.digests is None or self._mode != "auto" or group.tracker.num_steps < _LEAST_STEPS:
            return
        share = self.cost_s / (time.perf_counter() - self._began_at)
        share = group.run_on_main(lambda: share, what="digests")  # collective
        self._mode = "on" if share <= MOST_COST else "off"  # it is judged once
        if self._mode == "off":
            self.digests.close()
            self.digests = None
            log.info("digests end here: %.1f %% of a step; --digests on keeps them", 100 * share)

    def sync(self) -> None:
        """Have on the disk what is recorded of the steps that are done. Any thread, any rank.

        Raises OSError.
        """
        if self._left_out.entries:
            self._left_out.write()
        for written in (self.ledger, self.digests):
            if written is not None and (files := written.files()):
                Disk().sync_files(files[0].parent, files)

    def close(self, *, is_failed: bool = False) -> None:
        """Write what is left, or say that it is lost. is_failed: wait for no device. Rank-local."""
        if not is_failed:
            self._write()
        for written in (self.ledger, self.digests):
            if written is not None:
                written.close()
        self.digests = None


def hash_of(batches: Sequence[Batch]) -> int:
    """Hash this rank's samples: their inputs and labels, of which so many bytes are read."""
    number, left = 0, _BATCH_BYTES
    tensors = tensors_of([(batch.inputs, batch.targets) for batch in batches])
    for part in [part for whole in tensors for part in dense_parts(whole) if part.is_cpu]:
        rows = part.detach() if part.dim() else part.detach().view(1)
        # WHY not all of it: contiguous() may copy what it gets
        rows = rows[: left * len(rows) // max(1, rows.nbytes) + 1].contiguous()
        # WHY not view(-1): of one element it may keep a step of 4, and then has no bytes
        raw = rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)[:left].numpy()
        number, left = zlib.crc32(raw.data, number), left - len(raw)
    return number


def facts_of_attempt(parts: Parts) -> dict[str, Any]:  # Any: JSON
    """Give the facts of this start that can explain why its numbers differ from another's."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    gpu = torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "no GPU"
    code, libraries = {"hardened_ddp": code_hash()}, {"python": sys.version.split()[0]}
    for name, module in sorted(sys.modules.items()):
        # WHY not the attributes: a lazy module would import. And None keeps one from being imported
        own = getattr(module, "__dict__", {})
        if "." not in name and "__version__" in own:
            libraries[name] = str(own["__version__"])
        src = str(own.get("__file__"))
        if src.endswith(".py") and is_users(name) and "main__" not in name and Path(src).is_file():
            code[name] = f"{zlib.crc32(Path(src).read_bytes()):08x}"
    facts: dict[str, Any] = {"schema": 2, "world_size": parts.group.world_size, "code": code}
    facts |= {"global_batch": parts.global_batch, "threads": torch.get_num_threads()}
    facts |= {"device": f"{gpu}, {cpu}, {torch.backends.cpu.get_cpu_capability()}"}
    facts |= {"settings": agreed_settings(parts.config), "data": parts.data.fingerprint}
    return {**facts, **parts.sampler.ledger_facts(), "libraries": libraries}
