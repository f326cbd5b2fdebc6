"""doctor --cluster: all hosts of a job, compared, and the links between them measured.

It is started on all ranks by the launcher that the job will have. The ranks meet in the store of
that launcher; the first rank of each host tells its facts there and measures its links; then all
ranks try an all-reduce. Rank 0 judges and prints; every rank ends with its verdict.
Does not own: the checks of one machine (doctor.py), how links are measured (links.py).
What goes wrong here: a host that does not answer, so every wait has a limit.
"""

import contextlib
import csv
import hashlib
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ddp_runs import doctor, links, machine, software
from ddp_runs.machine import MIB, Check
from hardened_ddp.errors import ConfigError, GroupError, HardenedError
from hardened_ddp.ranks.launch import Launch, prepare_environment, read_launch
from hardened_ddp.settings.record import code_hash
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import listed

Facts = dict[str, Any]  # Any: JSON
_CODE, _MOST_FILES = (".py", ".yaml", ".sh"), 20_000
# What must be equal on all hosts; of the others a difference is a warning.
_STRICT = ("torch", "CUDA", "NCCL", "this program", "code", "data", "gpus")
_PROBE_BYTES = 64 * MIB
_SLOW_SHARE, _LINK_SHARE = 1 / 3, 0.05  # of what other hosts have; of what the link should give
_CLOCK_S = 1.0
_MOST_WAIT_S = 86_400
_SIZES = {4 * 1024: 64, MIB: 4, 32 * MIB: 1}  # and how many all-reduces of each are measured
_GPU_QUERY = "index,clocks.max.sm,ecc.errors.uncorrected.volatile.total"
_GPU_QUERY += ",clocks_throttle_reasons.hw_slowdown"
_NO_SLOWDOWN = ("Not Active", "[N/A]", "[Not Supported]")


def run_cluster(
    options: Mapping[str, str], *, output: TextIO, env: MutableMapping[str, str]
) -> int:
    """Print a report of all hosts on rank 0; return 0 if nothing FAILs, else 1. Collective."""
    launch = read_launch(env)
    wait = options["wait"]
    if not wait.isdecimal() or not 1 <= int(wait) <= _MOST_WAIT_S:
        text = f"--wait: found {wait!r}, needs whole seconds from 1 to {_MOST_WAIT_S}"
        raise ConfigError(text, fix=own_command("doctor", "--help"))
    if launch.world_size == 1:
        fix = "start it as the job, on all hosts: torchrun --nnodes 2 --nproc_per_node 8 "
        fix += "--master_addr HOST --node_rank N ddp_training.py doctor --cluster"
        raise ConfigError("doctor --cluster was started as one process, not on all ranks", fix=fix)
    prepare_environment(launch, env)
    title = f"doctor --cluster: {launch.world_size} ranks, rank {launch.rank} on {platform.node()}"
    found = [doctor.guarded(software.check_torch)]
    if found[0].status == "FAIL":
        return doctor.report(found, output, title=title)
    try:
        with links.Listener() as listener:
            look = partial(_facts_of, launch, listener.port, options, env)
            hosts, measured, sums, meeting = _measure(launch, look, float(wait))
            status = 0
            if launch.is_main:
                title = "\n".join([title, *table(hosts, measured)])
                status = doctor.report(judge(hosts, measured, sums), output, title=title)
            return int(max(meeting.share("status", status)))
    except HardenedError as error:  # the master can't be reached, or ranks are missing
        found = [Check("meeting", "FAIL", error.message, error.fix)]
    except RuntimeError as error:  # torch's: its store is gone
        detail = f"the store of rank 0 is gone: {str(error).partition(chr(10))[0]}"
        found = [Check("meeting", "FAIL", detail, "read the log of rank 0")]
    return doctor.report(found, output, title=title)


def _measure(
    launch: Launch, look: Callable[[], Facts], limit_s: float
) -> tuple[list[Facts], list[Facts], list[Facts], "Meeting"]:
    """Meet the other ranks; return facts and links of each host, and what each rank summed."""
    from hardened_ddp.ranks.rendezvous import open_store, rendezvous

    store = open_store(launch, timedelta(seconds=limit_s))
    meeting = Meeting(rendezvous(store, launch, limit_s), launch, limit_s)  # collective
    # WHY not before: to look takes as long as a disk is slow, and the others would give up
    hosts = [facts for facts in meeting.share("facts", look()) if facts]
    names = [facts["host"] for facts in hosts]
    for facts in hosts:
        if names.count(facts["host"]) > 1:
            facts["host"] += f" (rank {facts['rank']})"
    ahead_s = math.inf  # how far this clock is ahead of rank 0's
    for number in range(3):  # WHY the least: a busy machine is told late
        if launch.is_main:
            time.sleep(0.2 + 0.001 * launch.world_size)  # until the others wait for it
            meeting.store.set(f"clock {number}", str(time.time()))
        told_at = float(meeting.store.get(f"clock {number}"))
        ahead_s = min(ahead_s, time.time() - told_at)
    places, found = [facts["rank"] for facts in hosts], Facts()
    for turn in range(2):  # WHY in turns: what comes the other way delays what answers this way
        if launch.is_local_main and places.index(launch.rank) % 2 == turn:
            found = _measure_links(hosts, launch.rank) | {"ahead_s": ahead_s}
        told = meeting.share(f"links in turn {turn}", found)
    measured = [facts for facts in told if facts]
    is_open = not any(facts["closed"] for facts in measured)
    sums = _all_reduce(launch, meeting.store, limit_s) if is_open else {}  # collective
    return hosts, measured, meeting.share("sums", sums), meeting


