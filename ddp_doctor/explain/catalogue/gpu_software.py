"""Causes in the software of a GPU: driver, versions, fork, and processes that share it."""

from ddp_doctor.explain.events import Cause, Fix, Tier

_NO_GPU = "needs a GPU; composed from the format string"
_CUDA = "CUDA's cudaGetErrorString"

CAUSES = (
    Cause(
        code="gpu-driver-old",
        title="the driver is older than torch's CUDA needs",
        phrases=(
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"The NVIDIA driver on your system is too old",
            r"forward compatibility was attempted on non supported HW",
            r"the provided PTX was compiled with an unsupported toolchain",
        ),
        why="torch brings its own CUDA, which needs a driver of at least a certain version",
        fix=Fix(
            plain="Update the driver, or install torch for an older CUDA (the selector on "
            "pytorch.org); containers: an image for the host's driver.",
        ),
        confirm="nvidia-smi shows the highest CUDA version that the driver supports.",
        source="torch/cuda/__init__.py",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-arch",
        title="torch has no kernels for this GPU",
        phrases=(
            r"no kernel image is available for execution on the device",
            r"is not compatible with the current PyTorch installation",
            r"(?:CUDA|HIP) error: invalid device function",
            r"CUDA capability sm_(?P<arch>\d+)",
        ),
        why="This build of torch, or an extension, was not compiled for the GPU's architecture: it "
        "is newer or too old",
        fix=Fix(
            plain="Install a newer torch (new GPU) or an older one (old GPU); build extensions "
            "with "
            "TORCH_CUDA_ARCH_LIST of this GPU.",
        ),
        confirm="torch.cuda.get_arch_list() against torch.cuda.get_device_capability().",
        source="torch/cuda/__init__.py",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-busy",
        title="the GPU is used by another process that does not share it",
        phrases=(
            r"all CUDA-capable devices are busy or unavailable",
            r"CUDA error: (?:device|out of memory).*(?:busy|exclusive)",
        ),
        why="Compute mode exclusive and another process on it, or one that was left over",
        fix=Fix(
            plain="nvidia-smi lists processes: kill those left over by pid; nvidia-smi -c DEFAULT; "
            "one process per GPU.",
        ),
        confirm="nvidia-smi -q -d COMPUTE.",
        source=_CUDA,
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-fork",
        title="CUDA was used in a forked process",
        phrases=(
            r"Cannot re-initialize CUDA in forked subprocess",
            r"To launch a multi-GPU training from your notebook, you need to avoid running",
            r"CUDA error: initialization error",
        ),
        why="The parent used CUDA before it forked: in a DataLoader worker (tensors on the GPU in "
        "the dataset) or in processes started by hand",
        fix=Fix(
            plain="Keep the dataset on the CPU; or DataLoader(multiprocessing_context='spawn'), "
            "mp.spawn, torchrun; nothing of CUDA before the fork.",
            lightning="strategy='ddp' instead of 'ddp_notebook' or 'ddp_fork'",
            accelerate="notebook_launcher before any .cuda()",
        ),
        confirm="The traceback is in a worker; torch.cuda.is_initialized() before the fork.",
        source="torch/cuda/__init__.py",
        test="gpu_fork",
    ),
    Cause(
        code="gpu-visible-changed",
        title="the list of visible GPUs changed after CUDA was used",
        phrases=(
            r"CUDA unknown error - this may be due to an incorrectly set up environment",
            r"CUDA initialization: CUDA unknown error",
        ),
        why="CUDA_VISIBLE_DEVICES was changed inside the program, or the driver's module is in a "
        "bad state (after sleep)",
        fix=Fix(
            plain="Set CUDA_VISIBLE_DEVICES before Python starts; reload nvidia_uvm or reboot."
        ),
        confirm="A fresh shell with only torch.cuda.init() works.",
        source="torch/cuda/__init__.py",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-power",
        title="a GPU or a node became too hot or lost power",
        phrases=(
            r"HW (?:Thermal|Power Brake) Slowdown",
            r"temperature above threshold, cpu clock throttled",
            r"mce: .*(?:[Hh]ardware [Ee]rror|[Uu]ncorrected)",
            r"EDAC .* UE ",
            r"\[Hardware Error\]: ",
        ),
        tier=Tier.HARDWARE,
        why="The machine's own hardware reported an error",
        fix=Fix(plain="Take the node out of the queue, and run the job on another one."),
        confirm="dmesg and ipmitool sel list of that node.",
        source="Linux kernel, NVIDIA driver",
        no_test="needs broken hardware; composed from the kernel's format string",
    ),
    Cause(
        code="gpu-cuda-error",
        title="a CUDA call failed",
        phrases=(r"CUDA error: (?P<what>[a-zA-Z][^\n]+)", r"HIP error: (?P<what>[a-z][^\n]+)"),
        is_generic=True,
        why="CUDA reports an error of an earlier kernel at a later call, so the line in the "
        "traceback may be innocent",
        fix=Fix(plain="Run again with CUDA_LAUNCH_BLOCKING=1; look for an Xid in dmesg."),
        confirm="dmesg | grep -i xid.",
        source="c10/cuda/CUDAException.cpp",
        no_test=_NO_GPU,
    ),
    Cause(
        code="gpu-triton-resources",
        title="a Triton kernel needs more of the GPU than it has",
        phrases=(
            r"out of resource: (?P<what>[\w ]+), Required: (?P<need>\d+), Hardware limit: "
            r"(?P<have>\d+)",
        ),
        why="The kernel's block sizes were chosen for a GPU with more shared memory per block",
        fix=Fix(
            plain="Smaller block sizes or num_stages in the kernel; another attention kernel "
            "(sdpa); a newer triton. torch.compile: mode='default' instead of 'max-autotune'.",
        ),
        confirm="The two numbers in the message; it works on a GPU of a larger class.",
        source="triton/runtime/errors.py",
        no_test=_NO_GPU,
    ),
)
