"""Checks of the machine or container: CPUs, memory, shared memory, files, disk."""

import fcntl
import os
import resource
import shutil
import tempfile
from pathlib import Path
from time import perf_counter

from ddp_runs.check import GIB, MIB, Check
from hardened_ddp.data.batches.workers import cpu_budget
from hardened_ddp.reporting.resources import CGROUP, read_container_memory

_SHARED_MEMORY = Path("/dev/shm")
_SLOW_PROBE_S = 1.0


def check_cpus() -> Check:
    """Check how many CPUs this process may use, by affinity and by the container's quota."""
    allowed, budget = len(os.sched_getaffinity(0)), cpu_budget()
    detail = f"{budget} usable; {os.cpu_count()} in the machine, affinity {allowed}"
    if budget < allowed:
        advice = "count with the quota of this container: ranks x OMP_NUM_THREADS <= " + str(budget)
        return Check("cpus", "warn", f"{detail}, cut by a quota", advice)
    return Check("cpus", "ok", detail)


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


def check_open_files(limits: tuple[int, int] | None = None) -> Check:
    """Check the limit of open files: each batch in flight and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    unlimited = resource.RLIM_INFINITY
    shown = [str(limit) if limit != unlimited else "unlimited" for limit in (soft, hard)]
    detail = f"{shown[0]}, can be raised to {shown[1]}"
    if hard != unlimited and hard < 4096:
        advice = "docker: --ulimit nofile=65536; a cluster: ask its admin; else ulimit -n 65536"
        return Check("open files", "FAIL" if hard < 256 else "warn", detail, advice)
    return Check("open files", "ok", detail)


def check_disk(folder: Path) -> Check:
    """Check the free space for checkpoints and logs, in bytes and inodes."""
    free = shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    detail = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    advice = "remove old runs, or choose another disk with --output_dir"
    if status.f_files and not status.f_favail:
        return Check("disk", "FAIL", f"{detail}, but no file can be added (inodes)", advice)
    if free < GIB // 2:
        return Check("disk", "FAIL", detail, advice)
    return Check("disk", "warn" if free < 5 * GIB else "ok", detail, advice * (free < 5 * GIB))


def check_writing(folder: Path) -> Check:
    """Check that a run folder can be made in folder/runs: write, lock, rename, read, remove."""
    runs = folder / "runs"
    place = runs if runs.is_dir() else folder
    start = perf_counter()
    try:
        probe = Path(tempfile.mkdtemp(prefix=".doctor-", dir=place))
        try:
            _write_probe(probe)
        finally:
            shutil.rmtree(probe)
    except OSError as error:
        advice = "choose a folder that you may write to with --output_dir"
        return Check("writing", "FAIL", f"{place.resolve()}: {error}", advice)
    took_s = perf_counter() - start
    detail = f"a file in {place.resolve()} took {1000 * took_s:.0f} ms"
    if took_s > _SLOW_PROBE_S:
        return Check("writing", "warn", detail, "choose a faster disk with --output_dir")
    return Check("writing", "ok", detail)


def _write_probe(folder: Path) -> None:
    """Do the file operations of a checkpoint once. Raises OSError if one fails."""
    content = os.urandom(MIB)
    partial, final = folder / "partial", folder / "final"
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(final)
    if final.read_bytes() != content:
        raise OSError("what was written is not what is read")
