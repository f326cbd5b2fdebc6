"""Runs a patch right after the first import of a module, before others copy names from it."""

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from ddp_doctor.audit.injected.recorder import Foreign

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
