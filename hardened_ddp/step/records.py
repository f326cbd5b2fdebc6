"""What a run leaves of each step: its samples (the ledger), and a digest that tells it from others.

The digests are the files digests/NNNN-rank-R.bin of a run folder: one for each rank and each start
of the run, or return to an earlier step. A file is a line of JSON, the facts that explain
differences, then a RECORD (data/batches/ledger.py) of each step that was committed. Of a step that
was repeated the last record counts; one cut off by a crash is dropped. Copies of the user's modules
lie beside them. The digest of the gradient, 16 bytes by model/checksum.py, is that of the sum over
ranks, not yet clipped: rank 0 alone takes it. WHY a share of it in each step: all of it takes some
percent of a step; a wrong gradient makes wrong weights, which show in each later share. On a GPU
the numbers wait on the device, and are read together with the losses.
Read by ddp_runs/replay_records.py: for replay, bisect, diff, verify-ledger, watch and report.
"""

import contextlib
import hashlib
import json
import logging
import math
import platform
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, LedgerWriter, next_start
from hardened_ddp.data.batches.nesting import dense_parts, tensors_of
from hardened_ddp.gradients.sums import real
from hardened_ddp.model.checksum import Checksum, combine
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.sinks import FileSink
from hardened_ddp.settings.record import agreed_settings
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

PARTS = 16
"""Steps in which auto takes all of the gradient once."""

MOST_COST = 0.015
"""Of a step's time. Where digests cost more, auto ends them at the first report."""

