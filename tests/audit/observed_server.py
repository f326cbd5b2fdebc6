"""The fork server of the harness under the observer: torch is imported once, and observed.

The ranks that it forks are observed as torchrun's are; test_command.py tries the real command.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from ddp_doctor.audit.injected.observer import start
from tests.harness import fork_server


def run_observed(script: Path, records: Path) -> NoReturn:
    """Be a rank of a program: what the observer sees goes to the folder of records."""
    import torch.distributed

    observer = sys.modules["__main__"].observer  # of the process that this one was forked from
    observer.recorder.folder = str(records)
    # WHY: one run in fifty deadlocks in gloo's teardown, observed or not; here ranks just leave
    torch.distributed.destroy_process_group = lambda *args: None
    os.chdir(script.parent)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    observer = start("/nonexistent")  # WHY first: it patches what torch imports
    from hardened_ddp.data.foreign_code import import_torchvision
    from hardened_ddp.errors import HardenedError

    # WHY: transformers imports torchvision, whose binary may not match torch's
    with contextlib.suppress(HardenedError):
        import_torchvision()
    fork_server.main()
