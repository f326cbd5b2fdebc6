"""Checks of the machine or container: CPUs, memory, files, disk, names, environment variables.

Each tests one thing, changes nothing, and needs no torch.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

from hardened_ddp.data.batches.workers import cpu_budget
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.reporting.resources import CGROUP, read_container_memory

GIB, MIB = 2**30, 2**20
_SHARED_MEMORY = Path("/dev/shm")
_SLOW_PROBE_S, _LOOKUP_S = 1.0, 5.0
_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "OMP_", "MKL_")
# name: the values that have a cost, and that cost
_COSTLY = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs exchange gradients through the host's memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs of one node talk over the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand is not used"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "the log is flooded"),
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        "it ends DDP on gloo with a segmentation fault, and each collective is checked: slow. INFO "
        "names unused parameters, too",
    ),
    "CUDA_LAUNCH_BLOCKING": (("1",), "the CPU waits for each kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "each tensor is a slow allocation"),
    "CUDA_VISIBLE_DEVICES": (("", "-1"), "all GPUs are hidden"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report: what was found, and what to do about it, if anything."""

    name: str
    # warn: training may be slow or fail in some cases. FAIL: it can't run.
    status: Literal["ok", "warn", "FAIL"]
    detail: str
    advice: str = ""


def check_memory(cgroup: Path = CGROUP) -> Check:
    """Check how much memory is free, in the machine and in the container."""
    import psutil  # WHY here: if it is missing, only this check fails

    system = psutil.virtual_memory()
    free = system.available
    detail = f"{free / GIB:.1f} of {system.total / GIB:.1f} GiB free"
    if (container := read_container_memory(cgroup)) is not None:
        limit_bytes, used_bytes = container
        own_free = max(0, limit_bytes - used_bytes)
        free = min(free, own_free)
        detail += f"; this container: {own_free / GIB:.1f} of {limit_bytes / GIB:.1f} GiB free"
    if free < GIB // 2:
        advice = "end other programs (top -o %MEM); a rank alone needs about 0.5 GiB"
        return Check("memory", "FAIL", detail, advice)
    if free < 2 * GIB:
        return Check("memory", "warn", detail, "few and small ranks only: about 0.5 GiB each")
    return Check("memory", "ok", detail)


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Check:
    """Check the shared memory through which DataLoader workers send batches."""
    larger = "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Check("shm", "FAIL", f"{folder}: {error.strerror}", f"mount a tmpfs there: {larger}")
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    detail = f"{folder}: {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free < 16 * MIB:
        return Check("shm", "FAIL", detail, f"remove what others left (ls -l {folder}); {larger}")
    if free < GIB:
        return Check("shm", "warn", detail, f"use --num_workers 0, or {larger}")
    return Check("shm", "ok", detail)


def check_disk(folder: Path) -> Check:
    """Check the free space for checkpoints and logs."""
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    if free < 5 * GIB:
        advice = "remove old runs, or choose another disk with --output_dir"
        return Check("disk", "FAIL" if free < GIB // 2 else "warn", detail, advice)
    return Check("disk", "ok", detail)


def check_writing(folder: Path) -> Check:
    """Check that a run folder can be made in folder/runs: write, lock, rename, read, remove."""
    runs = folder / "runs"
    place = (runs if runs.is_dir() else folder).resolve()
    content, start = os.urandom(MIB), perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as probe:
            partial, final = Path(probe, "partial"), Path(probe, "final")
            with partial.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(final)
            if final.read_bytes() != content:
                raise OSError("what was written is not what is read")
    except OSError as error:
        advice = "choose a folder that you may write to with --output_dir"
        return Check("writing", "FAIL", f"{place}: {error}", advice)
    took_s = perf_counter() - start
    detail = f"a file in {place} took {1000 * took_s:.0f} ms"
    if took_s > _SLOW_PROBE_S:
        return Check("writing", "warn", detail, "choose a faster disk with --output_dir")
    return Check("writing", "ok", detail)


def check_hostname(name: str | None = None, *, is_told: bool = False) -> Check:
    """Check that this machine's host name, which other nodes use, is an address of this machine.

    is_told: gloo tells the others that address, so it must not be one of loopback.
    """
    import psutil  # WHY here: if it is missing, only this check fails

    name = name or socket.gethostname()
    advice = f"add '127.0.0.1 {name}' to /etc/hosts, or give torchrun --standalone"
    ask = partial(socket.getaddrinfo, name, None)
    try:
        answers = call_within(ask, _LOOKUP_S, uses_gpu=False)
    except (OSError, UnicodeError) as error:  # also: a name server that does not answer
        return Check("hostname", "warn", f"{name}: {error}", advice)
    found = sorted({str(answer[4][0]) for answer in answers})
    of_interfaces = [each for entries in psutil.net_if_addrs().values() for each in entries]
    own = {each.address.partition("%")[0] for each in of_interfaces}
    if strange := [address for address in found if address not in own and address[:4] != "127."]:
        detail = f"{name} is {', '.join(strange)}, which is not an address of this machine"
        return Check("hostname", "warn", detail, advice)
    detail = f"{name} is {', '.join(found)}"
    if is_told and all(address[:4] == "127." or address == "::1" for address in found):
        detail += ": gloo tells that address to the other hosts"
        advice = "export GLOO_SOCKET_IFNAME=<its interface>, or correct /etc/hosts"
        return Check("hostname", "FAIL", detail, advice)
    return Check("hostname", "ok", detail)


def check_threads(env: Mapping[str, str]) -> Check:
    """Check that a rank does not start more threads than it has CPUs."""
    given, budget = env.get("OMP_NUM_THREADS"), cpu_budget()
    if given is None:
        detail = f"OMP_NUM_THREADS is not set: torchrun sets 1; alone, torch takes all {budget}"
        return Check("threads", "ok", detail)
    shown = f"OMP_NUM_THREADS={given}, usable CPUs {budget}"
    first = given.partition(",")[0].strip()  # a list is one value per level of nesting
    if not first.isdecimal() or int(first) < 1:
        return Check("threads", "FAIL", shown, "a whole number >= 1: export OMP_NUM_THREADS=1")
    if int(first) > budget:
        advice = f"for one rank on this machine: export OMP_NUM_THREADS={budget}"
        return Check("threads", "warn", f"{shown}: threads compete for CPUs", advice)
    return Check("threads", "ok", shown)


def check_settings(env: Mapping[str, str]) -> Check:
    """Check the other variables of NCCL, gloo and CUDA for values that cost much."""
    problems = [
        f"{name}={env[name]}: {cost}"
        for name, (values, cost) in _COSTLY.items()
        if name in env and env[name].upper() in values
    ]
    if problems:
        names = [text.partition("=")[0] for text in problems]
        advice = f"unless this is intended: unset {' '.join(names)}"
        return Check("variables", "warn", "; ".join(problems), advice)
    shown = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(_FAMILIES)]
    return Check("variables", "ok", ", ".join(shown) or "none of NCCL, gloo, CUDA or OpenMP is set")
