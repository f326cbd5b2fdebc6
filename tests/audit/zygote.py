"""Runs many small programs under the observer, without importing torch for each of them.

A process that has the observer and torch forks the ranks of one program after the other. What is
forked is observed as torchrun's ranks are; tests of the real command are in test_command.py.
Requests and answers are JSON lines on stdin and stdout.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback

from ddp_doctor.audit.injected.observer import Observer, start
from hardened_ddp.errors import HardenedError

POLL_S = 0.02


def serve() -> None:
    """Fork ranks for each request until stdin ends."""
    observer = start("/nonexistent")
    import torch.distributed

    # WHY here: after the observer, as it has torch
    from hardened_ddp.data.foreign_code import import_torchvision

    # WHY: transformers imports torchvision, whose binary may not match torch's
    with contextlib.suppress(HardenedError):
        import_torchvision()
    torch.set_num_threads(1)
    # WHY: the first optimizer imports a large part of torch, which each rank would pay for
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()  # WHY: a collection in a rank would write to, and so copy, all those pages
    for line in sys.stdin:
        request = json.loads(line)
        statuses = run_ranks(observer, request)
        print(json.dumps(statuses), flush=True)


def run_ranks(observer: Observer, request: dict[str, object]) -> list[int]:
    """Fork the ranks of one program, and wait for them; -9 for one that took too long."""
    world = int(str(request["world"]))
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            be_rank(observer, request, rank)
        pids.append(pid)
    statuses: dict[int, int] = {}
    end = time.monotonic() + float(str(request["timeout_s"]))
    while len(statuses) < world:
        for pid in set(pids) - set(statuses):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return [statuses[pid] for pid in pids]


def be_rank(observer: Observer, request: dict[str, object], rank: int) -> None:
    """Run the program as one rank, and leave."""
    observer.recorder.folder = str(request["folder"])
    log = os.open(f"{request['folder']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(str(request["cwd"]))
    world = str(request["world"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="none",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
    )
    import torch.distributed

    # WHY: one run in fifty deadlocks in gloo's teardown, observed or not; here ranks just leave
    torch.distributed.destroy_process_group = lambda *args: None
    status = 0
    sys.argv = [str(request["script"])]
    try:
        runpy.run_path(str(request["script"]), run_name="__main__")
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, status = error, 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
