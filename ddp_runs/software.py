"""Checks of Python, torch and the other packages; of GPUs, their driver, and the backends."""

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path

from ddp_runs.machine import GIB, Check
from hardened_ddp.settings.typed_command import (
    PROGRAM,
    ROOT,
    pip_command,
    python_command,
    shell_command,
)

# The oldest and the newest that it is made for: tests were run with each end.
PYTHONS, TORCHES = ((3, 11), (3, 13)), ((2, 11), (2, 15))
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")
_LEAST_FREE_SHARE = 0.5
_INSTALL = pip_command("requirements.txt")
# Without these nothing runs; each of the others is for one feature.
_NEEDED = ("numpy", "pyyaml", "safetensors", "psutil")
_FEATURES = {
    "torchvision": "its datasets and models",
    "tensorboard": "looking at the curves",
    "scikit-learn": "the dataset digits",
    "rich": "the command watch",
    "plotly": "the command report",
}


def check_python(version: tuple[int, ...] = sys.version_info[:2]) -> Check:
    """Check that Python is new enough, and not newer than the tested versions."""
    fix = f"install Python 3.11 to 3.13, then: {shell_command(ROOT / 'setup.sh')}"
    detail = f"{platform.python_version()} ({sys.executable})"
    return _judge("python", detail, version, PYTHONS, fix)


def check_torch() -> Check:
    """Check that torch can be imported, and its version."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return Check("torch", "FAIL", f"can't be imported: {error}", _INSTALL)
    return judge_torch(torch.__version__)


def judge_torch(version: str) -> Check:
    """Return whether this version of torch is one that the project runs on."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    return _judge("torch", version, number, TORCHES, _INSTALL)


def _judge(
    name: str, detail: str, version: tuple[int, ...], tried: Sequence[tuple[int, int]], fix: str
) -> Check:
    if version < tried[0]:
        return Check(name, "FAIL", f"{detail} is older than {'.'.join(map(str, tried[0]))}", fix)
    if version > tried[1]:
        return Check(name, "warn", detail, f"this version is not tested: if it fails: {fix}")
    return Check(name, "ok", detail)


def check_packages() -> Check:
    """Check that the other packages are installed."""
    versions = {name: _version_of(name) for name in (*_NEEDED, *_FEATURES)}
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if set(missing) & set(_NEEDED):
        return Check("packages", "FAIL", detail, _INSTALL)
    if missing:
        without = ", ".join(f"{name}: {_FEATURES[name]}" for name in missing)
        return Check("packages", "warn", detail, f"for {without}: {_INSTALL}")
    return Check("packages", "ok", detail)


def check_gpus(driver: Path = _DRIVER, devices: Path = _DEVICES) -> Check:
    """Check that each GPU of the machine can be used by torch, and is free."""
    import torch

    found = f"driver {read_driver(driver)}" if driver.exists() else ""
    found = found or ("/dev/nvidia*" if any(devices.glob("nvidia[0-9]*")) else "")
    if torch.version.cuda is None and torch.version.hip is None:
        if found:
            advice = "install the torch build for CUDA: see https://pytorch.org/get-started/locally"
            return Check("gpus", "warn", f"{found}, but this torch is built for CPUs", advice)
        return Check("gpus", "ok", "none; training runs on the CPU")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return _try_gpus(found)
    reason = str(caught[0].message).partition("\n")[0] if caught else "torch sees no GPU"
    if found:
        advice = "run nvidia-smi; the driver must be as new as CUDA " + str(torch.version.cuda)
        return Check("gpus", "FAIL", f"{found}, but {reason}", advice)
    return Check("gpus", "ok", "none, though torch is built for them; training runs on the CPU")


def check_backends() -> Check:
    """Check the communication backends: gloo for CPUs, NCCL for GPUs."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        install = python_command("-m", "pip", "install", "torch")
        advice = f"install a torch build with torch.distributed and gloo: {install}"
        return Check("backends", "FAIL", "this torch has no gloo: one process only", advice)
    has_nccl = dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""  # type: ignore[no-untyped-call]  # torch's
    names = ["gloo", *([f"NCCL {version}"] if has_nccl else [])]
    if torch.cuda.device_count() > 1 and not has_nccl:
        advice = "install a torch build with NCCL: gloo between GPUs is several times slower"
        return Check("backends", "warn", "gloo, no NCCL beside several GPUs", advice)
    return Check("backends", "ok", ", ".join(names))


def read_driver(path: Path) -> str:
    """Read the version of NVIDIA's kernel driver, or "unknown"."""
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(errors="replace"))
    return found[1] if found else "unknown"


def _try_gpus(found: str) -> Check:
    """Add two numbers on each GPU, to find broken GPUs and kernels for other architectures."""
    import torch

    names, busy = list[str](), list[str]()
    for index in range(torch.cuda.device_count()):
        try:
            torch.ones(2, device=f"cuda:{index}").sum().item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            advice = f"leave it out with CUDA_VISIBLE_DEVICES, and see nvidia-smi -i {index} -q"
            return Check("gpus", "FAIL", f"GPU {index} can't add two numbers: {reason}", advice)
        names.append(f"{index}: {torch.cuda.get_device_name(index)} {total / GIB:.0f} GiB")
        if free < _LEAST_FREE_SHARE * total:
            busy.append(f"{index} ({free / GIB:.1f} of {total / GIB:.0f} GiB free)")
    detail = f"{'; '.join(names)}; {found or 'no NVIDIA driver'}; CUDA {torch.version.cuda}"
    if busy:
        advice = "nvidia-smi shows whose processes these are; wait for them or choose other GPUs"
        return Check("gpus", "warn", f"{detail}; in use: {', '.join(busy)}", advice)
    return Check("gpus", "ok", detail)


def versions() -> str:
    """Write the versions of this program, torch and CUDA, one a line. Imports no torch."""
    version, commit = _own_version()
    ours = f"{PROGRAM} {version}" + (f" (commit {commit[:12]})" if commit else "")
    spec = importlib.util.find_spec("torch")
    torch, cuda = "not installed", ""
    if spec is not None and spec.origin:
        # WHY read, not imported: that takes a second or more
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        named = dict(
            re.findall(r"^(__version__|cuda|hip)\b[^=]*= '?([^'\n]*)'?$", text, re.MULTILINE)
        )
        torch = named.get("__version__", "of an unknown version")
        built = [f"{name.upper()} {named[name]}" for name in ("cuda", "hip") if named.get(name)]
        cuda = ", ".join(word for word in built if not word.endswith(" None")) or "no CUDA"
        torch = f"{torch}, {cuda}"
    return f"{ours}\ntorch {torch}\nPython {platform.python_version()}\n"


def _own_version() -> tuple[str, str]:
    """Give version and commit of this program: of the clone, or of what is installed."""
    file = ROOT / "pyproject.toml"
    if file.is_file():
        version = str(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"])
        commit = ""
        if (ROOT / ".git").exists() and shutil.which("git"):
            words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
            commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        return version, commit.strip()
    try:
        installed = importlib.metadata.distribution(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version", ""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return installed.version, str(origin.get("vcs_info", {}).get("commit_id", ""))


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
