"""Causes that NCCL reports in general words, and its set-up on one node."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

_NO_GPU = "needs NCCL and GPUs; composed from the format string"
_UTILS = "torch/csrc/distributed/c10d/NCCLUtils.cpp"
_DEBUG = "Run again with NCCL_DEBUG=INFO (WARN prints too little): the first NCCL WARN names it."

CAUSES = (
    Cause(
        code="nccl-cuda-error",
        title="a CUDA call inside NCCL failed",
        phrases=(
            r"ncclUnhandledCudaError: Call to CUDA function failed",
            r"NCCL WARN Cuda failure (?:\d+ )?'(?P<what>[^']+)'",
            r"NCCL WARN Cuda failure '?(?P<what>[a-z][^'\n]+)",
        ),
        is_generic=True,
        why="CUDA reported an error in a call of NCCL: most often no memory left for its buffers, "
        "or an earlier error of a kernel of the model",
        fix=Fix(
            plain="`Cuda failure 'out of memory'`: leave 1 GB per GPU free (smaller batch). "
            "Otherwise CUDA_LAUNCH_BLOCKING=1 finds the kernel that failed before.",
        ),
        confirm=_DEBUG,
        source=_UTILS,
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-system-error",
        title="a system call inside NCCL failed",
        phrases=(
            r"ncclSystemError: System call \(e\.g\. socket, malloc\)",
            r"unhandled system error",
            r"NCCL WARN Call to \w+ (?:returned|failed)",
        ),
        tier=Tier.LOST,
        is_generic=True,
        blame=Blame.NOBODY,
        why="A socket, a file of shared memory or a plug-in failed; the line `Last error` or the "
        "first NCCL WARN says which",
        fix=Fix(
            plain="Network: NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 as a trial. Shared memory: "
            "--shm-size. Limits: ulimit -l unlimited, ulimit -n 65536.",
        ),
        confirm=_DEBUG,
        source=_UTILS,
        no_test=_NO_GPU,
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
        fix=Fix(
            plain="Unset NCCL_TOPO_FILE and NCCL_NET_PLUGIN; NCCL_DEBUG=INFO; a newer NCCL.",
        ),
        confirm=_DEBUG,
        source=_UTILS,
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-invalid-usage",
        title="NCCL was used in a way that it does not allow",
        phrases=(
            r"ncclInvalidUsage: This usually reflects invalid usage of NCCL library",
            r"ncclInvalidArgument: Invalid value for an argument",
        ),
        is_generic=True,
        blame=Blame.NOBODY,
        why="Most often two ranks have the same GPU, or ranks disagree on number, type or root",
        fix=Fix(
            plain="torch.cuda.set_device(LOCAL_RANK) before init_process_group; one rank per GPU; "
            "no MIG slice twice.",
        ),
        confirm=_DEBUG,
        source=_UTILS,
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-aborted",
        title="NCCL's communicator was aborted",
        phrases=(
            r"NCCL communicator was aborted on rank (?P<rank>\d+)",
            r"NCCL Communicator (?:aborted|was aborted)",
            r"To avoid data inconsistency, we are taking the entire process down",
            r"Process group watchdog thread terminated with exception",
        ),
        tier=Tier.TEARDOWN,
        blame=Blame.NOBODY,
        why="An earlier error or timeout ended the communicator; this only follows from it",
        fix=Fix(plain="Look further up, and in the logs of the other ranks, for the first error."),
        confirm="The first error of all ranks is earlier than this line.",
        source="torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-p2p",
        title="direct access between GPUs does not work on this machine",
        phrases=(
            r"peer mapping resources exhausted",
            r"P2P (?:is )?disabled between (?:connected|NVLINK connected) GPUs",
            r"PCI ACS is enabled",
            r"peer access is not supported between these two devices",
        ),
        blame=Blame.NOBODY,
        why="PCIe's access control (ACS), the IOMMU, a virtual machine, or too many peers block it",
        fix=Fix(
            plain="NCCL_P2P_DISABLE=1 as a workaround; then disable ACS and the IOMMU in the BIOS, "
            "or set NCCL_P2P_LEVEL.",
        ),
        confirm="nvidia-smi topo -p2p r; the job works with NCCL_P2P_DISABLE=1.",
        source="NCCL src/graph/paths.cc; CUDA's cudaErrorTooManyPeers",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-nvls",
        title="NVLink SHARP or the fabric manager is not ready",
        phrases=(
            r"NVLS.*(?:Cuda failure|not supported|failed)",
            r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory",
            r"transport/nvls\.cc:\d+ NCCL WARN",
        ),
        blame=Blame.NOBODY,
        tier=Tier.HARDWARE,
        why="Multicast memory of NVSwitch can't be set up: nvidia-fabricmanager does not run or "
        "has "
        "another version than the driver, or its resources are used up",
        fix=Fix(
            plain="NCCL_NVLS_ENABLE=0 as a workaround; systemctl status nvidia-fabricmanager on "
            "the node.",
        ),
        confirm="nvidia-smi -q | grep -A2 Fabric says Completed.",
        source="NCCL src/transport/nvls.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-nvml",
        title="the NVIDIA driver can't be asked about its GPUs",
        phrases=(
            r"nvml(?:Init|DeviceGet)\w*\(?\)? failed",
            r"Failed to initialize NVML: (?P<what>.+)",
            r"NVML: Driver/library version mismatch",
        ),
        tier=Tier.HARDWARE,
        why="The driver was updated without a reboot, or the container lost its GPUs (systemd "
        "reload, missing device files)",
        fix=Fix(
            plain="Reboot the node, or reload the driver's modules. Container: start it again; "
            "docker: --device /dev/nvidiactl ..., or the cgroup driver systemd fix of NVIDIA.",
        ),
        confirm="nvidia-smi in the same container fails with the same words.",
        source="NVML; NCCL src/misc/nvmlwrap.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-graph-order",
        title="a collective started while another one waits on the same GPU",
        phrases=(
            r"NCCL WARN .*(?:group launch|ncclGroupStart).*(?:mismatch|unmatched)",
            r"Your application may be hanging.*NCCL",
        ),
        tier=Tier.MISMATCH,
        blame=Blame.NOBODY,
        why="Two communicators on one GPU were used in another order on another rank",
        fix=Fix(
            plain="Use the groups in one order on all ranks; or CUDA_DEVICE_MAX_CONNECTIONS=1."
        ),
        confirm="py-spy dump of two ranks shows two different groups.",
        source="NCCL src/group.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-advice-device",
        title="NCCL guessed the device of a barrier",
        phrases=(
            r"using GPU \d+ (?:to perform barrier )?as device used by this process is currently "
            r"unknown",
            r"Guessing device ID based on global rank",
            r"No device id is provided via `init_process_group` or `barrier",
        ),
        tier=Tier.ADVICE,
        blame=Blame.NOBODY,
        why="init_process_group was not given device_id; harmless if rank and GPU match",
        fix=Fix(plain="init_process_group('nccl', device_id=torch.device('cuda', local_rank))."),
        confirm="It is printed by runs that work, too.",
        source="torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        no_test=_NO_GPU,
    ),
)