class Meeting:
    """Values that the ranks tell each other through the store. Collective: all ranks."""

    def __init__(self, store: Any, launch: Launch, limit_s: float) -> None:  # Any: dist.Store
        self.store, self._launch, self._limit_s = store, launch, limit_s

    def share(self, name: str, value: Any) -> list[Any]:  # Any: JSON
        """Return the value of each rank. Raises GroupError if one does not tell its own."""
        ranks = range(self._launch.world_size)
        keys = [f"{name}/{rank}" for rank in ranks]
        self.store.set(keys[self._launch.rank], json.dumps(value))
        end = time.monotonic() + self._limit_s + 60.0  # for what they do meanwhile
        # WHY not wait at the store: torch writes a stack trace of each wait that times out
        while not self.store.check(keys):
            if time.monotonic() > end:
                missing = [rank for rank in ranks if not self.store.check([keys[rank]])]
                text = f"ranks {missing} joined, but have not told their {name} since"
                raise GroupError(text, fix="read the log of these ranks")
            time.sleep(max(0.02, 0.001 * len(keys)))
        told = [json.loads(text) for text in self.store.multi_get(keys)]
        if name == "status":  # the last one: the store may end with rank 0
            self.store.set(f"read/{self._launch.rank}", "1")
            if self._launch.is_main:
                with contextlib.suppress(RuntimeError):  # one of them is gone
                    self.store.wait([f"read/{rank}" for rank in ranks], timedelta(seconds=5))
        return told


def _facts_of(
    launch: Launch, port: int, options: Mapping[str, str], env: Mapping[str, str]
) -> Facts:
    """Look at this host. Empty on all ranks of it but the first. Rank-local."""
    if not launch.is_local_main:
        return {}
    address = links.address_towards(launch.master_addr, launch.master_port)
    is_told = launch.num_nodes > 1 and not env.get("GLOO_SOCKET_IFNAME")  # to the other hosts
    checks = [doctor.guarded(check) for check in doctor.list_checks(env)[:-2]]
    checks.append(doctor.guarded(partial(machine.check_hostname, is_told=is_told)))
    clocks, of_gpus = read_gpus()
    disk = _write_rate(Path(options["output_dir"]).absolute())
    equal = _equal_facts(Path(options["data"]), checks) | {"gpu clocks": clocks}
    checks += of_gpus
    if not disk:
        detail = f"{_PROBE_BYTES // MIB} MiB can't be written to --output_dir"
        checks.append(Check("disk", "FAIL", detail, "free space there, or choose another"))
    return {
        "host": socket.gethostname(),
        "rank": launch.rank,
        "address": address,
        "port": port,
        "interface": links.interface_of(address),
        "equal": equal,
        "checks": [[c.name, c.status, c.detail, c.advice] for c in checks if c.status != "ok"],
        "shm": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "disk": disk,
    }


def _equal_facts(data: Path, checks: Iterable[Check]) -> dict[str, str]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]  # torch's
    try:
        named = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a GPU that fails; the check of GPUs says more
        named = [f"can't be used: {str(error).partition(chr(10))[0]}"]
    packages = next((check.detail for check in checks if check.name == "packages"), "")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, nccl)),
        "packages": packages,
        "gpus": ", ".join(named) or "none",
        "this program": code_hash(),
        "code": digest(Path()),
        "data": digest(data, by_size=True),
    }


def digest(folder: Path, *, by_size: bool = False) -> str:
    """Digest the code below a folder, or names and sizes of all files; of very many the first."""
    total, num_files = hashlib.sha256(), 0
    skipped = () if by_size else ("runs", "data", "site-packages", "__pycache__")
    try:
        if not folder.is_dir():
            return "none"
        for place, folders, files in os.walk(folder):
            folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in skipped)
            for path in [Path(place, name) for name in sorted(files)]:
                if not ((by_size or path.suffix in _CODE) and path.is_file()):
                    continue
                if num_files == _MOST_FILES:  # WHY no further: the other hosts wait for this one
                    return f"the first {num_files} files, {total.hexdigest()[:10]}"
                num_files += 1
                content = str(path.stat().st_size).encode() if by_size else path.read_bytes()
                total.update(os.fsencode(path.relative_to(folder)) + b"\0%d\0" % len(content))
                total.update(content)
    except OSError as error:
        return f"can't be read: {error}"
    return f"{num_files} files, {total.hexdigest()[:10]}"


