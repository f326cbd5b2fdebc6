"""Causes in NCCL: timeouts, mismatches, its set-up, InfiniBand and sockets."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

_PG = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_NO_GPU = "needs NCCL and GPUs; composed from the format string"
_IB = "NCCL src/transport/net_ib"

CAUSES = (
    Cause(
        code="nccl-timeout",
        title="a collective of NCCL did not finish in time",
        phrases=(
            r"Watchdog caught collective operation timeout: WorkNCCL\(",
            r"Work WorkNCCL\(.* timed out in blocking wait",
            r"Timeout at NCCL work: \d+, last enqueued NCCL work",
            r"Some NCCL operations have failed or timed out",
            r"Timeout at collective: \w+, #\d+",
            r"Received a dump signal due to a collective timeout from +(?:this local )?rank",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="The ranks that print this wait; the cause is on a rank that did not reach the "
        "collective: it crashed, it hangs, it is slow (data, evaluation, a checkpoint on rank 0 "
        "alone), it took another branch, or it has fewer batches",
        fix=Fix(
            plain="Look at the log of the missing rank. No collective (DDP forward, barrier, "
            "all_reduce) under `if rank == 0`; equal numbers of batches per rank "
            "(DistributedSampler, or with model.join()); long work of one rank: "
            "init_process_group(timeout=timedelta(hours=1)).",
            lightning="DDPStrategy(timeout=timedelta(hours=1)); log with sync_dist only on all "
            "ranks",
            accelerate="InitProcessGroupKwargs(timeout=timedelta(hours=1)); gather on all ranks",
            trainer="TrainingArguments(ddp_timeout=3600)",
            suite="--hang_after_s finds the rank and its line; --timeout_s 3600",
        ),
        confirm="Run again with TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 and give "
        "the "
        "dumps to explain; or py-spy dump each rank while it hangs.",
        source=_PG,
        or_else="All ranks time out at the very first collective: then it is the network or "
        "peer-to-peer access between GPUs (NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1).",
        no_test=_NO_GPU,
    ),
    Cause(
        code="collective-missing",
        title="a rank did not reach a collective that the others wait in",
        phrases=(
            r"\[(?P<ranks>\d+(?:, ?\d+)*)\] finished collective #\d+.*but didn't join collective "
            r"#\d+",
            r"\[(?P<ranks>\d+(?:, ?\d+)*)\] didn't (?:join|enter) collective",
            r"[Mm]issing ranks: \[?(?P<ranks>\d+(?:, ?\d+)*)",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NAMED,
        why="The report of the ranks' last collectives names it: it crashed, hangs, is slow, or "
        "took "
        "another branch",
        fix=Fix(
            plain="Look at the log and the stack (py-spy dump) of the named rank. No collective "
            "under `if rank == 0`, equal numbers of batches per rank.",
            suite="--hang_after_s finds its line",
            lightning="self.log(..., sync_dist=True) on all ranks; no collective under "
            "rank_zero_only",
            accelerate="gather, wait_for_everyone and save_state on all processes, not "
            "under is_main_process",
            trainer="no collective in compute_metrics or callbacks under is_world_process_zero",
        ),
        confirm="The stack of the named rank is outside of a collective.",
        source="torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, desync debug",
        no_test=_NO_GPU,
    ),
    Cause(
        code="collective-mismatch",
        title="the ranks called different collectives",
        phrases=(
            r"Impossible to apply the desired operation due to inadequate shapes",
            r"Detected mismatch between collectives on ranks",
            r"Mismatch between collective operation types across ranks",
            r"[Cc]ollective (?:mismatch|sequence mismatch)",
            r"Received data size doesn't match expected size\. Is there a distributed collective "
            r"mismatch",
            r"op\.preamble\.length <= op\.nbytes",
            r"Some ranks called different collectives",
        ),
        tier=Tier.MISMATCH,
        blame=Blame.NOBODY,
        why="At one point one rank ran another operation, or the same one with another size or "
        "type: a collective under a condition that differs, unequal batches, or tensors of "
        "unequal length in all_gather",
        fix=Fix(
            plain="Take collectives out of conditions that differ between ranks; pad tensors to "
            "one "
            "length before all_gather (gather the lengths first); same order of calls everywhere.",
            lightning="self.log(..., sync_dist=True) on all ranks or on none",
            accelerate="accelerator.pad_across_processes before accelerator.gather; "
            "gather_for_metrics for evaluation",
            trainer="eval_accumulation_steps, and a compute_metrics that gives the same shape",
        ),
        confirm="Run again on nccl with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names operation and "
        "shape on both ranks before the hang (on gloo it crashes torch 2.13).",
        source="torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp; gloo/transport/tcp/pair.cc",
        test="collective_mismatch",
    ),
    Cause(
        code="nccl-duplicate-gpu",
        title="two ranks use the same GPU",
        phrases=(
            r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<two>\d+) both on CUDA device",
            r"Multiple CUDA devices? (?:found|used) for rank",
        ),
        tier=Tier.EXCEPTION,
        blame=Blame.NOBODY,
        why="The processes did not choose their own device, so they all took GPU 0, or "
        "CUDA_VISIBLE_DEVICES is wrong, or there are more ranks than GPUs",
        fix=Fix(
            plain="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group "
            "and before any .cuda(); --nproc_per_node at most the number of GPUs.",
            accelerate="num_processes in `accelerate config` at most the number of GPUs",
            lightning="Trainer(devices=N) without a torch.cuda.set_device or .cuda() of your own",
        ),
        confirm="print(rank, torch.cuda.current_device(), os.environ.get('CUDA_VISIBLE_DEVICES')).",
        source="NCCL src/init.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-remote-error",
        title="NCCL lost the connection to another rank",
        phrases=(
            r"ncclRemoteError: A call failed possibly due to a network error or a remote process",
            r"[Cc]onnection closed by remote peer",
            r"socketProgress.*(?:closed|reset)",
            r"NCCL error: remote process exited or there was a network error",
            r"socketPollConnect.*(?:ECONNREFUSED|refused)",
            r"Call to recv from .* failed : Connection (?:reset|timed out)",
        ),
        tier=Tier.LOST,
        blame=Blame.NOBODY,
        why="A rank that this one talks to ended, or the network between them failed",
        fix=Fix(
            plain="Look at the log of the other ranks: the first that ended is the cause. If none "
            "ended: the network (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, cables, switch).",
            suite="the surviving ranks save; start again with --resume newest",
        ),
        confirm="torchrun's last block, dmesg and the scheduler's accounting (sacct, kubectl "
        "describe) of the other nodes.",
        source="torch/csrc/distributed/c10d/NCCLUtils.cpp; NCCL src/misc/socket.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-version",
        title="the ranks use different versions of NCCL",
        phrases=(
            r"[Mm]ismatched NCCL version detected",
            r"NCCL version mismatch",
            r"version mismatch .* NCCL",
            r"ncclInvalidUsage.*[Vv]ersion",
        ),
        tier=Tier.MISMATCH,
        blame=Blame.NOBODY,
        why="Nodes have other wheels of torch, or LD_LIBRARY_PATH or LD_PRELOAD puts another "
        "libnccl first on one of them",
        fix=Fix(
            plain="Same image or environment on all nodes; unset LD_LIBRARY_PATH; compare "
            "python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'.",
            suite="versions of all ranks are compared at the start (DDP-G02)",
        ),
        confirm="NCCL_DEBUG=VERSION prints it on each rank.",
        source="NCCL src/init.cc, src/bootstrap.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-shm",
        title="NCCL found no room in /dev/shm",
        phrases=(
            r"Error while (?:creating|attaching to) shared memory segment (?P<path>\S+)",
            r"Error: failed to extend (?P<path>/dev/shm/nccl\S+) to (?P<size>\d+) bytes",
            r"Call to posix_fallocate failed : No space left on device",
        ),
        blame=Blame.NOBODY,
        why="NCCL passes data between GPUs of one node through shared memory; a container has 64 "
        "MB of it by default",
        fix=Fix(
            plain="docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium "
            "Memory mounted at /dev/shm; remove stale /dev/shm/nccl-* files; or "
            "NCCL_SHM_DISABLE=1 (slower).",
        ),
        confirm="df -h /dev/shm.",
        source="NCCL src/misc/shmutils.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-missing",
        title="NCCL was asked for on a torch or a machine without it",
        phrases=(
            r"Distributed package doesn't have NCCL built in",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"The NCCL backend requires GPUs",
            r"Backend nccl is not (?:available|supported)",
        ),
        blame=Blame.NOBODY,
        why="This torch is a CPU build (or one for Windows or macOS), or no GPU is visible",
        fix=Fix(
            plain="backend = 'nccl' if torch.cuda.is_available() else 'gloo'. With a GPU: install "
            "torch with CUDA, and check nvidia-smi and CUDA_VISIBLE_DEVICES.",
            lightning="DDPStrategy(process_group_backend='gloo')",
            accelerate="accelerate launch --cpu",
            trainer="TrainingArguments(ddp_backend='gloo')",
            suite="--backend auto (the default) or --cpu_only",
        ),
        confirm="python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'.",
        source="torch/distributed/distributed_c10d.py",
        test="nccl_missing",
    ),
    Cause(
        code="nccl-wrong-device-tensor",
        title="a tensor on the CPU was given to NCCL",
        phrases=(
            r"No backend type associated with device type (?P<device>\w+)",
            r"Tensors must be CUDA and dense",
        ),
        why="A process group of NCCL moves GPU tensors only (and one of gloo no others than CPU's "
        "in some operations)",
        fix=Fix(
            plain="tensor.to(device) before the collective; or "
            "init_process_group('cpu:gloo,cuda:nccl') for both; for Python objects "
            "torch.cuda.set_device first.",
            lightning="torchmetrics: compute on the module's device",
        ),
        confirm="print(tensor.device) in the line that the traceback names.",
        source="torch/csrc/distributed/c10d/ProcessGroup.hpp",
        test="nccl_wrong_device_tensor",
    ),
    Cause(
        code="nccl-store-get",
        title="rank 0 did not announce its NCCL id",
        phrases=(
            r"is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<ranks>\d+)\]",
            r"retreiving ncclUniqueId from \[(?P<ranks>\d+)\]",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NAMED,
        why="The rank in `from [..]` creates the communicator's id at its first collective. It "
        "ended or did not get there; the rank that prints this only waits for it",
        fix=Fix(
            plain="Read the log of the named rank: it crashed, or it does work alone before its "
            "first collective (download, preprocessing, a prompt of wandb). A longer wait: "
            "init_process_group(timeout=...).",
            accelerate="InitProcessGroupKwargs(timeout=...)",
            trainer="TrainingArguments(ddp_timeout=...)",
            lightning="downloads in prepare_data(); DDPStrategy(timeout=timedelta(hours=1))",
        ),
        confirm="py-spy dump of the named rank, or the end of its own log.",
        source=_PG,
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-heartbeat",
        title="NCCL's watchdog thread got stuck",
        phrases=(
            r"[Hh]eartbeat monitor timed out",
            r"ProcessGroupNCCL's watchdog got stuck for (?P<seconds>\d+) seconds",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="A call into CUDA or NCCL does not return, or the GIL is held: a hung GPU, a deadlock "
        "in the driver, or a communicator being aborted",
        fix=Fix(
            plain="Look for an Xid in dmesg and for an earlier timeout in the log; "
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800 if it was only slow.",
        ),
        confirm="nvidia-smi hangs or shows an error on that node.",
        source=_PG,
        no_test=_NO_GPU,
    ),
)
