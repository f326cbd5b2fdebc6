"""Logs of failures that this machine can't have, made from the format strings of their sources.

Owns one log for each cause without a program in failing_*.py: what needs GPUs, NCCL, InfiniBand,
broken hardware, Slurm, Kubernetes, Windows, macOS, or a package that the tests do not need.
`{rank}` and `{other}` are numbers that a test chooses.
"""
# ruff: noqa: E501  -- WHY: lines of logs stand here as they are

from dataclasses import dataclass

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
    """One line, or the last line of a traceback."""

    code: str
    text: str
    is_raised: bool = False
    names_rank: bool = True
    """explain must name the rank that the line belongs to."""


def _line(code: str, text: str, *, rank: bool = False) -> Composed:
    return Composed(code, text, names_rank=rank)


def _raised(code: str, text: str, *, rank: bool = True) -> Composed:
    return Composed(code, text, is_raised=True, names_rank=rank)


_DIST = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
_DIST += "NCCLUtils.cpp:77, "
_XID = "[ 8123.456789] NVRM: Xid (PCI:0000:{other}:00): "
_NCCL = "gpu-node-7:{other}012:{other}345 [3] "

LOGS = (
    _line("memory-scheduler", "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit."),
    _line("memory-scheduler", "=>> PBS: job killed: mem 6871947{other}b exceeded limit 6871946b"),
    _raised(
        "gpu-triton-resources",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
        "131{other}72, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    ),
    _raised("amp-dtype", "RuntimeError: FlashAttention only support fp16 and bf16 data type"),
    _raised(
        "amp-nan",
        "AssertionError: Rank {rank}: found NaN in local forward loss calculation. Device: 5",
    ),
    _raised(
        "graph-device-mixed",
        "RuntimeError: Expected tensor for argument #1 'input' to have the same device as tensor "
        "for argument #2 'weight'; but device {rank} does not equal {other}",
    ),
    _raised(
        "accelerator-collectives",
        "RuntimeError: oneCCL: atl_ofi_comm.cpp:232 init_transport: EXCEPTION: failed to "
        "initialize ATL",
    ),
    _raised(
        "accelerator-gaudi",
        "RuntimeError: synNodeCreateWithId failed for node: batch_gemm with synStatus {other} "
        "[Generic failure].",
    ),
    _line(
        "launch-ray-actor",
        "A worker died or was killed while executing a task by an unexpected system error. Worker "
        "PID: {other}942 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
        "exits with a connection error code 2. End of file.",
    ),
    _line(
        "nccl-efa",
        "node7:{other}012:{other}345 [3] create_nccl_ofi_component:459 NCCL WARN NET/OFI Couldn't "
        "open AV. RC: -22, ERROR: Invalid argument",
    ),
    _raised(
        "launch-lightning",
        "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported strategy "
        "for {other} devices",
        rank=False,
    ),
    _raised("gpu-arch", "RuntimeError: HIP error: invalid device function"),
    _line(
        "gpu-illegal-access",
        "Memory access fault by GPU node-{other} (Agent handle: 0x55d1e2a0) on address "
        "0x7f1c4b600000. Reason: Page not present or supervisor privilege.",
    ),
    _raised(
        "graph-device-mixed",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two "
        "devices, cuda:{rank} and cpu!",
    ),
    _line(
        "nccl-duplicate-gpu",
        _NCCL + "init.cc:1016 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA "
        "device 1a000",
    ),
    _raised(
        "nccl-remote-error",
        _DIST + "ncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.",
        rank=False,
    ),
    _line(
        "nccl-ib-retry",
        _NCCL + "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.{other}<41234> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
    ),
    _line(
        "nccl-ib-memory",
        _NCCL + "misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot "
        "allocate memory",
    ),
    _line("nccl-interface", _NCCL + "bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found"),
    _line(
        "nccl-connect",
        _NCCL + "misc/socket.cc:441 NCCL WARN socketStartConnect: Connect to "
        "172.17.0.{other}<43211> failed : Software caused connection abort",
    ),
    _line("nccl-version", "RuntimeError: NCCL version mismatch: rank 0 has 2.21.5, rank 1 has 2.26.2"),
    _line(
        "nccl-shm",
        _NCCL + "misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Tf{other}3 to "
        "9637892 bytes",
    ),
    _raised(
        "nccl-store-get",
        "torch.distributed.DistBackendError: [{rank}] is setting up NCCL communicator and "
        "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') "
        "got error: Connection reset by peer",
        rank=False,
    ),
    _line(
        "nccl-heartbeat",
        "[rank{rank}]:[F1122 08:18:33.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) "
        "Rank {rank}] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Terminating the process after "
        "attempting to dump debug info, due to ProcessGroupNCCL watchdog hang. ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives.",
    ),
    _raised(
        "nccl-cuda-error",
        _DIST + "unhandled cuda error, NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA "
        "function failed.\nLast error:\nCuda failure 'invalid argument'",
    ),
    _raised(
        "nccl-system-error",
        _DIST + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2",
        rank=False,
    ),
    _raised(
        "nccl-internal-error",
        _DIST + "internal error - please report this issue to the NCCL developers, NCCL version "
        "2.26.2\nncclInternalError: Internal check failed.",
        rank=False,
    ),
    _raised(
        "nccl-invalid-usage",
        _DIST + "invalid usage, NCCL version 2.26.2\nncclInvalidUsage: This usually reflects invalid "
        "usage of NCCL library.",
        rank=False,
    ),
    _line("nccl-p2p", "RuntimeError: CUDA error: peer mapping resources exhausted", rank=False),
    _line(
        "nccl-nvls",
        _NCCL + "transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'",
    ),
    _line("nccl-nvml", "Failed to initialize NVML: Driver/library version mismatch"),
    _line("gpu-fell-off", _XID + "79, pid=1234, name=python, GPU has fallen off the bus."),
    _line("gpu-ecc", _XID + "94, pid=1234, name=python, Contained: SM (0x1). RST: No, D-RST: No"),
    _raised("gpu-ecc", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    _line("gpu-nvlink", _XID + "74, pid='<unknown>', NVLink: fatal error detected on link 11"),
    _line("gpu-driver-stuck", _XID + "119, pid=1234, name=python, Timeout after 6s of waiting for RPC"),
    _line("gpu-xid-program", _XID + "31, pid=1234, name=python, Ch 00000008, intr 10000000. MMU Fault"),
    _raised("gpu-fabric-manager", "RuntimeError: CUDA error: system not yet initialized"),
    _raised("gpu-assert", "RuntimeError: CUDA error: device-side assert triggered"),
    _line(
        "gpu-assert",
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: "
        "block: [0,0,0], thread: [{other},0,0] Assertion `t >= 0 && t < n_classes` failed.",
    ),
    _raised("gpu-illegal-access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    _raised(
        "gpu-cublas",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    _raised("gpu-cudnn", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    _raised("gpu-ordinal", "RuntimeError: CUDA error: invalid device ordinal"),
    _raised(
        "gpu-driver-old",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    _raised(
        "gpu-arch",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    _raised("gpu-busy", "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
    _raised(
        "gpu-visible-changed",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, "
        "e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
    ),
    _line("gpu-power", "kernel: mce: [Hardware Error]: CPU {other}: Machine Check: 0 Bank 7: ea00"),
    _raised("gpu-cuda-error", "RuntimeError: CUDA error: the launch timed out and was terminated"),
    _raised("memory-gpu", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."),
    _line(
        "memory-kernel-oom",
        "[81234.567890] Out of memory: Killed process {other}234 (python) total-vm:81234567kB, "
        "anon-rss:61234567kB",
    ),
    _line(
        "memory-slurm-oom",
        "slurmstepd: error: Detected 1 oom_kill event in StepId={other}123.0. Some of the step "
        "tasks have been OOM Killed.",
    ),
    _line("memory-pod-oom", "    Reason:       OOMKilled"),
    _raised("memory-pinned", "RuntimeError: Pin memory thread exited unexpectedly"),
    _line(
        "stop-time-limit",
        "slurmstepd: error: *** STEP {other}123.0 ON node7 CANCELLED AT 2026-11-22T08:08:08 DUE TO "
        "TIME LIMIT ***",
    ),
    _line(
        "stop-preempted",
        "slurmstepd: error: *** JOB {other}123 ON node7 CANCELLED AT 2026-11-22T08:08:08 DUE TO "
        "PREEMPTION ***",
    ),
    _line(
        "stop-node-failed",
        "slurmstepd: error: *** JOB {other}123 ON node7 CANCELLED AT 2026-11-22T08:08:08 DUE TO "
        "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ),
    _line(
        "stop-cancelled",
        "slurmstepd: error: *** JOB {other}123 ON node7 CANCELLED AT 2026-11-22T08:08:08 ***",
    ),
    _line("stop-evicted", "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi"),
    _line(
        "launch-slurm-step",
        "srun: error: Unable to create step for job {other}123: More processors requested than "
        "permitted",
    ),
    _line("launch-mpi", "There are not enough slots available in the system to satisfy the {other}"),
    _raised(
        "gloo-connect",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        rank=False,
    ),
    _raised(
        "gloo-barrier-rank0",
        "RuntimeError: Rank {rank} successfully reached monitoredBarrier, but received errors "
        "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
        rank=False,
    ),
    _raised(
        "amp-unsupported",
        "RuntimeError: Current CUDA Device does not support bfloat16. Please switch dtype to "
        "float16.",
    ),
    _raised(
        "windows-libuv",
        "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without "
        "libuv support",
        rank=False,
    ),
    _raised("windows-paging-file", "OSError: [WinError 1455] The paging file is too small"),
    _raised("windows-dll", "OSError: [WinError 126] The specified module could not be found"),
    _line(
        "windows-hostname",
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to "
        "[kubernetes.docker.internal]:29500 (system error: 10049)",
    ),
    _line("openmp-twice", "OMP: Error #15: Initializing libiomp5md.dll, but found libomp140 already"),
    _line("macos-fork", "objc[{other}]: +[NSPlaceholder initialize] may have been in progress in "
          "another thread when fork() was called."),
    _raised("macos-mps", "RuntimeError: MPS backend out of memory (MPS allocated: 5.05 GB)"),
    _raised(
        "launch-devices",
        "RuntimeError: You set `devices=4` in Lightning, but the number of tasks per node "
        "configured in SLURM `--ntasks-per-node=1` does not match. HINT: Set `devices=1`.",
        rank=False,
    ),
    _raised(
        "launch-notebook",
        "ValueError: To launch a multi-GPU training from your notebook, the `Accelerator` should "
        "only be initialized inside your training function.",
        rank=False,
    ),
    _raised(
        "launch-config",
        "omegaconf.errors.ConfigAttributeError: Key 'sched' is not in struct\n    full_key: sched",
        rank=False,
    ),
    _line(
        "launch-container",
        'docker: Error response from daemon: could not select device driver "" with capabilities: '
        "[[gpu]].",
    ),
    _line(
        "launch-pod-pending",
        "  Warning  FailedScheduling  4m  default-scheduler  0/12 nodes are available: 9 "
        "Insufficient nvidia.com/gpu, {other} node(s) had untolerated taint.",
    ),
    _line("launch-pod-crash", "job-worker-0   0/1   CrashLoopBackOff   5 (21s ago)   4m"),
    _raised(
        "data-lock",
        "OSError: Unable to synchronously open file (unable to lock file, errno = 11, error "
        "message = 'Resource temporarily unavailable')",
    ),
    _line("killed-sigill", "train.sh: line 9: {other}4 Illegal instruction     (core dumped) python x"),
    _line(
        "memory-ray",
        "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed",
    ),
    _line("launch-ray-actor", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
    _raised("tracker-login", "wandb.errors.errors.UsageError: api_key not configured (no-tty)"),
)  # fmt: skip

WITHOUT_LOG = {
    **dict.fromkeys(["nccl-timeout", "collective-missing"], "timeouts() makes its logs"),
    **dict.fromkeys(["stop-silent", "lost-finished-rank"], "in torchrun's table: test_forms.py"),
    **dict.fromkeys(["gloo-ddp-outlives-group", "gloo-destroy-hang"], "a race: stacks, TestRanks"),
    **dict.fromkeys(["amp-overflow-advice", "nccl-advice-device"], "advice on GPUs: healthy.py"),
    **dict.fromkeys(["compile-recompiles", "openmp-advice"], "advice, no failure: healthy.py"),
    **dict.fromkeys(
        ["nccl-aborted", "nccl-graph-order"], "needs NCCL and GPUs, and a second failure"
    ),
    "group-destroyed": "advice of NCCL: healthy.py",
    "data-tokenizers-fork": "a warning of a package that the tests do not need: healthy.py",
    "gloo-detail-crash": "needs a torchrun of its own: TestRanks",
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
