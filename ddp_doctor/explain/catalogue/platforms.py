"""Causes of Windows and macOS, and of packages around DDP."""

from ddp_doctor.explain.events import Blame, Cause

CAUSES = (
    Cause(
        code="windows-libuv",
        title="this torch was built without libuv",
        phrases=(r"was buil[dt] without libuv support",),
        blame=Blame.NOBODY,
        why="torch 2.4 and newer want libuv for the store; wheels for Windows had none",
        fix="set USE_LIBUV=0 before torchrun; init_method='tcp://127.0.0.1:29500?use_libuv=0'.",
    ),
    Cause(
        code="windows-dll",
        title="Windows could not load a DLL of torch or CUDA into a process",
        phrases=(r"\[WinError (?:126|127|1455)\]", r"DLL load failed while importing "),
        why="1455: each worker loads torch's DLLs anew, and Windows reserves memory for them. Else "
        "the Visual C++ runtime is missing, or another CUDA or OpenMP comes first in PATH",
        fix="1455: fewer num_workers, a larger paging file. Else the current Visual C++ "
        "Redistributable; a fresh environment.",
        confirm="1455: num_workers=0 works. Else python -c 'import torch' fails alone.",
    ),
    Cause(
        code="windows-hostname",
        title="gloo on Windows or Docker Desktop took an address that can't be reached",
        phrases=(
            r"kubernetes\.docker\.internal",
            r"\[WinError 10049\]",
            r"The requested address is not valid in its context",
        ),
        blame=Blame.NOBODY,
        why="The host's name resolves to an entry that Docker Desktop wrote to the hosts file",
        fix="MASTER_ADDR=127.0.0.1; remove the entry from the hosts file; set GLOO_SOCKET_IFNAME "
        "to the interface.",
        confirm="ping HOSTNAME gives 127.0.0.1.",
    ),
    Cause(
        code="openmp-twice",
        title="two OpenMP runtimes were loaded",
        phrases=(r"OMP: Error #15: Initializing lib\w+",),
        why="numpy or another package brings a second libiomp5 or libomp",
        fix="Install all from one channel (pip or conda); KMP_DUPLICATE_LIB_OK=TRUE as a "
        "workaround.",
        confirm="conda list | grep -iE 'omp|mkl'.",
    ),
    Cause(
        code="openmp-threads",
        title="the process could not start a thread",
        phrases=(
            r"libgomp: Thread creation failed: ",
            r"OMP: Error #34: System unable to allocate necessary resources for OMP thread",
            r"can't start new thread",
            r"pthread_create failed",
            r"(?:fork|clone|[Tt]hread\w*|BlockingIOError)\b(?!.*Accept failed).*Resource "
            r"temporarily unavailable",
        ),
        why="The limit of processes (ulimit -u, pids of the container) is reached: ranks x workers "
        "x OpenMP threads",
        fix="OMP_NUM_THREADS=1; fewer workers; ulimit -u; --pids-limit of the container.",
        confirm="cat /sys/fs/cgroup/pids.max; ps -eLf | wc -l.",
    ),
    Cause(
        code="macos-mps",
        title="the Apple GPU lacks this operation, or memory",
        phrases=(
            r"MPS backend out of memory",
            r"The operator '[^']+' is not currently implemented for the MPS device",
            r"Cannot convert a MPS Tensor to float64",
            r"MPS\w+\.mm:\d+: failed assertion",
        ),
        why="MPS has one GPU, no process group for its tensors, and fewer operators",
        fix="PYTORCH_ENABLE_MPS_FALLBACK=1; DDP on the CPU with gloo; float32.",
    ),
    Cause(
        code="tracker-login",
        title="a tracking service refuses this job, or can't be reached",
        phrases=(
            r"wandb\.errors\.(?:\w+\.)*UsageError: api_key not configured",
            r"wandb: ERROR ",
            r"wandb\.errors\.(?:\w+\.)*(?:CommError|AuthenticationError)",
        ),
        why="wandb (or another tracker) has no key on this node, or no network",
        fix="WANDB_MODE=offline or wandb login; start trackers on rank 0 only.",
        lightning="WandbLogger logs on rank 0 by itself",
        trainer="report_to='none'",
        confirm="wandb login --verify on the node.",
    ),
)
