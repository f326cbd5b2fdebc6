"""Errors of NCCL, in its own words: which of them mean a lost rank, and what is wrong at a start.

The texts are those that torch puts together: its line, the code's explanation, NCCL's last error.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_training
from hardened_ddp.errors import GroupError
from hardened_ddp.ranks import group as group_module
from hardened_ddp.ranks.group import Group, lost_peer, open_group
from hardened_ddp.ranks.launch import Launch

CPU = torch.device("cpu")
WHERE = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
SYSTEM = (
    f"{WHERE}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. \nLast error:\n"
)
USAGE = (
    f"{WHERE}, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
CUDA = (
    f"{WHERE}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
INTERNAL = (
    f"{WHERE}, internal error - please report this issue to the NCCL developers, NCCL version "
    "2.27.5\nncclInternalError: Internal check failed.\nLast error:\n"
)
ABORTED = "NCCL communicator was aborted on rank 0. Original reason for failure was: "
LOST = [
    f"{WHERE}, remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer node1<49814>",
    SYSTEM + "ncclSocketProgress: Connection reset by peer node1<49814>",
    SYSTEM + "socketPollConnect: connect to 10.0.0.2<41245> returned Connection timed out",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=27, OpType=ALLREDUCE, "
    "NumelIn=25557032, NumelOut=25557032, Timeout(ms)=600000) ran for 600019 milliseconds before "
    "timing out.",
    f"{ABORTED}NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
    "NCCL communicator encountered error set by ProcessGroupNCCL: [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 10 milliseconds",
]
OWN = [
    f"{CUDA}Cuda failure 2 'out of memory'",
    f"{CUDA}Cuda failure 700 'an illegal memory access was encountered'",
    f"{ABORTED}{CUDA}Cuda failure 719 'unspecified launch failure'",
    f"{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    INTERNAL,
    "CUDA out of memory. Tried to allocate 2.00 GiB. 18 GiB are allocated by NCCL.",
    "Distributed package doesn't have NCCL built in",
]


@pytest.mark.parametrize(
    ("text", "is_lost"), [*((t, True) for t in LOST), *((t, False) for t in OWN)]
)
def test_only_what_another_rank_caused_is_a_lost_rank(
    text: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "LISTEN_LIMIT_S", 0.0)
    group = Group(Launch(world_size=2), CPU)
    lost = lost_peer(dist.DistBackendError(text), group)
    assert (lost is not None) == group.is_broken == is_lost


AT_A_START = [
    (f"{INTERNAL}Bootstrap : no socket interface found", "no socket interface", "ip -br addr"),
    (
        f"{SYSTEM}socketPollConnect: connect to 172.17.0.2<41245> returned No route to host, "
        "exceeded error retry count after 35 attempts",
        "172.17.0.2<41245> returned No route to host",
        "NCCL_SOCKET_IFNAME",
    ),
    (OWN[3], "both on CUDA device 1b000", "--nproc_per_node at most the number of GPUs"),
    (
        f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-o3XOed (size "
        "9637888), error: No space left on device (28)",
        "/dev/shm/nccl-o3XOed",
        "--shm-size",
    ),
    (f"{CUDA}Cuda failure 802 'system not yet initialized'", "Cuda failure 802", "NCCL_DEBUG"),
    ("Connect timeout [10.0.0.1]:3412", "Connect timeout", "port is free"),
]


@pytest.mark.parametrize("case", AT_A_START)
def test_a_start_that_fails_says_what_nccl_said_last_and_explain_what_helps(
    case: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, found, fix = case
    met = {"open_store": lambda *_: dist.HashStore(), "rendezvous": lambda store, *_, **__: store}
    with (
        mock.patch.multiple(group_module, **met),
        mock.patch.object(dist, "init_process_group", side_effect=dist.DistBackendError(text)),
        pytest.raises(GroupError) as caught,
    ):
        open_group(Launch(world_size=2), device=CPU, backend="gloo", timeout_s=1)
    assert found in caught.value.message
    log = tmp_path / "log"
    log.write_text(f"[2026-11-26 23:00:00 rank 0] ERROR hardened_ddp.ranks: {caught.value}\n")
    assert ddp_training.main(["explain", str(log)]) == 0
    said = capsys.readouterr().out
    assert fix in caught.value.fix + said
    assert "No failure seen" not in said
    assert "Ould not meet" not in said
