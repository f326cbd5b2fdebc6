"""Causes in NCCL: timeouts, connections, network, set-up, and what only says that it failed."""

from ddp_doctor.explain.events import Blame, Cause, Tier

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
        why="The ranks that print this wait; the cause is on a rank that did not reach the "
        "collective: it crashed, it hangs, it is slow (data, evaluation, a checkpoint on rank 0 "
        "alone), it took another branch, or it has fewer batches",
        fix="Look at the log of the missing rank. No collective (DDP forward, barrier, all_reduce) "
        "under `if rank == 0`; equal numbers of batches per rank (DistributedSampler, or with "
        "model.join()); long work of one rank: init_process_group(timeout=timedelta(hours=1)).",
        lightning="DDPStrategy(timeout=timedelta(hours=1)); log with sync_dist only on all ranks",
        accelerate="InitProcessGroupKwargs(timeout=timedelta(hours=1)); gather on all ranks",
        trainer="TrainingArguments(ddp_timeout=3600)",
        confirm="Run again with TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 and give "
        "the dumps to explain; or py-spy dump each rank while it hangs.",
        or_else="All ranks time out at the very first collective: then it is the network or "
        "peer-to-peer access between GPUs (NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1).",
    ),
    Cause(
        code="collective-missing",
        title="a rank did not reach a collective that the others wait in",
        phrases=(
            r"\[(?P<ranks>\d+(?:, ?\d+)*)\] finished collective #\d+.*but didn't join "
            r"collective #\d+",
            r"\[(?P<ranks>\d+(?:, ?\d+)*)\] didn't (?:join|enter) collective",
            r"[Mm]issing ranks: \[?(?P<ranks>\d+(?:, ?\d+)*)",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NAMED,
        why="The report of the ranks' last collectives names it: it crashed, hangs, is slow, or "
        "took another branch",
        fix="Look at the log and the stack (py-spy dump) of the named rank. No collective under "
        "`if rank == 0`, equal numbers of batches per rank.",
        lightning="self.log(..., sync_dist=True) on all ranks; no collective under rank_zero_only",
        accelerate="gather, wait_for_everyone and save_state on all processes, not under "
        "is_main_process",
        trainer="no collective in compute_metrics or callbacks under is_world_process_zero",
        confirm="The stack of the named rank is outside of a collective.",
    ),
    Cause(
        code="collective-mismatch",
        title="the ranks called different collectives",
        phrases=(
            r"Impossible to apply the desired operation due to inadequate shapes",
            r"Detected mismatch between collectives on ranks",
            r"Mismatch between collective operation types across ranks",
            r"[Cc]ollective (?:mismatch|sequence mismatch)",
            r"Received data size doesn't match expected size\. Is there a distributed "
            r"collective mismatch",
            r"op\.preamble\.length <= op\.nbytes",
            r"Some ranks called different collectives",
        ),
        tier=Tier.MISMATCH,
        why="At one point one rank ran another operation, or the same one with another size or "
        "type: a collective under a condition that differs, unequal batches, or tensors of unequal "
        "length in all_gather",
        fix="Take collectives out of conditions that differ between ranks; pad tensors to one "
        "length before all_gather (gather the lengths first); same order of calls everywhere.",
        lightning="self.log(..., sync_dist=True) on all ranks or on none",
        accelerate="accelerator.pad_across_processes before accelerator.gather; gather_for_metrics "
        "for evaluation",
        trainer="eval_accumulation_steps, and a compute_metrics that gives the same shape",
        confirm="Run again on nccl with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names operation and "
        "shape on both ranks before the hang (on gloo it crashes torch 2.13).",
    ),
    Cause(
        code="nccl-duplicate-gpu",
        title="two ranks use the same GPU",
        phrases=(
            r"Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device",
            r"Multiple CUDA devices? (?:found|used) for rank",
        ),
        tier=Tier.EXCEPTION,
        blame=Blame.NOBODY,
        why="The processes did not choose their own device, so they all took GPU 0, or "
        "CUDA_VISIBLE_DEVICES is wrong, or there are more ranks than GPUs",
        fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group and "
        "before any .cuda(); --nproc_per_node at most the number of GPUs.",
        accelerate="num_processes in `accelerate config` at most the number of GPUs",
        lightning="Trainer(devices=N) without a torch.cuda.set_device or .cuda() of your own",
        confirm="print(rank, torch.cuda.current_device(), os.environ.get('CUDA_VISIBLE_DEVICES')).",
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
        why="A rank that this one talks to ended, or the network between them failed",
        fix="Look at the log of the other ranks: the first that ended is the cause. If none ended: "
        "the network (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, cables, switch).",
        confirm="torchrun's last block, dmesg and the scheduler's accounting (sacct, kubectl "
        "describe) of the other nodes.",
    ),
    Cause(
        code="nccl-version",
        title="the ranks use different versions of NCCL",
        phrases=(r"[Mm]ismatched NCCL version detected", r"NCCL version mismatch"),
        tier=Tier.MISMATCH,
        why="Nodes have other wheels of torch, or LD_LIBRARY_PATH or LD_PRELOAD puts another "
        "libnccl first on one of them",
        fix="Same image or environment on all nodes; unset LD_LIBRARY_PATH; compare python -c "
        "'import torch; print(torch.__version__, torch.cuda.nccl.version())'.",
        confirm="NCCL_DEBUG=VERSION prints it on each rank.",
    ),
    Cause(
        code="nccl-shm",
        title="NCCL found no room in /dev/shm",
        phrases=(
            r"Error while (?:creating|attaching to) shared memory segment ",
            r"Error: failed to extend /dev/shm/nccl\S+ to \d+ bytes",
            r"Call to posix_fallocate failed : No space left on device",
        ),
        blame=Blame.NOBODY,
        why="NCCL passes data between GPUs of one node through shared memory; a container has 64 "
        "MB of it by default",
        fix="docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium Memory "
        "mounted at /dev/shm; remove stale /dev/shm/nccl-* files; or NCCL_SHM_DISABLE=1 (slower).",
        confirm="df -h /dev/shm.",
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
        fix="backend = 'nccl' if torch.cuda.is_available() else 'gloo'. With a GPU: install torch "
        "with CUDA, and check nvidia-smi and CUDA_VISIBLE_DEVICES.",
        lightning="DDPStrategy(process_group_backend='gloo')",
        accelerate="accelerate launch --cpu",
        trainer="TrainingArguments(ddp_backend='gloo')",
        confirm="python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'.",
    ),
    Cause(
        code="nccl-wrong-device-tensor",
        title="a tensor on the CPU was given to NCCL",
        phrases=(
            r"No backend type associated with device type (?:cpu|cuda)",
            r"Tensors must be CUDA and dense",
        ),
        why="A process group of NCCL moves GPU tensors only (and one of gloo no others than CPU's "
        "in some operations)",
        fix="tensor.to(device) before the collective; or init_process_group('cpu:gloo,cuda:nccl') "
        "for both; for Python objects torch.cuda.set_device first.",
        lightning="torchmetrics: compute on the module's device",
        confirm="print(tensor.device) in the line that the traceback names.",
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
        fix="Read the log of the named rank: it crashed, or it does work alone before its first "
        "collective (download, preprocessing, a prompt of wandb). A longer wait: "
        "init_process_group(timeout=...).",
        accelerate="InitProcessGroupKwargs(timeout=...)",
        trainer="TrainingArguments(ddp_timeout=...)",
        lightning="downloads in prepare_data(); DDPStrategy(timeout=timedelta(hours=1))",
    ),
    Cause(
        code="nccl-heartbeat",
        title="NCCL's watchdog thread got stuck",
        phrases=(
            r"[Hh]eartbeat monitor timed out",
            r"ProcessGroupNCCL's watchdog got stuck for \d+ seconds",
        ),
        tier=Tier.TIMEOUT,
        why="A call into CUDA or NCCL does not return, or the GIL is held: a hung GPU, a deadlock "
        "in the driver, or a communicator being aborted",
        fix="Look for an Xid in dmesg and for an earlier timeout in the log; "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800 if it was only slow.",
        confirm="nvidia-smi hangs or shows an error on that node.",
    ),
)