def _write_rate(folder: Path) -> float:
    """Write a file where runs will be, to the disk; return bytes per second, 0 if it failed."""
    piece = os.urandom(MIB)
    try:
        place = next(path for path in (folder, *folder.parents) if path.is_dir())
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=place) as file:
            began = time.monotonic()
            for _ in range(_PROBE_BYTES // MIB):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return _PROBE_BYTES / (time.monotonic() - began)
    except OSError:
        return 0.0


def read_gpus() -> tuple[str, list[Check]]:
    """Ask nvidia-smi: the limits of the clocks; uncorrected ECC errors, and slowdowns."""
    argv = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    if shutil.which(argv[0]) is None:
        return "", []
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", [Check("GPUs", "warn", f"nvidia-smi gives no answer: {error}", "look at dmesg")]
    clocks, found = set[str](), []
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) == _GPU_QUERY.count(",") + 1:
            index, clock, errors, slowdown = row
            clocks.add(f"{clock} MHz")
            if errors.isdecimal() and errors != "0":
                detail = f"{errors} uncorrected ECC errors"
                found.append(Check(f"GPU {index}", "FAIL", detail, "reset or replace it"))
            if slowdown not in _NO_SLOWDOWN:
                detail = f"slowed down: {slowdown}"
                found.append(Check(f"GPU {index}", "warn", detail, "look at power and cooling"))
    return ", ".join(sorted(clocks)), found


def _measure_links(hosts: Sequence[Facts], rank: int) -> Facts:
    """Try the listeners of all other hosts, send to the next host."""
    from hardened_ddp.ranks.rendezvous import why_unreachable

    place = [host["rank"] for host in hosts].index(rank)
    mine, others = hosts[place], [*hosts[place + 1 :], *hosts[:place]]
    closed: dict[str, str] = {}
    for host in others:
        if len(closed) < 4 and (why := why_unreachable(host["address"], host["port"])):
            closed[host["host"]] = f"port {host['port']} of {host['address']}: {why}"
    found: Facts = {"host": mine["host"], "closed": closed, "rate": 0.0, "next": ""}
    if others and not closed:
        found["next"] = others[0]["host"]
        try:
            found["rate"] = links.measure_rate(others[0]["address"], others[0]["port"])
        except OSError as error:
            closed[found["next"]] = str(error)
    return found


def _all_reduce(launch: Launch, store: Any, limit_s: float) -> Facts:  # Any: dist.Store
    """Sum over all ranks, by size: seconds each, or an error. Collective: all ranks."""
    import torch.distributed as dist

    from hardened_ddp.ranks.device import choose_backend, pick_device

    try:
        device = pick_device(launch, cpu_only=False, backend="auto")
        name = choose_backend(device, "auto")
        how = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
        dist.init_process_group(name, timeout=timedelta(seconds=limit_s), **how)  # collective
        took = {}
        for size, number in _SIZES.items():
            took[str(size)] = _seconds_of(size, number, device)  # collective
        dist.destroy_process_group()
    except (RuntimeError, HardenedError) as error:
        return {"error": str(error).partition("\n")[0], "host": socket.gethostname()}
    return {"took": took, "backend": name}


