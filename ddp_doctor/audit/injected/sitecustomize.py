"""Starts the observer in each Python process of an audited or drilled program, at its start.

Python imports a module of this name at start up. The command puts this folder on PYTHONPATH, so
torchrun's ranks, spawned ranks and the workers of a DataLoader are reached too. The sitecustomize
that would have been imported without that is imported afterwards.
"""

import importlib.machinery
import importlib.util
import os
import sys

FOLDER_VARIABLE, DRILL_VARIABLE = "HARDENED_DDP_AUDIT_FOLDER", "HARDENED_DDP_DRILL"
_PACKAGE = "ddp_doctor"


def _start() -> None:
    """Import the observer without leaving a trace in the program's own imports."""
    root = os.path.abspath(__file__)
    for _ in range(4):  # this file, injected, audit, ddp_doctor
        root = os.path.dirname(root)
    known, paths, library = set(sys.modules), sys.path[:], os.path.dirname(os.__file__)
    others = [path for path in paths if not path.startswith(library) and "-packages" not in path]
    # WHY: PYTHONPATH may lead to a json.py of the program's
    sys.path[:] = [root, *(path for path in paths if path not in others)]
    try:
        if DRILL_VARIABLE in os.environ:
            from ddp_doctor.drill.injected import start as start_drilled

            start_drilled(os.environ[DRILL_VARIABLE])
        else:
            from ddp_doctor.audit.injected.observer import start

            start(os.environ[FOLDER_VARIABLE])
    finally:
        sys.path[:] = paths
        script = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
        others.append(os.path.dirname(os.path.abspath(script if os.path.isfile(script) else ".")))
        for name in set(sys.modules) - known:
            first = name.split(".")[0]
            # WHY: the program may have a ddp_doctor, or a json.py, of its own
            files = (f"{path}/{first}{end}" for path in others for end in (".py", "/__init__.py"))
            if first == _PACKAGE or any(map(os.path.exists, files)):
                del sys.modules[name]


def _chain() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Children get this folder from PYTHONPATH again.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize" and {FOLDER_VARIABLE, DRILL_VARIABLE} & os.environ.keys():
    try:
        _start()
    except Exception as error:  # the program must run, observed or not
        print(f"ddp_doctor: this process is not observed: {error!r}", file=sys.stderr)
    _chain()