NETWORK = (
    Cause(
        code="nccl-ib-retry",
        title="an InfiniBand or RoCE connection failed",
        phrases=(
            r"Got completion from peer \S+ with (?:status=|error )\d+",
            r"NET/IB ?: .*(?:local catastrophic|Got async (?:error )?event|device fatal)",
            r"Call to ibv_modify_qp failed",
            r"IBV_WC_(?:RNR_)?RETRY_EXC_ERR",
            r"transport retry counter exceeded",
        ),
        tier=Tier.HARDWARE,
        blame=Blame.NOBODY,
        why="A message was not acknowledged after all retries (status 12): a broken cable, port or "
        "switch, a wrong GID index on RoCE, or the other node died",
        fix="ibstat and perfquery on both nodes; exclude the link: NCCL_IB_HCA=^mlx5_2; RoCE: "
        "NCCL_IB_GID_INDEX=3; network that fails only briefly: NCCL_IB_TIMEOUT=22 "
        "NCCL_IB_RETRY_CNT=13. As a workaround: NCCL_IB_DISABLE=1.",
        confirm="ib_write_bw between the two nodes over the named port; symbol errors in "
        "perfquery.",
        or_else="If the peer's log ends with a crash, the crash is the cause, not the link.",
    ),
    Cause(
        code="nccl-ib-memory",
        title="InfiniBand could not lock memory",
        phrases=(r"Call to ibv_(?:reg_mr|reg_mr_iova2|create_qp|create_cq|alloc_pd)\w* failed",),
        why="The limit of locked memory is too low (ulimit -l), in a container or under Slurm",
        fix="docker run --ulimit memlock=-1 --ulimit stack=67108864; Kubernetes: capability "
        "IPC_LOCK; Slurm: LimitMEMLOCK=infinity for slurmd and "
        "PropagateResourceLimitsExcept=MEMLOCK. As a workaround: NCCL_IB_DISABLE=1.",
        confirm="`ulimit -l` in the job prints unlimited.",
    ),
    Cause(
        code="nccl-interface",
        title="NCCL found no network interface that it can use",
        phrases=(
            r"Bootstrap : no socket interface found",
            r"NET/Socket : no (?:usable )?interface",
            r"NCCL_SOCKET_IFNAME (?:set by|does not match).*",
            r"unable to find (?:any )?(?:suitable|matching) (?:network|interface)",
        ),
        why="NCCL_SOCKET_IFNAME names an interface that this node does not have, or only the "
        "loopback interface is up",
        fix="`ip -br addr` on each node; NCCL_SOCKET_IFNAME=eth0 (or ^docker,lo), the same for "
        "GLOO_SOCKET_IFNAME; or unset both.",
        confirm="NCCL_DEBUG=INFO prints the interface that it uses.",
    ),
    Cause(
        code="nccl-connect",
        title="NCCL could not connect to another rank",
        phrases=(
            r"socketStartConnect: Connect to \S+ failed",
            r"Call to connect returned (?:Connection refused|No route to host|Connection timed "
            r"out)",
            r"socketPollConnect: .*(?:timeout|timed out|No route|exceeded)",
            r"connect to [\d.]+<\d+> returned",
        ),
        tier=Tier.LOST,
        why="The address that the other rank announced can't be reached: a firewall between the "
        "nodes, an interface of docker or of another network, or the other rank ended",
        fix="NCCL_SOCKET_IFNAME=the interface of the cluster's network; open all ports between the "
        "nodes; containers: --network=host.",
        confirm="nc -zv PEER PORT from this node; the peer's address is not of docker0.",
    ),
)


