"""Causes in a GPU, its driver, or the kernels that run on it."""

from ddp_doctor.explain.events import Cause, Fix, Tier

_NO_GPU = "needs a GPU; composed from the format string"
_XID = "NVIDIA's table of Xid errors; the driver's line in dmesg"
_CUDA = "CUDA's cudaGetErrorString"
_DRAIN = (
    "Take the node out of the queue (scontrol update nodename=N state=drain; kubectl cordon N), "
    "restart from the last checkpoint on others, reset the GPU or reboot the node, then run dcgmi "
    "diag -r 3."
)

CAUSES = (
    Cause(
        code="gpu-fell-off",
        title="a GPU fell off the bus (Xid 79)",
        phrases=(
            r"Xid \((?P<pci>[^)]*)\): ?79\b",
            r"GPU has fallen off the bus",
            r"Unable to determine the device handle for (?:GPU|gpu).*(?:lost|Unknown)",
            r"GPU is lost\.  ?Reboot the system",
        ),
        tier=Tier.HARDWARE,
        why="The driver lost the GPU on PCIe: power, heat, a bad slot or a dying card",
        fix=Fix(plain=_DRAIN),
        confirm="dmesg | grep -i xid; nvidia-smi does not list it.",
        source=_XID,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-ecc",
        title="a GPU's memory has an error that ECC can't correct",
        phrases=(
            r"Xid \((?P<pci>[^)]*)\): ?(?P<xid>48|63|64|94|95|140)\b",
            r"uncorrectable ECC error encountered",
            r"CUDA error: uncorrectable",
        ),
        tier=Tier.HARDWARE,
        why="Memory of the GPU is damaged; a row must be remapped, which needs a reset",
        fix=Fix(plain=_DRAIN),
        confirm="nvidia-smi -q -d ECC,ROW_REMAPPER.",
        source=_XID,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-nvlink",
        title="an NVLink or NVSwitch link failed",
        phrases=(
            r"Xid \((?P<pci>[^)]*)\): ?(?P<xid>74|144|145|149|150)\b",
            r"SXid \((?P<pci>[^)]*)\)",
            r"an NVLink error was detected",
            r"uncorrectable NVLink error",
        ),
        tier=Tier.HARDWARE,
        why="A link between GPUs has errors; collectives fail or hang",
        fix=Fix(plain=_DRAIN),
        confirm="nvidia-smi nvlink -e; dmesg for SXid.",
        source=_XID,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-driver-stuck",
        title="the GPU's system processor (GSP) does not answer",
        phrases=(
            r"Xid \((?P<pci>[^)]*)\): ?(?P<xid>61|62|119|120|154)\b",
            r"Timeout after \d+s of waiting for RPC response from GPU",
        ),
        tier=Tier.HARDWARE,
        why="Firmware or hardware of the GPU hangs; every call into the driver waits",
        fix=Fix(plain=_DRAIN + " A newer driver; or NVreg_EnableGpuFirmware=0."),
        confirm="nvidia-smi hangs on that node.",
        source=_XID,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-xid-program",
        title="a kernel of the program made the GPU fault",
        phrases=(
            r"Xid \((?P<pci>[^)]*)\): ?(?P<xid>13|31|43|45|68|69)\b",
            r"NVRM: Xid \((?P<pci>[^)]*)\): ?(?P<xid>\d+)",
        ),
        is_generic=True,
        why="Xid 13, 31, 43 and 45 mostly come from the program: an address out of range, or a "
        "process that ended with kernels under way. Rarely it is the GPU",
        fix=Fix(
            plain="CUDA_LAUNCH_BLOCKING=1 and compute-sanitizer find the kernel. If other programs "
            "fail on this GPU, too: " + _DRAIN,
        ),
        confirm="The same sample fails on another GPU: it is the program.",
        source=_XID,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-fabric-manager",
        title="the GPUs are not initialized (CUDA error 802)",
        phrases=(
            r"Error 802: system not yet initialized",
            r"CUDA error: system not yet initialized",
            r"cudaErrorSystemNotReady",
        ),
        tier=Tier.HARDWARE,
        why="On NVSwitch machines nvidia-fabricmanager must run, in the driver's version",
        fix=Fix(
            plain="systemctl restart nvidia-fabricmanager; install the version of the driver; "
            "reboot after a driver update.",
        ),
        confirm="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric.",
        source=_CUDA,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-assert",
        title="an index was out of range in a CUDA kernel (device-side assert)",
        phrases=(
            r"device-side assert triggered",
            r"thread: \[\d+,\d+,\d+\] Assertion `(?P<assertion>[^`]+)` failed",
        ),
        why="Most often a label >= the number of classes or below 0, or a token id >= the "
        "vocabulary. The line of Python is a later one, because kernels run asynchronously",
        fix=Fix(
            plain="Check on the CPU: assert 0 <= labels.min() and labels.max() < num_classes; the "
            "tokenizer's length against the embedding's rows. CUDA_LAUNCH_BLOCKING=1 gives the "
            "right line.",
            suite="labels and inputs are checked while batches are made (DDP-D02)",
        ),
        confirm="The same batch on the CPU raises IndexError with the value.",
        source="aten/src/ATen/native/cuda",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-illegal-access",
        title="a CUDA kernel used an illegal address",
        phrases=(
            r"an illegal memory access was encountered",
            r"CUDA error: misaligned address",
            r"an illegal instruction was encountered",
            r"unspecified launch failure",
            r"Memory access fault by GPU node-\d+",
            r"aborting with error ?: (?P<what>HSA_STATUS_\w+)",
        ),
        why="A custom kernel, a wrong index, a kernel of another GPU architecture, or a bug; after "
        "it every CUDA call of this process fails",
        fix=Fix(
            plain="CUDA_LAUNCH_BLOCKING=1 for the right line; compute-sanitizer python train.py; "
            "torch.cuda.set_device(LOCAL_RANK) if a Triton or custom kernel ran on the wrong GPU; "
            "switch off custom kernels (flash-attention, apex) one by one.",
        ),
        confirm="dmesg shows Xid 13 or 31 for this process.",
        source=_CUDA,
        or_else="If it moves with the node and not with the program, the GPU is broken.",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-cublas",
        title="cuBLAS failed",
        phrases=(
            r"CUBLAS_STATUS_(?P<what>ALLOC_FAILED|NOT_INITIALIZED)",
            r"CUBLAS_STATUS_(?P<what>EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE|NOT_SUPPORTED)",
        ),
        why="ALLOC_FAILED and NOT_INITIALIZED: the GPU is full. The others: an index out of range "
        "in an earlier kernel, or shapes that do not fit",
        fix=Fix(
            plain="Smaller batch, or leave memory free; run the batch on the CPU, or with "
            "CUDA_LAUNCH_BLOCKING=1, to see a wrong label or token.",
        ),
        confirm="nvidia-smi just before; the same batch on the CPU.",
        source="aten/src/ATen/cuda/CUDABlas.cpp",
        or_else="Memory: a smaller batch works. An index: the CPU raises IndexError.",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-cudnn",
        title="cuDNN failed",
        phrases=(
            r"cuDNN error: (?P<what>CUDNN_STATUS_\w+)",
            r"Unable to find a valid cuDNN algorithm",
            r"GET was unable to find an engine to execute this computation",
            r"FIND was unable to find an engine",
        ),
        why="No memory for its work space, another cuDNN in LD_LIBRARY_PATH, or an earlier error",
        fix=Fix(
            plain="Smaller batch; unset LD_LIBRARY_PATH; torch.backends.cudnn.benchmark=False.",
        ),
        confirm="A smaller batch works: it was memory.",
        source="aten/src/ATen/native/cudnn",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-none",
        title="torch sees no GPU",
        phrases=(
            r"ValueError: Cuda is not available\.",
            r"No CUDA GPUs are available",
            r"no CUDA-capable device is detected",
            r"Found no NVIDIA driver on your system",
            r"Torch not compiled with CUDA enabled",
            r"`MisconfigurationException\)?.*No supported gpu backend found",
            r"No supported gpu backend found!",
        ),
        why="A CPU build of torch, no driver, no GPU given to this job or container, or an empty "
        "CUDA_VISIBLE_DEVICES",
        fix=Fix(
            plain="nvidia-smi in the same shell; pip install torch with CUDA; docker run --gpus "
            "all; Slurm: --gres=gpu:N (and for srun, too); unset CUDA_VISIBLE_DEVICES.",
            lightning="Trainer(accelerator='auto')",
            accelerate="accelerate launch --cpu for the CPU",
            suite="--cpu_only; what is missing: python ddp_training.py doctor",
        ),
        confirm="python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'.",
        source="torch/cuda/__init__.py",
        test="gpu_none",
    ),
    Cause(
        code="gpu-ordinal",
        title="a rank chose a GPU that does not exist",
        phrases=(
            r"CUDA error: invalid device ordinal",
            r"cudaErrorInvalidDevice",
            r"You requested gpu: \[.*\]",
        ),
        why="More ranks than GPUs on this node, a global rank used as device number, or "
        "CUDA_VISIBLE_DEVICES hides GPUs (Slurm gives each task one)",
        fix=Fix(
            plain="cuda:LOCAL_RANK, not cuda:RANK; --nproc_per_node = number of GPUs; Slurm: no "
            "--gpus-per-task=1 with cuda:LOCAL_RANK, or use cuda:0 then.",
            suite="checked before anything starts (DDP-L01)",
            lightning="Trainer(devices=N) with N at most the node's GPUs",
            accelerate="accelerate launch --num_processes at most the GPUs, --gpu_ids",
        ),
        confirm="print(local_rank, torch.cuda.device_count()).",
        source=_CUDA,
        no_test=_NO_GPU,
    ),
)
