"""Puts the observer's parts together, before the program's first line.

Read first: recorder.py. Each part patches what it observes when the program imports it; a program
without torch is left as it is.
"""

import atexit
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from ddp_doctor.audit.injected.collectives import Collectives
from ddp_doctor.audit.injected.loaders import Loaders
from ddp_doctor.audit.injected.randomness import Randomness
from ddp_doctor.audit.injected.recorder import Foreign, Hook, Recorder, is_library, user_line
from ddp_doctor.audit.injected.replicas import Replicas
from ddp_doctor.audit.injected.training import Training

PATIENCE_VARIABLE = "HARDENED_DDP_AUDIT_PATIENCE"
_SKIPPED = ("/dev/", "/proc/", "/sys/")
_CACHES = ("/.cache/", "/.triton/", "/torchinductor_", "/__pycache__/", "/torch_extensions/")
_SUFFIXES = (".lock", ".pyc", ".tmp")
Patch = Callable[[Foreign], None]


class PatchingFinder(MetaPathFinder):
    """Stands first in sys.meta_path, asks the other finders, and patches what they load."""

    def __init__(self, patches: Mapping[str, list[Patch]]) -> None:
        self._patches = dict(patches)

    def find_spec(
        self, fullname: str, path: Foreign = None, target: Foreign = None
    ) -> ModuleSpec | None:
        """Give the spec that another finder has, with a loader that patches afterwards."""
        patches = self._patches.pop(fullname, None)
        if patches is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _extend(spec.loader, patches)
                return spec
        return None


def _extend(loader: Foreign, patches: list[Patch]) -> None:
    execute = loader.exec_module

    def exec_module(module: Foreign) -> None:
        execute(module)
        for patch in patches:
            patch(module)

    loader.exec_module = exec_module


class Files:
    """The files that one process writes, by audit events: one path on several ranks is a race."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[str] = set()
        self._waiting: list[dict[str, Foreign]] = []
        self._temporary = os.path.join(tempfile.gettempdir(), "torch")

    def watch(self) -> None:
        hear = self._recorder.guarded(self._hear)

        def listen(event: str, args: Foreign) -> None:
            # WHY nothing else here: it runs for every event, some 30,000 of them in torch's import
            if event == "open":
                hear(args)

        sys.addaudithook(listen)

    def hooks(self) -> list[Hook]:
        """Say what is observed: these open their files in C++ or Rust, where no event is sent."""
        names = (("torch.serialization", "save"), ("safetensors.torch", "save_file"))
        return [Hook(*name, lambda data, file, *a, **k: self._note(file)) for name in names]

    def _hear(self, args: Foreign) -> None:
        path, mode, flags = args
        # WHY: the file of the records, which is only appended to, must not come here again
        if any(c in mode for c in "wx") if isinstance(mode, str) else flags & os.O_TRUNC:
            self._note(path)

    def _note(self, path: Foreign) -> None:
        if not isinstance(path, str | os.PathLike):
            return
        name = os.path.abspath(os.fspath(path))
        if name in self._seen or name.startswith((*_SKIPPED, self._recorder.folder)):
            return
        if name.startswith(self._temporary) or name.endswith(_SUFFIXES):
            return
        if any(part in name for part in _CACHES) or not (line := user_line()):
            return
        self._seen.add(name)
        # The launcher writes files too: what comes before training waits until it begins.
        self._waiting.append({"path": name, "line": line})
        self.flush()

    def flush(self) -> None:
        """Record what has waited, once this process is known to be a rank."""
        while self._recorder.is_rank and self._waiting:
            self._recorder.emit("write", **self._waiting.pop(0))

    def forget(self) -> None:
        self._seen, self._waiting = set(), []


class Observer:
    """All parts, and the beginning and end of a process."""

    def __init__(self, folder: str, patience_s: float) -> None:
        self.recorder = recorder = Recorder(folder)
        self.loaders, self.files = Loaders(recorder), Files(recorder)
        self.replicas = Replicas(recorder, self.loaders)
        self.collectives = Collectives(recorder, patience_s)
        self.training = Training(recorder, self.loaders, self.replicas, self.collectives)
        self.randomness = Randomness(recorder, self.loaders)

    def patches(self) -> dict[str, list[Patch]]:
        """Say which modules are patched, and how."""
        table: dict[str, list[Patch]] = {
            "torch.optim.optimizer": [self.training.patch_optimizer],
            "torch.utils.data.dataloader": [self.loaders.patch],
            "torch.distributed.distributed_c10d": [self.collectives.patch],
        }
        for part in (self.replicas, self.training, self.randomness, self.files):
            for hook in part.hooks():
                table.setdefault(hook.module, []).append(partial(self.recorder.install, hook))
        return {name: [*map(self.recorder.guarded, some)] for name, some in table.items()}

    def finish(self, code: Foreign = None) -> None:
        """Record how the process ends, once."""
        recorder = self.recorder
        if not recorder.is_rank or recorder.is_over:
            return
        recorder.is_over = True
        self.files.flush()
        recorder.emit("schedules", all=self.training.schedules())
        error = getattr(sys, "last_value", None)
        lines = _passed_by(error)
        recorder.emit(
            "exit",
            error=f"{type(error).__name__}: {error}"[:400] if error is not None else "",
            line=lines[-1],
            lines=lines,
            code=code if isinstance(code, int) else None,
        )

    def begin_child(self) -> None:
        for part in vars(self).values():
            part.forget()


def _passed_by(error: BaseException | None) -> list[str]:
    """Give the lines of the user's that an exception passed, the innermost last; or [""]."""
    frames = traceback.walk_tb(getattr(error, "__traceback__", None))
    own = [(frame.f_code.co_filename, line) for frame, line in frames]
    return [f"{name}:{line}" for name, line in own if not is_library(name)] or [""]


def start(folder: str) -> Observer:
    """Observe this process from now on. Called by sitecustomize.py."""
    observer = Observer(folder, float(os.environ.get(PATIENCE_VARIABLE, "20")))
    finish = observer.recorder.guarded(observer.finish)
    sys.meta_path.insert(0, PatchingFinder(observer.patches()))
    os.register_at_fork(after_in_child=observer.recorder.guarded(observer.begin_child))
    observer.recorder.wrap(os, "_exit", before=finish)
    observer.recorder.watch_signals()
    observer.files.watch()
    atexit.register(finish)
    return observer