_DEBUG = "Run again with NCCL_DEBUG=INFO (WARN prints too little): the first NCCL WARN names it."

SETUP = (
    Cause(
        code="nccl-cuda-error",
        title="a CUDA call inside NCCL failed",
        phrases=(
            r"ncclUnhandledCudaError: Call to CUDA function failed",
            r"NCCL error in: .*unhandled cuda error",
            r"NCCL WARN Cuda failure (?:\d+ )?'[^']+'",
            r"NCCL WARN Cuda failure '?[a-z][^'\n]+",
        ),
        is_generic=True,
        why="CUDA reported an error in a call of NCCL: most often no memory left for its buffers, "
        "or an earlier error of a kernel of the model",
        fix="`Cuda failure 'out of memory'`: leave 1 GB per GPU free (smaller batch). Otherwise "
        "CUDA_LAUNCH_BLOCKING=1 finds the kernel that failed before.",
        confirm=_DEBUG,
    ),
    Cause(
        code="nccl-system-error",
        title="a system call inside NCCL failed",
        phrases=(
            r"ncclSystemError: System call \(e\.g\. socket, malloc\)",
            r"unhandled system error",
            r"NCCL WARN Call to \w+ (?:returned|failed)",
            r"NCCL WARN NET/OFI .*(?:Couldn't|Creating|completed with error|RC: -\d+|failed: )",
        ),
        tier=Tier.LOST,
        is_generic=True,
        blame=Blame.NOBODY,
        why="A socket, a file of shared memory or a plug-in failed; the line `Last error` or the "
        "first NCCL WARN says which",
        fix="Network: NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 as a trial. Shared memory: --shm-size. "
        "Limits: ulimit -l unlimited, ulimit -n 65536. AWS (NET/OFI): a security group with all "
        "traffic from and to itself; FI_PROVIDER=efa, or tcp without EFA.",
        confirm=_DEBUG,
    ),
    Cause(
        code="nccl-internal-error",
        title="NCCL failed an internal check",
        phrases=(r"ncclInternalError: Internal check failed", r"internal error.*NCCL version"),
        tier=Tier.LOST,
        is_generic=True,
        blame=Blame.NOBODY,
        why="Often the ranks see different GPUs or networks: a bad topology file, MIG, GPUs of "
        "another container, a net plug-in that does not fit",
        fix="Unset NCCL_TOPO_FILE and NCCL_NET_PLUGIN; NCCL_DEBUG=INFO; a newer NCCL.",
        confirm=_DEBUG,
    ),
    Cause(
        code="nccl-invalid-usage",
        title="NCCL was used in a way that it does not allow",
        phrases=(
            r"ncclInvalidUsage: This usually reflects invalid usage of NCCL library",
            r"ncclInvalidArgument: Invalid value for an argument",
            r"NCCL error in: .*invalid (?:usage|argument)",
        ),
        is_generic=True,
        blame=Blame.NOBODY,
        why="Most often two ranks have the same GPU, or ranks disagree on number, type or root",
        fix="torch.cuda.set_device(LOCAL_RANK) before init_process_group; one rank per GPU; no MIG "
        "slice twice.",
        confirm=_DEBUG,
    ),
    Cause(
        code="nccl-aborted",
        title="NCCL's communicator was aborted",
        phrases=(
            r"NCCL [Cc]ommunicator (?:was )?aborted",
            r"To avoid data inconsistency, we are taking the entire process down",
            r"Process group watchdog thread terminated with exception",
        ),
        tier=Tier.TEARDOWN,
        why="An earlier error or timeout ended the communicator; this only follows from it",
        fix="Look further up, and in the logs of the other ranks, for the first error.",
    ),
    Cause(
        code="nccl-p2p",
        title="direct access between GPUs does not work on this machine",
        phrases=(
            r"peer mapping resources exhausted",
            r"P2P is disabled between NVLINK connected GPUs",
            r"PCI ACS is enabled",
            r"peer access is not supported between these two devices",
        ),
        blame=Blame.NOBODY,
        why="PCIe's access control (ACS), the IOMMU, a virtual machine, or too many peers block it",
        fix="NCCL_P2P_DISABLE=1 as a workaround; then disable ACS and the IOMMU in the BIOS, or "
        "set NCCL_P2P_LEVEL.",
        confirm="nvidia-smi topo -p2p r; the job works with NCCL_P2P_DISABLE=1.",
    ),
    Cause(
        code="nccl-nvml",
        title="the NVIDIA driver can't be asked about its GPUs",
        phrases=(r"nvml(?:Init|DeviceGet)\w*\(?\)? failed", r"Failed to initialize NVML: "),
        tier=Tier.HARDWARE,
        why="The driver was updated without a reboot, or the container lost its GPUs (systemd "
        "reload, missing device files)",
        fix="Reboot the node, or reload the driver's modules. Container: start it again; docker: "
        "--device /dev/nvidiactl ..., or the cgroup driver systemd fix of NVIDIA.",
        confirm="nvidia-smi in the same container fails with the same words.",
    ),
)