def _seconds_of(size_bytes: int, number: int, device: Any) -> float:  # Any: torch.device
    """Return the seconds of one all-reduce of this size, of so many. Collective: all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size_bytes // 4, device=device)
    dist.all_reduce(tensor)  # collective: the first one connects
    float(tensor[0])  # waits for the device
    began = time.monotonic()
    for _ in range(number):
        dist.all_reduce(tensor)  # collective
    float(tensor[0])
    return (time.monotonic() - began) / number


def judge(hosts: Sequence[Facts], measured: Sequence[Facts], sums: Sequence[Facts]) -> list[Check]:
    """Compare the hosts, and name those that differ."""
    checks = [_compare(name, hosts) for name in hosts[0]["equal"]]
    checks += _judge_each(hosts)
    shown = [f"{m['host']} -> {to}: {why}" for m in measured for to, why in m["closed"].items()]
    if shown:
        advice = "open all ports between the hosts: ranks listen on ones that the system chooses"
        checks.append(Check("ports", "FAIL", "; ".join(shown), advice))
    else:
        checks.append(Check("ports", "ok", f"each of {len(hosts)} hosts reaches each other one"))
    ahead = {m["host"]: m["ahead_s"] for m in measured}
    if late := [f"{host} by {s:+.1f} s" for host, s in ahead.items() if abs(s) > _CLOCK_S]:
        advice = "start a time service there (chronyd): logs and locks are compared by time"
        detail = f"differs from {hosts[0]['host']}: {', '.join(late)}"
        checks.append(Check("clocks", "warn", detail, advice))
    else:
        checks.append(Check("clocks", "ok", f"within {_CLOCK_S:g} s of {hosts[0]['host']}"))
    if disks := {h["host"]: (h["disk"], 0.0) for h in hosts if h["disk"]}:
        checks.append(_judge_rates("disk", disks))
    if any(m["rate"] for m in measured):
        ways = zip(measured, hosts, strict=True)
        rates = {f"{m['host']} -> {m['next']}": (m["rate"], h["interface"][1]) for m, h in ways}
        checks.append(_judge_rates("links", rates))
    checks.append(_judge_sums(sums, is_open=not shown))
    return checks


def _compare(name: str, hosts: Sequence[Facts]) -> Check:
    """Check that a fact is the same on all hosts; name those with the rarer values."""
    by_value: dict[str, list[str]] = {}
    for host in hosts:
        by_value.setdefault(host["equal"][name], []).append(host["host"])
    if len(by_value) == 1:
        return Check(name, "ok", f"{next(iter(by_value)) or 'none'} on all hosts")
    ordered = sorted(by_value.items(), key=lambda pair: len(pair[1]))
    told = [f"{listed(names, 4)}: {value or 'none'}" for value, names in ordered]
    advice = f"install or copy the same on all hosts, as on {ordered[-1][1][0]}"
    if name == "gpu clocks":
        advice = "nvidia-smi -rgc: a training is as slow as its slowest"
    return Check(name, "FAIL" if name in _STRICT else "warn", "; ".join(told), advice)


def _judge_each(hosts: Sequence[Facts]) -> list[Check]:
    """Join what each host found of itself: equal findings are one line."""
    by_text: dict[tuple[Any, ...], list[str]] = {}  # Any: JSON
    for host in hosts:
        for text in host["checks"]:
            by_text.setdefault(tuple(text), []).append(host["host"])
    return [
        Check(name, status, f"{listed(names, 4)}: {detail}", advice)
        for (name, status, detail, advice), names in by_text.items()
    ]


def _judge_rates(name: str, rates: Mapping[str, tuple[float, float]]) -> Check:
    """Name what is much slower than the others, or than it should be (0: unknown)."""
    usual = statistics.median_high([rate for rate, _ in rates.values()])
    slow = []
    for who, (rate, nominal) in rates.items():
        if rate < _SLOW_SHARE * usual:
            slow.append(f"{who}: {_per_s(rate)}, others {_per_s(usual)}")
        elif rate < _LINK_SHARE * nominal:
            slow.append(f"{who}: {_per_s(rate)}, where its link should give {_per_s(nominal)}")
    if not slow:
        return Check(name, "ok", f"{_per_s(min(rate for rate, _ in rates.values()))} or more")
    advice = "a training is as slow as its slowest: leave that out, or look at it"
    return Check(name, "warn", "; ".join(slow), advice)


def _judge_sums(sums: Sequence[Facts], *, is_open: bool) -> Check:
    name = "all-reduce"
    if not is_open:
        return Check(name, "warn", "not tried: see ports", "open the ports, then try again")
    if failed := [each for each in sums if "error" in each]:
        detail = f"{failed[0]['host']}: {failed[0]['error']}"
        return Check(name, "FAIL", detail, "see the checks above first")
    share = 2 * (len(sums) - 1) / len(sums)
    told = []
    for text, took_s in sums[0]["took"].items():
        size = int(text)
        shown = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        told.append(f"{shown} {1000 * took_s:.2g} ms ({_per_s(share * size / took_s)} per rank)")
    return Check(name, "ok", f"{sums[0]['backend']}: {', '.join(told)}")


def table(hosts: Sequence[Facts], measured: Sequence[Facts]) -> list[str]:
    """Lay the numbers of each host side by side."""
    rows = [("host", "rank", "address", "interface", "shm", "disk", "clock", "to next")]
    for host, found in zip(hosts, measured, strict=True):
        name, nominal = host["interface"]
        here = (host["host"], str(host["rank"]), host["address"])
        link = f"{name} ({_per_s(nominal)})" if nominal else name
        rates = (_per_s(host["disk"]), f"{found['ahead_s']:+.2f} s", _per_s(found["rate"]))
        rows.append((*here, link, f"{host['shm'] / MIB:.0f} MiB", *rates))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _per_s(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
