"""What a run leaves of each step: its samples (the ledger), and a digest that tells it from others.

A file digests/NNNN-rank-R.bin of a run folder is of one rank, and one start of the run or return to
an earlier step. It is a line of JSON, on rank 0 the facts that explain differences, then a RECORD
(data/batches/ledger.py) of each step that was committed: the last one of a step counts.
The digest of the gradient, 16 bytes by model/checksum.py, is that of the sum over ranks, not yet
clipped: rank 0 takes it. WHY a share of it in each step: all of it takes some percent of a step; a
wrong gradient makes wrong weights, which show in each later share.
Read by ddp_runs/replay_records.py: for replay, bisect, diff, verify-ledger, watch and report.
"""

import hashlib
import logging
import math
import platform
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches import ledger
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD
from hardened_ddp.data.batches.nesting import dense_parts, tensors_of
from hardened_ddp.model.checksum import Checksum, combine
from hardened_ddp.settings.record import agreed_settings, code_hash
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

MOST_COST = 0.015  # of a step's time: auto ends digests that cost more at the first report

_NUM_SHARES = 16  # of the gradient, of which auto takes one in each step
_LEAST_STEPS = 20  # before the cost is judged
_MOST_WAITING = 4096  # steps whose numbers are on a GPU; 40 bytes each
_BATCH_BYTES = 1 << 20  # of the batches of a step that are read for the digest
_JOINED_BYTES = 1 << 26  # a share of more is not copied into one tensor, on a GPU
_NOT_USERS = {*sys.stdlib_module_names, "__main__", "__mp_main__"}
_NOT_USERS |= {"hardened_ddp", "ddp_runs", "ddp_doctor", "ddp_drills"}


