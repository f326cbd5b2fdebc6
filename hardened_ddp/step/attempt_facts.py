"""The facts of one start of a run that can explain why its numbers differ from those of another.

Owns which these are: versions, threads, kind of CPU or GPU, what chooses kernels, settings, the
code of the user and of this program, and the dataset's fingerprint.
"""

import contextlib
import hashlib
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.ranks.launch import environment
from hardened_ddp.settings.record import agreed_settings
from hardened_ddp.step.parts import Parts

_PACKAGES = {"site-packages", "dist-packages"}
_KERNELS = {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"}
_KERNELS |= {"CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"}


def facts_of_attempt(parts: Parts, *, keep_in: Path | None = None) -> dict[str, Any]:  # Any: JSON
    """Give the facts of this start; settings, and code, which it keeps too, on rank 0 only."""
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
    library = Path(sysconfig.get_path("stdlib")).resolve()
    found, left_out = dict[str, str](), {"__main__", "__mp_main__"}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # WHY by the package: to resolve the paths of 3,000 modules takes longer than all else here
        if name.partition(".")[0] in left_out or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if _PACKAGES & set(path.parts) or any(map(path.is_relative_to, [library, *ours])):
            left_out.add(name)
        elif path.is_file():
            source = path.read_bytes()
            found[name] = hash_of(source)
            if keep_in is not None:
                with contextlib.suppress(OSError):  # the hash still says that it is another one
                    (keep_in / f"{name}-{found[name]}.py").write_bytes(source)
    program = hashlib.sha256()
    for path in sorted(ours[0].rglob("*.py")):
        program.update(path.read_bytes())
    return found | {"hardened_ddp": program.hexdigest()[:16]}


def hash_of(source: bytes) -> str:
    """Hash the source of a module; its copy is MODULE-HASH.py."""
    return hashlib.sha256(source).hexdigest()[:16]


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
