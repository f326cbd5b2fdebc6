"""explain on short logs: the cause of each, and the rank at fault where the evidence names one."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.explain.logs import (
    PEER,
    block_of,
    code_of,
    explain_text,
    joined,
    of_rank,
    rank_of,
    sections,
    timeouts,
    traceback_of,
    with_other_size,
)

KEY_ERROR = traceback_of("KeyError: 'label'")
ECHO = traceback_of(PEER)
OTHERS_OF_1000 = [f"[rank{rank}]: step 7 | loss 2.5" for rank in range(2, 1000)]
OTHERS_OF_4 = [f"<gpu-a.{number}/12:30:07> step 7" for number in range(4)]
OOM = "[811.123456] Out of memory: Killed process 4001 (python) total-vm:8kB\n"
NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled system error, "
    "NCCL version 2.20.5\nLast error:\n"
    "socketStartConnect: Connect to 10.0.0.1<40815> failed : Software caused abort"
)
TEXTS = sections("short_logs.txt")
SUB_GROUP = "PG ID 5 PG GUID 37(TENSOR)"
DEFAULT_GROUP = "PG ID 0 PG GUID 0(default_pg)"
SPAWN = "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
STACK = 'Current thread 0x00007f66 (most recent call first):\n  File "/opt/torch/'
CRASH = f"Fatal Python error: Segmentation fault\n\n{STACK}"
BARRIER = "RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 60000 ms"
CLOSING = "W1122 08:08:33.1 9 x/api.py:900] Sending process 4000 closing signal SIGTERM\n"
DETERMINED = "[2024-02-27T21:05:20.718657Z] fa88a9df [rank=5] || "
GLOBAL_RANKS = (
    "Global rank 3 (PID 3812) exited with code 1\n"
    f"----------Begin global rank 3 STDERR----------\n{joined(KEY_ERROR)}"
    "----------End global rank 3 STDERR----------\n"
    "Global rank 0 (PID 3809) exited with code -15\n"
)
LOGGED_BY_A_LIBRARY = [
    "Traceback (most recent call last):",
    '  File "/opt/env/lib/python3.11/site-packages/torch/x.py", line 2, in read_metadata',
    "    open(path)",
    "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/.metadata'",
    "Falling back to rank local metadata.",
]
NAN = "".join(f"{{'loss': 0.0, 'grad_norm': nan, 'epoch': {epoch}}}\n" for epoch in range(3))
TRAINED = "{'train_runtime': 12.1}\n"
ELASTIC = "torch.distributed.elastic.multiprocessing.api:"
SIGTERM, FAILED = (
    f"{ELASTIC}Sending process 41 closing signal SIGTERM",
    f"{ELASTIC}failed (exitcode: 1) local_rank: 0 (pid: 9)",
)
VALUE_ERROR = joined(traceback_of("ValueError: the mask and the input differ in length"))
RAY = (
    "step 3\n2023-01-17 17:21:35,472\tWARNING worker.py:1829 -- A worker died or was killed while "
    "executing a task by an unexpected system error.\n"
)
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-05-21T17:01:43 DUE TO TIME LIMIT ***\n"
)
CHECKPOINT, ALL_RANKS = "torch.distributed.checkpoint.api.", "dict_keys([0, 1, 2, 3])"
RAY_END = "2023-01-17 17:21:35,509\tERROR trial_runner.py:980 -- Error processing event.\n"
GOODBYE = (
    "[W302 04:00:14.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
    "destroyed before we destruct ProcessGroupNCCL. On normal program exit, the application should "
    "call destroy_process_group"
)


def lost_by(*ranks: int) -> str:
    return joined(*(of_rank(rank, ECHO) for rank in ranks))


def of(rank: int, lines: list[str]) -> str:
    return joined(of_rank(rank, lines))


def behind(prefix: str, lines: list[str]) -> str:
    return joined([prefix + line for line in lines])


def raised(last: str) -> str:
    return joined(traceback_of(last))


SUB_GROUP_OF_8 = timeouts({0: 90, 1: 90, 3: 90}, world_size=8).replace(DEFAULT_GROUP, SUB_GROUP)
# fmt: off
LOGS: Mapping[str, str | tuple[str, str]] = {
    # who is at fault: only what the evidence names
    "the first exception, not the rank that lost it: python-keyerror of rank 5":
        (lost_by(0) + of(5, KEY_ERROR), "train.py:37"),
    "lines of two ranks that alternate: python-keyerror of rank 2":
        joined(*map(list, zip(of_rank(0, ECHO), of_rank(2, KEY_ERROR), strict=False))),
    "a line of each of 1000 ranks between those of a traceback: python-keyerror of rank 1":
        joined(*([line, *OTHERS_OF_1000] for line in of_rank(1, KEY_ERROR))),
    "the same error on all ranks accuses nobody: python-keyerror of nobody":
        joined(*(of_rank(rank, KEY_ERROR) for rank in range(8))),
    "without prefixes: the only failed process: python-keyerror of rank 3":
        (joined(KEY_ERROR) + block_of({3: 1}, root=3), '"host": "node1"'),
    "the only process that torchrun did not end itself: python-keyerror of rank 3":
        joined(KEY_ERROR) + block_of({3: 1, 0: -15, 1: -15}, root=3),
    "a killed rank comes before the echo of the others: killed-sigkill of rank 1":
        lost_by(0) + block_of({0: 1, 1: -9}, root=1),
    "the kernel's pid leads to the rank: memory-kernel-oom of rank 1":
        block_of({0: 1, 1: -9}, root=0) + OOM,
    "the rank that is missing at a timeout: nccl-timeout of rank 6":
        timeouts({rank: 808 for rank in range(8) if rank != 6}, world_size=8),
    "the lowest sequence number is behind: nccl-timeout of rank 2":
        timeouts({0: 90, 1: 90, 2: 88, 3: 90}, world_size=4),
    "a rank whose line was cut off: nccl-timeout of nobody":
        (joined(timeouts({rank: 808 for rank in range(8)}, world_size=8).splitlines()[:9]),
         "nothing is known of rank 7"),
    "half of the ranks are not called missing: nccl-timeout of nobody":
        (timeouts({0: 90, 1: 90}, world_size=4), '"sentence": "The job'),
    "of two ranks one has another size, and nobody knows which: collective-mismatch of nobody":
        with_other_size(timeouts({0: 90, 1: 90}, world_size=2), rank=1),
    "ranks of a sub-group are not those of the job: nccl-timeout of nobody": SUB_GROUP_OF_8,
    "a rank that may be in no such sub-group: nccl-timeout of nobody":
        timeouts({0: 90, 1: 90, 2: 90}, world_size=4).replace(DEFAULT_GROUP, SUB_GROUP),
    "gloo's barrier names two: gloo-barrier of nobody":
        (of(0, traceback_of(BARRIER)), '"sentence": "Ranks 4, 5'),
    # which of several failures is the cause
    "a root later in the file: python-keyerror of rank 2":
        timeouts({0: 90, 1: 90}, world_size=3) + of(2, KEY_ERROR),
    "a long message, a line of which names the cause: nccl-connect":
        (raised(NCCL_ERROR), '"text": "socketStartConnect: Connect to 10.0.0.1'),
    "a watchdog passes an error on: gpu-illegal-access of rank 0": TEXTS["a watchdog"],
    "a traceback without an end hides nothing: killed-sigkill of rank 2":
        joined(KEY_ERROR[:3]) + raised(f"{SPAWN}signal SIGKILL"),
    "of a chain what the program made of it: python-keyerror":
        (raised("KeyError: 'rows'").rstrip()
         + "\n\nThe above exception was the direct cause of the following exception:\n\n"
         + raised("data.ShardError: shard 1 has no rows"),
         "shard 1 has no rows"),
    "a message of several lines behind a level: checkpoint-size":
        behind("[2026-11-22 08:08:33,1][ERROR] ", TEXTS["sizes of a checkpoint"].splitlines()),
    "a crash while DDP is made: gloo-detail-crash of nobody":
        f'{CRASH}nn/parallel/distributed.py", line 1473 in _ddp_init_helper\n' * 2
        + "process 1 terminated with signal SIGSEGV\n",
    "a process that waits in its end: gloo-destroy-hang of nobody":
        f'Timeout (0:05:00)!\n{STACK}distributed/distributed_c10d.py", line 2308 in '
        "destroy_process_group\n",
    "the native stack of DDP that outlived its group: gloo-ddp-outlives-group":
        TEXTS["native stacks of DDP that outlives its group"],
    "composer quotes a rank: python-keyerror of rank 3": GLOBAL_RANKS,
    "determined: python-keyerror of rank 5": behind(DETERMINED, KEY_ERROR),
    # consequences
    "what torchrun ends itself, beside a rank that says nothing: unknown of nobody":
        CLOSING + block_of({0: -15, 1: 1}, root=1),
    "what was told to stop: stop-sigterm": CLOSING + block_of({0: -15}, root=0),
    "a rank that somebody else than torchrun told to stop: stop-sigterm of rank 1":
        lost_by(0) + CLOSING + block_of({0: -15, 1: -15}, root=1),
    "what torchrun had to kill, beside a rank that says nothing: unknown of nobody":
        CLOSING
        + CLOSING.replace("Sending", "Unable to shutdown").replace("closing signal", "via")
        + block_of({0: -9, 1: 1}, root=1),
    "srun ends the other tasks: python-keyerror of rank 3":
        behind("3: ", KEY_ERROR) + TEXTS["srun ends the others"],
    "a task of srun that ran out of memory: memory-slurm-oom of rank 1":
        TEXTS["a task of srun without memory"],
    "a task of srun that is a launcher is no rank: memory-slurm-oom of nobody":
        TEXTS["a task of srun without memory"] + TEXTS["an agent under srun"],
    "a rank that ended without an exception, and its own error: stop-silent of rank 1":
        ("2026-11-26 16:39:14,374 train ERROR shard 17 is cut off\n"
         + lost_by(0, 2)
         + block_of({1: 3, 0: -15, 2: 1}, root=1),
         "shard 17 is cut off"),
    "a rank that finished before the others: lost-finished-rank of nobody":
        lost_by(1) + block_of({1: 1}, root=1),
    "a rank that ended its process group before the others lost it: lost-finished-rank of rank 1":
        of(1, [GOODBYE]) + lost_by(0),
    "a rank that ends its process group after it has lost one: lost-peer of nobody":
        lost_by(0) + of(0, [GOODBYE]),
    "all ranks end their process groups: open of nobody": of(0, [GOODBYE]) + of(1, [GOODBYE]),
    "a lost rank, and nobody knows whose traceback it is: lost-peer":
        joined(ECHO) + block_of({1: 3, 0: 1}, root=1),
    # what a program or a library caught, logged and went on from
    "what a library logged does not hide what ended the process: python-keyerror":
        behind("2026-11-22T08:08:33.1Z ", [*LOGGED_BY_A_LIBRARY, *KEY_ERROR]),
    "what a library logged last: data-missing-file":
        behind("2026-11-22T08:08:33.1Z ", LOGGED_BY_A_LIBRARY),
    "words of success do not hide what torch says of a rank: python-keyerror of rank 1":
        joined(of_rank(1, KEY_ERROR), ["Training complete"]),
    "an exception that the program raises: python-raised":
        joined([*KEY_ERROR[:2], "    raise RuntimeError(text)", "RuntimeError: a new text"]),
    "a loss that is NaN until the end: amp-nan": NAN + TRAINED,
    "Megatron's word for NaN: amp-nan": 3 * "step 7 | loss scale: 1.0 | grad norm: nan |\n",
    "a loss that was NaN: healthy":
        NAN + "{'loss': 0.1, 'grad_norm': 1.0, 'epoch': 3}\n" + TRAINED,
    # other launchers and libraries of logs
    "a prefix that nobody knows, with numbers that are no rank: python-keyerror of nobody":
        (joined(*([f"<gpu-a.3/12:30:05> {line}", *OTHERS_OF_4] for line in KEY_ERROR)),
         "train.py:37"),
    "metrics as JSON: open of nobody":
        joined([json.dumps({"epoch": n, "error": None, "failed": 0}) for n in range(3)]),
    "lines of a logger are no part of the message before: python-valueerror":
        f"{VALUE_ERROR}WARNING:{SIGTERM}\nERROR:{FAILED}\n",
    "a warning before the error that ends the log: launch-ray-actor": RAY + RAY_END,
    "stopped by hand, started again, and stopped again: stop-interrupt":
        2 * "step 4\nstep 5\nstep 6\n^CKeyboardInterrupt\n",
    "a warning, and it goes on: open of nobody": f"{RAY}step 4\nstep 5\n",
    "an exception in a group: python-keyerror of rank 1":
        (TEXTS["a group of exceptions"], "train.py:3"),
    "a group whose exceptions have no traceback: python-raised of rank 3":
        TEXTS["a group without tracebacks"] + block_of({0: -15, 3: 1}, root=3),
    "a launcher that knows the signal: killed-sigkill":
        raised("subprocess.CalledProcessError: Command 'python' died with <Signals.SIGKILL: 9>."),
    "a spawned process, as torch told it first: killed-segfault of rank 3":
        raised("Exception: process 3 terminated with signal SIGSEGV"),
    "a pod that ended: unknown":
        "epoch 1\n1.7e+09\tDEBUG\tevents\tPod: kubeflow.job-worker-0 exited with code 1\t{}\n",
    "of two ranks that failed the one that torchrun saw first: python-keyerror of rank 0":
        joined(of_rank(0, KEY_ERROR), of_rank(1, traceback_of("RuntimeError: CUDA out of memory")))
        + f"E0815 x/api.py:826] {FAILED.removeprefix(ELASTIC)} of binary: python\n",
    "what was logged, long before the exception that ended it: python-valueerror of nobody":
        raised("requests.ConnectionError: Max retries exceeded with url: /a")
        + joined([f"step {n}" for n in range(4)])
        + VALUE_ERROR
        + joined(80 * [60 * "="]),
    "an exception in a text that the model wrote: open of nobody":
        raised("ZeroDivisionError: division by zero") + joined([f"step {n}" for n in range(4)]),
    "a task that srun kills after scancel: stop-cancelled of nobody":
        TIME_LIMIT.replace("DUE TO TIME LIMIT ", "") + "srun: error: n1: task 0: Killed\n",
    "a rank failed, and the others waited until the time limit: python-keyerror of rank 3":
        of(3, KEY_ERROR) + TIME_LIMIT,
    "an exception that was logged, and training until the time limit: stop-time-limit of nobody":
        of(3, KEY_ERROR) + "step 4\nstep 5\n" + TIME_LIMIT,
    "what a program noted before the exception that ended it: python-keyerror of nobody":
        "x.sh: line 12: module: command not found\nwandb: ERROR Error while calling W&B API\n"
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved "
        "(gai error: -2 - Name or service not known).\n" + joined(KEY_ERROR),
    "a warning of Python's that names a file: unknown of nobody":
        "/opt/x/resource_tracker.py:237: UserWarning: '/af_barrier': [Errno 2] No such file or "
        "directory: '/af_barrier'\nERROR:composer.cli.launcher:Rank 1 crashed with exit code 1.\n",
    "what a shell says after an exception: python-keyerror of nobody":
        joined(KEY_ERROR) + "Killed\n",
    "a launcher that was told to stop fails, which mpirun says: stop-sigterm":
        f"step 3\n{SIGTERM}\n{ELASTIC}SignalException: Process 11 got signal: 15\n"
        "mpirun detected that one or more processes exited with non-zero status, thus causing\n",
    "of a failure mpirun says no more: unknown": "a non-zero exit code. Per user-direction, x\n",
    "a rank that aborts MPI: unknown of nobody":
        "step 1\nMPI_ABORT was invoked on rank 2 in communicator MPI COMMUNICATOR 5\n",
    "a checkpoint that no rank could write: checkpoint-sharded of nobody":
        of(0, traceback_of(f"{CHECKPOINT}CheckpointException ranks:{ALL_RANKS}")),
    "of many error lines the last one counts, after words of success, too: unknown":
        joined([TRAINED, *(f"ERROR: could not upload part {n}\nstep {n}" for n in range(40))])
        + "ERROR: giving up\n",
}
# fmt: on
"""What a log shows: the verdict, `of` whom if that matters; the log, and words of the answer."""


@pytest.mark.parametrize("name", LOGS)
def test_the_cause_and_the_rank_at_fault(name: str, tmp_path: Path) -> None:
    case, (_, _, verdict) = LOGS[name], name.rpartition(": ")
    text, words = (case, "") if isinstance(case, str) else case
    found = explain_text(text, tmp_path)
    rank = rank_of(found)
    whose = "nobody" if rank is None else f"rank {rank}"
    assert verdict in (code_of(found), f"{code_of(found)} of {whose}")
    assert words in json.dumps([found["guilty"], found["cause"], found["evidence"]])
