"""Observes which files are written, by audit events: one path on several ranks is a race."""

import os
import sys
import tempfile
from typing import Any

from ddp_doctor.audit.injected.recorder import Foreign, Recorder, user_line

_SKIPPED = ("/dev/", "/proc/", "/sys/")
_CACHES = ("/.cache/", "/.triton/", "/torchinductor_", "/__pycache__/", "/torch_extensions/")
_SUFFIXES = (".lock", ".pyc", ".tmp")


class Files:
    """The files that one process writes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[str] = set()
        self._waiting: list[dict[str, Foreign]] = []
        self._temporary = os.path.join(tempfile.gettempdir(), "torch")
        self._is_inside = False

    def watch(self) -> None:
        """Listen to the audit events of this interpreter."""
        hear = self._recorder.guarded(self._hear)

        def listen(event: str, args: Foreign) -> None:
            # WHY nothing else here: it runs for every event, some 30,000 of them in torch's import
            if event == "open":
                hear(args)

        sys.addaudithook(listen)

    def patch_serialization(self, module: Foreign) -> None:
        """Patch torch.serialization: torch.save opens its file in C++, where no event is sent."""
        self._recorder.wrap(module, "save", before=self._note_save)

    def patch_safetensors(self, module: Foreign) -> None:
        self._recorder.wrap(module, "save_file", before=self._note_save_file)

    def _note_save(self, obj: Foreign, f: Foreign, *args: Any, **kwargs: Any) -> None:
        self._note(f)

    def _note_save_file(self, tensors: Foreign, filename: Foreign, *a: Any, **k: Any) -> None:
        self._note(filename)

    def _hear(self, args: Foreign) -> None:
        if self._is_inside:
            return
        path, mode, flags = args
        is_new = any(c in mode for c in "wx") if isinstance(mode, str) else flags & os.O_TRUNC
        if is_new and isinstance(path, str | os.PathLike):
            self._is_inside = True
            try:
                self._note(path)
            finally:
                self._is_inside = False

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
        record = {"path": name, "line": line}
        # The launcher writes files too: what comes before training waits until it begins.
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Record what has waited, once this process is known to be a rank."""
        if self._recorder.is_rank:
            for record in self._waiting:
                self._recorder.emit("write", **record)
            self._waiting = []

    def forget(self) -> None:
        self._seen, self._waiting = set(), []