_LEAST_STEPS = 20  # before the cost is judged
_BATCH_BYTES = 1 << 20  # of the batches of a step that are read for the digest
_JOINED_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}  # a share of more is not copied into one tensor
_DEVICE_WORDS = 1 << 20  # of the tables on a GPU
_KEEP_BYTES = 1 << 22
_PACKAGES = {"site-packages", "dist-packages"}
_KERNELS = {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"}
_KERNELS |= {"CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"}


class Records:
    """Writes the ledger and the digests of one rank. Disk errors never stop training."""

    def __init__(self, parts: Parts, progress: Progress, left_out: LeftOut) -> None:
        self._parts, self._progress, self._left_out = parts, progress, left_out
        # Of the samples of each step, and of its digests. None: they are off.
        self.ledger: LedgerWriter | None = None
        self.sink: FileSink | None = None
        wanted = parts.config.run.digests
        self._shares = shares_of(parts.gradients.local.parameters, PARTS if wanted == "auto" else 1)
        self._is_on, self._is_judged = wanted != "off", wanted == "on"
        self._checksum: Checksum | None = None
        self._numbers: torch.Tensor | None = None  # of the gradient
        # Of steps whose numbers are still on the device; and these: the pair, and loss, count, norm
        self._rows: list[list[int | float]] = []
        self._waiting: tuple[torch.Tensor, torch.Tensor] | None = None
        self._began_at = self.cost_s = 0.0
        self._num_steps = 0

    def open(self, folder: Path) -> None:
        """Begin new files, for the steps from here on. Collective: all ranks."""
        self.close()
        parts, step, rank = self._parts, self._progress.step, self._parts.group.launch.rank
        if parts.config.run.ledger:
            start = parts.group.run_on_main(  # collective
                lambda: next_start(folder), what="opening the ledger"
            )
            sampling = getattr(parts.sampler, "sampling", None)  # a stream has none
            self.ledger = LedgerWriter(
                folder,
                start=start,
                rank=rank,
                step=step,
                facts=parts.sampler.ledger_facts(),
                order_of=sampling.order if sampling and parts.group.is_main else None,
            )
            self._left_out.begin(start)
        if not self._is_on:
            return
        start = parts.group.run_on_main(  # collective
            lambda: next_start(folder, DIGESTS), what="opening the digests"
        )
        path = folder / DIGESTS / f"{start:04d}-rank-{rank}.bin"
        self.sink = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        facts = facts_of_attempt(parts, keep_in=path.parent)
        head = {"schema": 1, "step": step, "parts": len(self._shares), **facts}
        self.sink.add(json.dumps(head).encode() + b"\n")
        self.sink.flush()
        if self._checksum is None and parts.group.is_main:
            words = _DEVICE_WORDS if parts.is_async_device else None
            self._checksum = Checksum(parts.device, piece=words)

    def digest(self) -> None:
        """Take the digest of a gradient, before it is clipped. On rank 0; waits for no device."""
        assert self._checksum is not None  # of rank 0
        began = time.perf_counter()
        found = []
        for parameter, start, stop in self._shares[self._progress.step % len(self._shares)]:
            if (gradient := parameter.grad) is not None:
                flat = real(gradient) if gradient.is_complex() else gradient
                found.append(flat.reshape(-1)[start:stop])
        kind = "cuda" if self._parts.is_async_device else "cpu"
        if len(found) > 1 and sum([each.nbytes for each in found]) <= _JOINED_BYTES[kind]:
            found = [torch.cat(found)]
        pairs = [self._checksum.of(each) for each in found]
        self._numbers = combine(torch.stack(pairs)) if pairs[1:] else next(iter(pairs), None)
        self.cost_s += time.perf_counter() - began

    def commit(self, attempt: Attempt) -> None:
        """Record a step, before progress counts it. Rank-local; waits for no device."""
        began = time.perf_counter()
        self._began_at = self._began_at or began
        progress, window, is_done = self._progress, attempt.window, attempt.outcome is Outcome.DONE
        rate = self._parts.optimizer.param_groups[0]["lr"]
        row: list[int | float] = [
            progress.step, window.epoch, progress.max_micro_batch, window.start, window.size,
            not is_done, 0, 0, _hash(attempt.batches), 0.0, 0.0, math.nan,
            math.nan if isinstance(rate, torch.Tensor) and not rate.is_cpu else float(rate),
        ]  # fmt: skip
        numbers, self._numbers = self._numbers if is_done else None, None  # not of a step before
        if self._parts.is_async_device:
            self._queue(row, numbers, attempt)
        elif self.sink is not None:  # WHY not the same way: it takes ten times as long
            row[6:8] = [0, 0] if numbers is None else numbers.tolist()
            loss = sum([float(each) for each in attempt.losses])
            row[9:12] = [loss, float(attempt.count), float(attempt.norm)]
            self.sink.add(RECORD.pack(*row))
            self.sink.flush()
        self.cost_s += time.perf_counter() - began
        self._num_steps += 1

    def _queue(
        self, row: list[int | float], numbers: torch.Tensor | None, attempt: Attempt
    ) -> None:
        """Keep the numbers of a step on the device until it is waited for anyhow."""
        # WHY one tensor for all: small ones that outlive a step fragment the memory that it frees
        if self._waiting is None:
            size, device = 2 + 2 * self._parts.config.loop.log_interval, self._parts.device
            pairs = torch.zeros((size, 2), dtype=torch.int64, device=device)
            self._waiting = pairs, torch.zeros((size, 3), dtype=torch.float64, device=device)
        pairs, floats = self._waiting
        if len(self._rows) == len(pairs):
            self._read()
        place = len(self._rows)
        pairs[place] = 0 if numbers is None else numbers
        for column, value in enumerate((sum(attempt.losses), attempt.count, attempt.norm)):
            floats[place, column] = value
        self._rows.append(row)

    def after_report(self) -> None:
        """Write what the device had; end digests that cost too much. Collective: all ranks."""
        self._read()
        if self.sink is None or self._is_judged or self._num_steps < _LEAST_STEPS:
            return
        self._is_judged = True
        wall_s = time.perf_counter() - self._began_at
        cost = self.cost_s / max(1e-9, wall_s)
        self._is_on = self._parts.group.run_on_main(  # collective
            lambda: cost <= MOST_COST, what="digests"
        )
        if not self._is_on:
            self._end_digests()
            log.info(
                "no digests of steps from here on: they take %.1f %% of a step of %.2f ms; with "
                "--digests on they are kept, for the commands replay, bisect and diff",
                100 * cost,
                1000 * wall_s / self._num_steps,
            )

    def sync(self) -> None:
        """Have on the disk what is recorded of the steps that are done. Any thread, any rank.

        Raises OSError.
        """
        if self._left_out.entries:
            self._left_out.write(is_synced=True)
        if self.ledger is not None and (files := self.ledger.files()):
            Disk().sync_files(files[0].parent, files)
        if (sink := self.sink) is not None:
            start, _, _ = sink.path.name.partition("-")
            files = sorted(sink.path.parent.glob(f"{start}-rank-*.bin"))
            Disk().sync_files(sink.path.parent, files)

    def close(self, *, is_failed: bool = False) -> None:
        """Write what a full disk did not take, or say that it is lost. Rank-local.

        is_failed: the device may be stuck, and is not waited for.
        """
        if self.ledger is not None:
            self.ledger.close()
        if is_failed:
            self._rows.clear()
        self._end_digests()

    def _read(self) -> None:
        """Write the records whose numbers are on a device. Waits for it."""
        rows, self._rows = self._rows, []
        if self.sink is None or self._waiting is None or not rows:
            return
        pairs, floats = (numbers[: len(rows)].tolist() for numbers in self._waiting)
        for row, pair, values in zip(rows, pairs, floats, strict=True):
            row[6:8], row[9:12] = pair, values
            self.sink.add(RECORD.pack(*row))
        self.sink.flush()

    def _end_digests(self) -> None:
        self._read()
        if self.sink is not None and not self.sink.close():
            log.warning("digests of %d steps could not be written", self.sink.num_lost)
        self.sink = None


def shares_of(
    parameters: Sequence[torch.Tensor], num_shares: int
) -> list[list[tuple[torch.Tensor, int, int]]]:
    """Cut the numbers of all parameters into equal shares: (parameter, start, stop) of each."""
    shares: list[list[tuple[torch.Tensor, int, int]]] = [[] for _ in range(num_shares)]
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
    total, at = sum(sizes), 0
    for parameter, size in zip(parameters, sizes, strict=True):
        for number, share in enumerate(shares):
            start = max(total * number // num_shares - at, 0)
            stop = min(total * (number + 1) // num_shares - at, size)
            if start < stop:
                share.append((parameter, start, stop))
        at += size
    return shares


def _hash(batches: Sequence[Batch]) -> int:
    """Hash this rank's samples: their inputs and labels, of which so many bytes are read."""
    number, left = 0, _BATCH_BYTES
    for batch in batches:
        for whole in tensors_of((batch.inputs, batch.targets)):
            for tensor in dense_parts(whole):
                if tensor.is_cpu and left > 0:
                    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)[:left]
                    # WHY not as the gradient: it has no order of a sum, and this is faster
                    number = zlib.crc32(flat.numpy().data, number)
                    left -= len(flat)
    return number


def facts_of_attempt(parts: Parts, *, keep_in: Path | None = None) -> dict[str, Any]:  # Any: JSON
    """Give the facts of this start that can explain why its numbers differ from another's.

    Settings, and the code in use, which it keeps too, on rank 0 only.
    """
    env, device, order = environment(), parts.device, parts.sampler.ledger_facts()
    facts: dict[str, Any] = {
        "world_size": parts.group.world_size,
        "global_batch": parts.global_batch,
        "threads": torch.get_num_threads(),
        "device": _cpu_name(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "variables": {name: env[name] for name in sorted(_KERNELS & env.keys())},
        "data": parts.data.fingerprint,
        # 0: the samples of a step do not follow from the seed, of a stream or if they are drawn
        "num_samples": 0 if "is_drawn" in order else order.get("num_samples", 0),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
        facts["kernels"] = f"CUDA {torch.version.cuda}, cuDNN {cudnn}"
        facts["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    if parts.group.is_main:
        facts |= {"settings": agreed_settings(parts.config), "code": code_in_use(keep_in)}
        # WHY not the attribute: a lazy module would import. And None keeps one from being imported.
        loaded = [(n, getattr(m, "__dict__", {})) for n, m in [*sys.modules.items()]]
        versions = {name: has.get("__version__") for name, has in loaded if "." not in name}
        facts["libraries"] = {n: v for n, v in sorted(versions.items()) if isinstance(v, str)}
    return facts


def code_in_use(keep_in: Path | None = None) -> dict[str, str]:
    """Hash each imported module that belongs to no installed package; this program as one."""
    root = Path(__file__).resolve().parents[2]
    ours = [root / name for name in ("hardened_ddp", "ddp_runs", "ddp_doctor", "ddp_drills")]
    foreign = [Path(sysconfig.get_path("stdlib")).resolve(), *ours]
    found, left_out = dict[str, str](), {"__main__", "__mp_main__"}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # WHY by the package: to resolve the paths of 3,000 modules takes longer than all else here
        if name.partition(".")[0] in left_out or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if _PACKAGES & set(path.parts) or any(map(path.is_relative_to, foreign)):
            left_out.add(name)
        elif path.is_file():
            source = path.read_bytes()
            found[name] = _hash_of(source)
            if keep_in is not None:
                with contextlib.suppress(OSError):  # the hash still says that it is another one
                    (keep_in / f"{name}-{found[name]}.py").write_bytes(source)
    program = b"".join(path.read_bytes() for path in sorted(ours[0].rglob("*.py")))
    return found | {"hardened_ddp": _hash_of(program)}


def _hash_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE):
            return match[1]
    return platform.machine()
