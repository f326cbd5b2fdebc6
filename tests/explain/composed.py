"""Logs of failures that this machine can't have, made from the format strings of their sources.

composed.txt has one for each cause without a program in failing.txt: what needs GPUs, NCCL,
InfiniBand, broken hardware, Slurm, Kubernetes, Windows, macOS, or a package that the tests do not
need. `{rank}` and `{other}` are numbers that a test chooses, `\\n` is the end of a line.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_WATCHDOG = (
    "[rank{rank}]:[E1122 08:08:33.123456789 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, "
    "NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before "
    "timing out."
)
_PG = (
    "[rank{rank}]:[E1122 08:08:33.223456789 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID "
    "0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: {seq} PG "
    "status: last enqueued work: {seq}, last completed work: {before}"
)
_DOWN = (
    "[rank{rank}]:[E1122 08:08:34.023456789 ProcessGroupNCCL.cpp:743] [Rank {rank}] To avoid data "
    "inconsistency, we are taking the entire process down."
)


@dataclass(frozen=True, slots=True)
class Composed:
    """A line of composed.txt: one line of a log, or the last line of a traceback."""

    code: str
    kind: str
    """line: of no rank; rank: a traceback, whose rank must be named; job: one that blames nobody"""

    text: str

    @property
    def is_raised(self) -> bool:
        return self.kind != "line"


_LINES = Path(__file__).with_name("composed.txt").read_text(encoding="utf-8").splitlines()
LOGS = [Composed(*line.replace("\\n", "\n").split(" ", 2)) for line in _LINES]

WITHOUT_LOG = {
    **dict.fromkeys(["nccl-timeout", "collective-missing"], "timeouts() makes its logs"),
    **dict.fromkeys(
        ["stop-silent", "lost-finished-rank"], "in torchrun's table: test_short_logs.py"
    ),
    **dict.fromkeys(["gloo-ddp-outlives-group", "gloo-destroy-hang"], "a race: stacks there, too"),
    "nccl-aborted": "needs NCCL and GPUs, and a second failure",
    "gloo-detail-crash": "needs a torchrun of its own: test_short_logs.py",
    "killed-outside": "in no log: in the run folder, TestFiles",
}
"""The causes that have neither a program nor a log here, and why."""


def log_of(case: Composed, *, rank: int, other: int) -> str:
    """Make a log: a few healthy lines, then the failure."""
    text = case.text.format(rank=rank, other=other)
    lines = [f"epoch 1 step {step} loss 1.{step} lr 3e-4" for step in range(8)]
    if case.is_raised:
        lines += [f"[rank{rank}]: {line}" for line in traceback_of(text)]
    else:
        lines += text.splitlines()
    return "\n".join(lines) + "\n"


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


def joined(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"


def traceback_of(last: str, *, line: int = 57) -> list[str]:
    """Make a traceback that ends with this exception."""
    return [
        "Traceback (most recent call last):",
        f'  File "/home/ana/train.py", line {line}, in <module>',
        "    main(args)",
        f'  File "/home/ana/train.py", line {line - 20}, in main',
        "    loss = step(model, batch)",
        "           ^^^^^^^^^^^^^^^^^^",
        '  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, '
        "in _call",
        "    return self._call_impl(*args, **kwargs)",
        *last.splitlines(),
    ]


def timeouts(seqs: dict[int, int], *, world_size: int) -> str:
    """Make the log of an NCCL timeout: the number of the collective in which each rank waits."""
    lines = [f"Starting with {world_size} processes", "epoch 1 step 10 loss 2.1"]
    for form in (_WATCHDOG, _PG, _DOWN):
        lines += [form.format(rank=rank, seq=seq, before=seq - 1) for rank, seq in seqs.items()]
    return "\n".join(lines) + "\n"


def with_other_size(text: str, *, rank: int) -> str:
    """Have one rank wait in a collective of 7 elements."""
    return re.sub(rf"(\[rank{rank}\].*NumelIn=)\d+", r"\g<1>7", text)


PEER = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [10.0.0.7]:31245. This is typically caused by a remote worker crashing."
)


def block_of(failures: dict[int, int], *, root: int, host: str = "node1") -> str:
    """Make torchrun's last block: the exit status of each failed rank."""

    def entry(index: int, rank: int) -> str:
        pid = 4000 + rank
        status = failures[rank]
        name = f"Signal {-status} (SIGKILL) received by PID {pid}" if status < 0 else (
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        )  # fmt: skip
        return (
            f"[{index}]:\n  time      : 2026-11-22_08:08:33\n  host      : {host}\n"
            f"  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {status} (pid: {pid})\n  error_file: <N/A>\n  traceback : {name}\n"
        )

    others = "".join(entry(i + 1, rank) for i, rank in enumerate(failures) if rank != root)
    rule = "-" * 60
    return (
        "Traceback (most recent call last):\n"
        '  File "/opt/env/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        '  File "/opt/env/lib/python3.11/site-packages/torch/distributed/run.py", line 936, in '
        "main\n"
        "    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{rule}\nFailures:\n"
        f"{others or '  <NO_OTHER_FAILURES>' + chr(10)}{rule}\n"
        f"Root Cause (first observed failure):\n{entry(0, root)}{'=' * 60}\n"
    )
