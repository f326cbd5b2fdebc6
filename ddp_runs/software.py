"""Checks of Python, torch and the other packages."""

import importlib.metadata
import platform
import re
import sys

from ddp_runs.check import Check
from hardened_ddp.errors import DataError
from hardened_ddp.settings.typed_command import ROOT, pip_command, shell_command

OLDEST_PYTHON = (3, 11)
NEWEST_TRIED_PYTHON = (3, 13)
OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 13)
# Without these nothing runs; each of the others is for one feature.
_NEEDED = ("numpy", "pyyaml", "safetensors", "psutil")
_FEATURES = {
    "tqdm": "the progress bar",
    "tensorboard": "looking at the curves",
    "scikit-learn": "the dataset digits",
    "rich": "the command watch",
    "plotly": "the command report",
}


def check_python(version: tuple[int, ...] = sys.version_info[:2]) -> Check:
    """Check that Python is new enough, and not newer than the tested versions."""
    detail = f"{platform.python_version()} ({sys.executable})"
    if version < OLDEST_PYTHON:
        return Check(
            "python",
            "FAIL",
            detail,
            f"install Python 3.11 or newer, then: {shell_command(ROOT / 'setup.sh')}",
        )
    if version > NEWEST_TRIED_PYTHON:
        return Check("python", "warn", detail, "this version is not tested: if it fails, use 3.13")
    return Check("python", "ok", detail)


def check_torch() -> Check:
    """Check that torch can be imported, and its version."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return Check("torch", "FAIL", f"can't be imported: {error}", _install())
    return judge_torch(torch.__version__)


def judge_torch(version: str) -> Check:
    """Return whether this version of torch is one that the project runs on."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if number < OLDEST_TORCH:
        return Check("torch", "FAIL", f"{version} is older than 2.11", _install())
    if number > NEWEST_TRIED_TORCH:
        advice = f"this version is not tested: if it fails: {_install()}"
        return Check("torch", "warn", version, advice)
    return Check("torch", "ok", version)


def check_torchvision() -> Check:
    """Check that torchvision fits torch. Only its own datasets and models need it."""
    name = "torchvision"
    # WHY here: it needs torch, and the doctor must answer without.
    try:
        from hardened_ddp.data.foreign_code import WITHOUT_OPERATORS, import_torchvision
    except (ImportError, OSError) as error:
        return Check(name, "warn", f"can't be imported: {error}", _install())
    try:
        version = import_torchvision().__version__
    except DataError as error:
        detail = f"{error.message}: its datasets and models can't be used"
        return Check(name, "warn", detail, error.fix)
    if not _has_compiled_operators():
        # WHY no advice: a torchvision for this build of torch may be in another place than this one
        return Check(name, "ok", f"{version}, {WITHOUT_OPERATORS}")
    return Check(name, "ok", version)


def check_packages() -> Check:
    """Check that the other packages are installed."""
    versions = {name: _version_of(name) for name in (*_NEEDED, *_FEATURES)}
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if set(missing) & set(_NEEDED):
        return Check("packages", "FAIL", detail, _install())
    if missing:
        without = ", ".join(f"{name}: {_FEATURES[name]}" for name in missing)
        return Check("packages", "warn", detail, f"for {without}: {_install()}")
    return Check("packages", "ok", detail)


def is_cpu_build() -> bool:
    """Return whether torch was built without CUDA; False if there is no torch."""
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.version.cuda is None


def _install() -> str:
    return pip_command("requirements.txt")


def _has_compiled_operators() -> bool:
    """Try one of torchvision's compiled operators."""
    import torch
    from torchvision.ops import nms

    try:
        nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (RuntimeError, ImportError):  # NotImplementedError, a RuntimeError: no kernel for it
        return False
    return True


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
