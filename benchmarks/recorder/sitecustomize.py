"""Records a training process from outside; no contender's code is touched.

Python imports this module at start, because the driver puts its folder on PYTHONPATH. In a rank
(RANK and BENCH_RECORD_DIR set) it notes the time after each optimizer step, through the hook that
torch has for all optimizers. At exit it writes rank-R.json: those times, the peak of resident
memory, and a checksum of the trained parameters.
WHY a finder: importing torch from here would take away the contender's own choice when to do so.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_WATCHED = "torch.optim.optimizer"


class _Recorder:
    """The step times of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started_at = time.monotonic()
        self.step_times: list[float] = []
        self.optimizer: Any = None  # Any: torch is not imported here
        self.pid = 0

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step_times.append(time.monotonic())
        if self.optimizer is None:
            self.optimizer, self.pid = optimizer, os.getpid()

    def write(self) -> None:
        # WHY the pid: a forked worker would leave through here too, with its parent's times.
        if self.pid != os.getpid():
            return
        # WHY first: the checksum below needs memory of its own.
        peak_bytes = _peak_memory_bytes()
        checksum = sum(
            float(parameter.detach().double().abs().sum())
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )
        record = {
            "started_at": self.started_at,
            "step_times": self.step_times,
            "peak_memory_bytes": peak_bytes,
            "checksum": checksum,
        }
        self.path.write_text(json.dumps(record), encoding="utf-8")


class _Finder(importlib.abc.MetaPathFinder):
    """Registers the hook as soon as torch's optimizers are imported."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run_module(module)
            module.register_optimizer_step_post_hook(self.recorder.after_step)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _peak_memory_bytes() -> int:
    """VmHWM: the most memory that this process ever had resident."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if "BENCH_RECORD_DIR" in os.environ and "RANK" in os.environ:
    _recorder = _Recorder(Path(os.environ["BENCH_RECORD_DIR"]) / f"rank-{os.environ['RANK']}.json")
    sys.meta_path.insert(0, _Finder(_recorder))
    atexit.register(_recorder.write)