class Records:
    """Writes the ledger and the digests of one rank. Disk errors never stop training."""

    def __init__(self, parts: Parts, progress: Progress, left_out: LeftOut) -> None:
        self._parts, self._progress, self._left_out = parts, progress, left_out
        # Of the samples of each step, and of its digests. None: they are off.
        self.ledger: ledger.LedgerWriter | None = None
        self.digests: ledger.StepFile | None = None
        self._mode = parts.config.run.digests
        num_tensors = len(parts.gradients.local.parameters)
        self._num_shares = min(_NUM_SHARES, num_tensors) if self._mode == "auto" else 1
        self._numbers: torch.Tensor | None = None  # of the gradient
        # Of steps whose numbers are still on a GPU; and these: the digest, and, as the bits of
        # floats, loss, count and norm. WHY one tensor for all: small ones that outlive a step
        # fragment the memory that it frees
        self._rows: list[list[float]] = []
        self._waiting = torch.zeros((_MOST_WAITING, 5), dtype=torch.int64, device=parts.device)
        self._began_at = self.cost_s = 0.0
        self._num_steps = 0

    def open(self, folder: Path) -> None:
        """Begin new files, for the steps from here on. Collective: all ranks."""
        self.close()
        parts, step, rank = self._parts, self._progress.step, self._parts.group.launch.rank
        is_on = {ledger.FOLDER: parts.config.run.ledger, DIGESTS: self._mode != "off"}
        start = parts.group.run_on_main(  # collective
            lambda: ledger.next_start(folder, [name for name in is_on if is_on[name]]),
            what="opening the ledger",
        )
        if is_on[ledger.FOLDER]:
            sampling = getattr(parts.sampler, "sampling", None)  # a stream has none
            self.ledger = ledger.LedgerWriter(
                folder,
                start=start,
                rank=rank,
                step=step,
                facts=parts.sampler.ledger_facts(),
                order_of=sampling.order if sampling and parts.group.is_main else None,
            )
            self._left_out.begin(start)
        if is_on[DIGESTS]:
            head = {"schema": 1, "step": step, "parts": self._num_shares}
            if parts.group.is_main:
                head |= facts_of_attempt(parts)
                self._checksum = Checksum(parts.device)
            self.digests = ledger.StepFile(folder, DIGESTS, start=start, rank=rank, head=head)

    def digest(self) -> None:
        """Take the digest of a gradient, before it is clipped. On rank 0; waits for no device."""
        began = time.perf_counter()
        first = self._progress.step % self._num_shares
        share = self._parts.gradients.local.parameters[first :: self._num_shares]
        found = [each.grad for each in share if each.grad is not None]
        is_small = sum([each.nbytes for each in found]) <= _JOINED_BYTES
        if self._parts.is_async_device and is_small and found:
            found = [torch.cat([each.reshape(-1) for each in found])]
        pairs = [self._checksum.of(each) for each in found]
        self._numbers = combine(torch.stack(pairs)) if pairs else None
        self.cost_s += time.perf_counter() - began

    def commit(self, attempt: Attempt) -> None:
        """Record a step, before progress counts it. Rank-local; waits for no device."""
        began = time.perf_counter()
        self._began_at = self._began_at or began
        progress, window, is_done = self._progress, attempt.window, attempt.outcome is Outcome.DONE
        rate = self._parts.optimizer.param_groups[0]["lr"]
        row: list[float] = [
            progress.step, window.epoch, progress.max_micro_batch, window.start, window.size,
            not is_done, 0, 0, hash_of(attempt.batches), 0.0, 0.0, math.nan,
            math.nan if isinstance(rate, torch.Tensor) and not rate.is_cpu else float(rate),
        ]  # fmt: skip
        numbers, self._numbers = self._numbers if is_done else None, None  # not of a step before
        if self._parts.is_async_device:
            own = self._waiting[len(self._rows)]
            own[:2] = 0 if numbers is None else numbers
            floats = own.view(torch.float64)
            floats[2], floats[3], floats[4] = sum(attempt.losses), attempt.count, attempt.norm
            self._rows.append(row)
            if len(self._rows) == len(self._waiting):
                self._read()
        elif self.digests is not None:  # WHY not the same way: it takes ten times as long
            row[6:8] = [0, 0] if numbers is None else numbers.tolist()
            loss = sum(map(float, attempt.losses))
            row[9:12] = [loss, float(attempt.count), float(attempt.norm)]
            self.digests.add(RECORD.pack(*row))
        self.cost_s += time.perf_counter() - began
        self._num_steps += 1

    def _read(self) -> None:
        """Write the records whose numbers are on a device. Waits for it."""
        rows, self._rows = self._rows, []
        if rows and self.digests is not None:
            waiting = self._waiting[: len(rows)]
            numbers, floats = waiting.tolist(), waiting.view(torch.float64).tolist()
            for place, row in enumerate(rows):
                row[6:8], row[9:12] = numbers[place][:2], floats[place][2:]
                self.digests.add(RECORD.pack(*row))

    def after_report(self) -> None:
        """Write what the device had; end digests that cost too much. Collective: all ranks."""
        self._read()
        if self.digests is None or self._mode != "auto" or self._num_steps < _LEAST_STEPS:
            return
        share = self.cost_s / (time.perf_counter() - self._began_at)
        share = self._parts.group.run_on_main(lambda: share, what="digests")  # collective
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
        """Write what a full disk did not take, or say that it is lost. Rank-local.

        is_failed: the device may be stuck, and is not waited for.
        """
        if not is_failed:
            self._read()
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
        rows = rows[: left * len(rows) // max(1, rows.nbytes) + 1]
        # WHY not view(-1): of one element it may keep a step of 4, and then has no bytes
        flat = rows.contiguous().as_strided((rows.numel(),), (1,)).view(torch.uint8)[:left]
        # WHY not as the gradient: it has no order of a sum, and this is faster
        number = zlib.crc32(flat.numpy().data, number)
        left -= len(flat)
    return number


def facts_of_attempt(parts: Parts) -> dict[str, Any]:  # Any: JSON
    """Give the facts of this start that can explain why its numbers differ from another's.

    code: of modules of no installed package.
    """
    order, is_gpu = parts.sampler.ledger_facts(), parts.device.type == "cuda"
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2]
    processor = processor.partition("\n")[0] or platform.machine()
    code, libraries = {"hardened_ddp": code_hash()}, {}
    for name, module in sorted(sys.modules.items()):
        # WHY not the attributes: a lazy module would import. And None keeps one from being imported
        known = getattr(module, "__dict__", {})
        file, version = str(known.get("__file__") or ""), known.get("__version__")
        if isinstance(version, str) and "." not in name:
            libraries[name] = version
        # WHY no Path of each: of 2,700 modules that takes longer than all else of a start
        is_installed = "/site-packages/" in file or "/dist-packages/" in file
        is_users = not is_installed and name.partition(".")[0] not in _NOT_USERS
        if is_users and file.endswith(".py") and Path(file).is_file():
            code[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return {
        "world_size": parts.group.world_size,
        "global_batch": parts.global_batch,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(parts.device) if is_gpu else processor,
        # those of CUDA come with torch
        "kernels": torch.version.cuda if is_gpu else torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "data": parts.data.fingerprint,
        # 0: the samples of a step do not follow from the seed, of a stream or if they are drawn
        "num_samples": 0 if "is_drawn" in order else order.get("num_samples", 0),
        "settings": agreed_settings(parts.config),
        "code": code,
        "libraries": libraries,
    }
