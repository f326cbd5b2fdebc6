"""Checks of environment variables that can break or slow down distributed training."""

import socket
from collections.abc import Collection, Mapping

from ddp_runs.check import Check
from hardened_ddp.data.batches.workers import cpu_budget
from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import read_launch

_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "OMP_", "MKL_")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# name: the values that have a cost, and that cost
_COSTLY = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs exchange gradients through the host's memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs of one node talk over the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand is not used"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "the log is flooded"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "the CPU waits for each kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "each tensor is a slow allocation"),
    "CUDA_VISIBLE_DEVICES": (("", "-1"), "all GPUs are hidden"),
}
# Old names, now with TORCH_ before them: torch ignores them or supports them only partly.
_RENAMED = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG")


def check_launcher(env: Mapping[str, str]) -> Check:
    """Check that all of a launcher's variables are set, or none."""
    try:
        launch = read_launch(env)
    except LaunchError as error:
        return Check("launcher", "FAIL", error.message, error.fix)
    except ValueError as error:
        return Check("launcher", "FAIL", str(error), "open a new shell")
    if launch.launcher == "none":
        return Check("launcher", "ok", "none: RANK, WORLD_SIZE and the like are not set")
    where = f"rank {launch.rank} of {launch.world_size}"
    return Check("launcher", "ok", f"{launch.launcher}, {where}")


def check_debugging(env: Mapping[str, str], *, is_cpu_build: bool) -> Check:
    """Check TORCH_DISTRIBUTED_DEBUG: DETAIL crashes CPU builds and slows down the others."""
    name, level = "debugging", env.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    shown = f"TORCH_DISTRIBUTED_DEBUG={level or 'not set'}"
    if level not in ("", "OFF", "INFO", "DETAIL"):
        return Check(name, "FAIL", shown, "torch knows only OFF, INFO and DETAIL; use INFO")
    if level != "DETAIL":
        return Check(name, "ok", shown)
    advice = "it names unused parameters, too: export TORCH_DISTRIBUTED_DEBUG=INFO"
    if is_cpu_build:
        return Check(name, "FAIL", f"{shown} ends DDP with a segmentation fault here", advice)
    return Check(name, "warn", f"{shown} checks each collective: slow", advice)


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


def check_interfaces(env: Mapping[str, str], existing: Collection[str] | None = None) -> Check:
    """Check that the network interfaces that ranks are told to use exist."""
    known = [name for _, name in socket.if_nameindex()] if existing is None else existing
    chosen = {name: env[name] for name in _INTERFACES if env.get(name)}
    wrong = [name for name, value in chosen.items() if not _matches(name, value, known)]
    shown = ", ".join(f"{name}={value}" for name, value in chosen.items())
    if wrong:
        detail = f"{shown}: no such interface; there are {', '.join(sorted(known))}"
        return Check("interfaces", "FAIL", detail, f"unset {' '.join(wrong)}")
    return Check("interfaces", "ok", shown or f"chosen by torch from {', '.join(sorted(known))}")


def check_settings(env: Mapping[str, str]) -> Check:
    """Check the other variables of NCCL, gloo and CUDA: old names, and values that cost much."""
    problems = [
        f"{name}={env[name]}: {cost}"
        for name, (values, cost) in _COSTLY.items()
        if name in env and env[name].upper() in values
    ]
    problems += [f"{old} is now TORCH_{old}" for old in _RENAMED if old in env]
    if problems:
        names = [name for name in (*_COSTLY, *_RENAMED) if any(name in text for text in problems)]
        advice = f"unless this is intended: unset {' '.join(names)}"
        return Check("variables", "warn", "; ".join(problems), advice)
    shown = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(_FAMILIES)]
    return Check("variables", "ok", ", ".join(shown) or "none of NCCL, gloo, CUDA or OpenMP is set")


def _matches(name: str, value: str, existing: Collection[str]) -> bool:
    """Return whether value selects an interface: gloo takes names, NCCL prefixes, =names, ^not."""
    if name != "NCCL_SOCKET_IFNAME":
        return all(part.strip() in existing for part in value.split(","))
    parts = [part.strip() for part in value.lstrip("^=").split(",")]
    if value.startswith("^"):
        return any(not interface.startswith(tuple(parts)) for interface in existing)
    if value.startswith("="):
        return any(part in existing for part in parts)
    return any(interface.startswith(tuple(parts)) for interface in existing)
