"""Causes in a GPU, its driver and software, in other accelerators, and in native arithmetic."""

from ddp_doctor.explain.catalogue.entries import read_families

_DRAIN = (
    "Take the node out of the queue (scontrol update nodename=N state=drain; kubectl cordon N), "
    "resume from the last checkpoint on others, reset the GPU or reboot, then dcgmi diag -r 3."
)
_TEXT = r"""
[GPU faults]

gpu-fell-off (hardware): a GPU fell off the bus
  /GPU has fallen off the bus/ /GPU is lost(?:\.|$)/
  /Unable to determine the device handle for (?:GPU|gpu).*(?:lost|Unknown)/
  why: The driver lost the GPU on PCIe (Xid 79): power, heat, a bad slot or a dying card
  fix: %DRAIN%

gpu-ecc (hardware): a GPU's memory has an error that ECC can't correct
  /Xid \([^)]*\): ?(?:48|63|64|94|95|140)\b/ /uncorrectable ECC error encountered/
  why: Memory of the GPU is damaged; a row must be remapped, which needs a reset
  fix: %DRAIN%

gpu-node (hardware): a link between GPUs, a GPU's firmware or the node itself failed
  /Xid (?:\([^)]*\): ?)?(?:61|62|74|119|120|144|145|149|150|154)\b/ /SXid \([^)]*\)(?!.*Non-fatal)/
  /an NVLink error was detected/ /uncorrectable NVLink error/ /EDAC .* UE /
  /HW (?:Thermal|Power Brake) Slowdown(?! *:? *(?:Not|N\/A|0\b))/
  /mce: .*(?:[Ff]atal|[Uu]ncorrect|Machine Check.* Bank \d+: [abef])/
  /\[Hardware Error\]: .*(?:[Ff]atal|[Uu]ncorrect)/
  why: The driver or the kernel reports errors of the hardware: of an NVLink or NVSwitch link, of
    the GPU's system processor (GSP), of the host's memory or CPU, heat or power
  fix: %DRAIN% GSP: a newer driver, or NVreg_EnableGpuFirmware=0.

gpu-xid-program (generic): a kernel of the program made the GPU fault
  /Xid \([^)]*\): ?(?:13|31|43|45|68|69)\b/ /NVRM: Xid \([^)]*\): ?\d+/
  why: Mostly the program: an address out of range, or a process that ended with kernels under way
  fix: CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it. If other programs fail, too: %DRAIN%

gpu-hang (generic): the GPU hung, and its driver reset it
  /HW Exception by GPU node-\d+ .*Hang/ /Xid \([^)]*\): ?(?:8|109)\b/ /amdgpu.* ring \S+ timeout/
  /the launch timed out and was terminated/
  why: A kernel did not end, or the GPU's own processor did not answer: the program (a loop without
    end, an extension), the driver's or the GPU's firmware, or heat and power
  fix: A newer driver and firmware; extensions off. If other programs hang on it, too: %DRAIN%

gpu-fabric-manager (hardware): the fabric manager of NVSwitch is not ready
  /(?:Error 802|CUDA error): system not yet initialized/ /cudaErrorSystemNotReady/
  /Failed to bind NVLink SHARP \(NVLS\) Multicast memory/ /transport/nvls\.cc:\d+ NCCL WARN/
  /NVLS.*(?:Cuda failure|not supported|failed)/
  why: On NVSwitch machines nvidia-fabricmanager must run, in the driver's version; without it the
    GPUs are not initialized (CUDA error 802), or have no multicast memory (NVLS)
  fix: systemctl restart nvidia-fabricmanager, in the driver's version; reboot after an update.
  or_else: Only NVLS fails: NCCL_NVLS_ENABLE=0 as a workaround.

gpu-assert: a CUDA kernel's check failed, most often of an index (device-side assert)
  /device-side assert triggered/ /thread: \[\d+,\d+,\d+\] Assertion `[^`]+` failed/
  why: Most often a label >= the number of classes or below 0, or a token id >= the vocabulary; BCE:
    a value outside of 0 to 1; multinomial: NaN. The line of Python is a later one
  fix: Check on the CPU: assert 0 <= labels.min() and labels.max() < num_classes; the tokenizer's
    length against the embedding's rows. CUDA_LAUNCH_BLOCKING=1 gives the right line.
  case >= zero => BCELoss got a value outside of 0 to 1, or NaN => BCEWithLogitsLoss on what is
    before the sigmoid; assert torch.isfinite(x).all() for its inputs and labels.

gpu-illegal-access: a GPU kernel used an illegal address
  /an illegal memory access was encountered/ /CUDA error: misaligned address/
  /an illegal instruction was encountered/ /Memory access fault by GPU node-\d+/
  /borting with error ?: HSA_STATUS_ERROR_(?:EXCEPTION|ILLEGAL_INSTRUCTION|INVALID_ISA|MEMORY_\w+)/
  why: A custom kernel, a wrong index, a kernel of another architecture, or a bug; later calls fail
  fix: CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3) for the right line; compute-sanitizer
    (NVIDIA); torch.cuda.set_device(LOCAL_RANK); custom kernels (flash-attention, apex) off.
  or_else: If it moves with the node and not with the program, the GPU is broken.

gpu-cublas (generic, unknown): cuBLAS failed
  /CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)/
  /CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE|NOT_SUPPORTED)/
  why: An index out of range in an earlier kernel, shapes or types that do not fit, or a bug
  fix: Run the batch on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see a wrong label or token.
  case ALLOC_FAILED|NOT_INITIALIZED => The GPU has no memory left for cuBLAS; rarely an earlier
    kernel failed => A smaller batch; nvidia-smi shows who uses this GPU; set_device(LOCAL_RANK).

gpu-cudnn (generic, unknown): cuDNN (on AMD: MIOpen) failed
  /cuDNN error: CUDNN_STATUS_\w+/ /Unable to find a valid cuDNN algorithm/ /MIOpen Error: /
  /(?:GET|FIND) was unable to find an engine/ /miopen(?:Status\w+|::Exception)/
  why: No memory for its work space, another cuDNN in LD_LIBRARY_PATH, or an earlier error
  fix: Smaller batch; unset LD_LIBRARY_PATH; torch.backends.cudnn.benchmark=False.
  case MIOpen => MIOpen found no kernel, or can't read or write its database, which ranks share =>
    MIOPEN_USER_DB_PATH and MIOPEN_CUSTOM_CACHE_DIR in a local folder per rank; the ROCm of torch.

gpu-none (likely): torch sees no GPU
  /ValueError: Cuda is not available\./ /No CUDA GPUs are available/ /your machine only has: \[\]/
  /mixed precision requires a GPU/ /CUDA driver initialization failed/
  /Cannot access accelerator device when none is available/ /no CUDA-capable device is detected/
  /Found no NVIDIA driver on your system/ /Torch not compiled with CUDA enabled/
  /No supported gpu backend found!/
  /CUDA unknown error - this may be due to an incorrectly set up environment/
  why: A build of torch without CUDA, no driver (or one in a bad state), no GPU given to this job or
    container, or CUDA_VISIBLE_DEVICES is empty or was changed inside of the program
  fix: nvidia-smi in the same shell; pip install torch with CUDA; docker run --gpus all; Slurm:
    --gres=gpu:N (and for srun, too); unset CUDA_VISIBLE_DEVICES.
  case not compiled with CUDA => This torch is a build for the CPU => Install the one for CUDA.
  case NVIDIA driver => No driver, or a container that was started without its GPUs => nvidia-smi in
    the same shell; docker run --gpus all, apptainer --nv, --gres=gpu:N of Slurm.

gpu-ordinal: a rank chose a GPU that does not exist
  /(?:CUDA error:|Cuda failure \d+|error=\d+ :) '?invalid device ordinal/ /cudaErrorInvalidDevice/
  /You requested gpu: \[.*\]/ /AssertionError: Invalid device id/ /your machine only has: \[\d/
  why: More ranks than GPUs here, cuda:RANK on several nodes, or CUDA_VISIBLE_DEVICES hides GPUs
  fix: cuda:LOCAL_RANK, not cuda:RANK; --nproc_per_node = number of GPUs; Slurm: no
    --gpus-per-task=1 with cuda:LOCAL_RANK, or use cuda:0 then. MIG: a process sees one slice only.

[GPU software]

gpu-driver-old: the driver does not fit torch's CUDA: mostly too old
  /CUDA driver version is insufficient for CUDA runtime version/
  /The NVIDIA driver on your system is too old/
  /forward compatibility was attempted on non supported HW/
  /the provided PTX was compiled with an unsupported toolchain/
  why: torch brings its own CUDA, which needs a driver of at least a certain version
  fix: Update the driver, or install torch for an older CUDA (the selector on pytorch.org);
    containers: an image for the host's driver. Error 804: no cuda-compat libraries; or reboot.

gpu-arch: torch or an extension has no kernels for this GPU
  /no kernel image is available for execution on the device/ /CUDA error: invalid device function/
  /FlashAttention only supports Ampere/ /is not compatible with the current PyTorch installation/
  /CUDA capability sm_\d+/
  why: This build of torch, or an extension, was not compiled for this architecture, new or old
  fix: A newer torch (new GPU) or an older one; extensions with TORCH_CUDA_ARCH_LIST of this GPU.
  case only supports Ampere => FlashAttention 2 needs an Ampere GPU or newer =>
    attn_implementation='sdpa' or 'eager'.
  case HIP error => This build of torch has no kernels for this AMD GPU => torch for its ROCm; on
    consumer cards HSA_OVERRIDE_GFX_VERSION of the nearest one; PYTORCH_ROCM_ARCH for extensions.

gpu-busy (likely): the GPU takes no new work: in use, or in a bad state
  /CUDA-capable device(?:s|\(s\)) (?:is\/)?are busy or unavailable/
  /CUDA error: (?:device|out of memory).*(?:busy|exclusive)/
  why: Compute mode exclusive and another process on it, one left over, or a driver that fails
  fix: nvidia-smi lists processes: kill those left over by pid; nvidia-smi -c DEFAULT;
    map_location='cpu' in torch.load. No process there: start the container again, or reboot.

gpu-fork: CUDA was used in a forked process
  /Cannot re-initialize CUDA in forked subprocess/
  /To launch a multi-GPU training from your notebook, you need to avoid running/
  why: The parent used CUDA before it forked a DataLoader worker, or another process
  fix: Dataset on the CPU; no CUDA before the fork; multiprocessing_context='spawn', or torchrun.

gpu-cuda-error (generic, unknown): a CUDA call failed
  /CUDA error: [a-zA-Z][^\n]+/ /CUDA driver error: [a-zA-Z]/
  why: It is told at a later call: the line that is named may be innocent
  fix: Run again with CUDA_LAUNCH_BLOCKING=1; look for an Xid in dmesg.
  case error: initialization error => CUDA was used before this process was forked, or the driver is
    in a bad state => No CUDA before the fork (multiprocessing_context='spawn'); else a reboot.
  case launch failure => A kernel crashed; the line that is named is a later one =>
    CUDA_LAUNCH_BLOCKING=1, compute-sanitizer; Xid in dmesg; custom kernels off; else the GPU.
  case error: unknown error => The driver is in a bad state => nvidia-smi and dmesg; or reboot.
  case error: invalid (?:resource handle|device context|argument) => A tensor, stream or event of
    one GPU was used on another, or a kernel got bad numbers => torch.cuda.set_device(LOCAL_RANK)
    before all else; CUDA_LAUNCH_BLOCKING=1 for the right line.

[Other accelerators, arithmetic exceptions]

accelerator-no-backend: the process group has no backend for tensors of this device
  /No backend type associated with device type (?P<device>(?!cpu|cuda)\w+)/
  /invalid tensor type at index \d+ \(.*device=(?P<device>(?!cpu|cuda)\w+)/
  /We detected accelerator (?P<device>\w+) on your machine\. But we don't know which/
  why: init_process_group chose, or was given, a backend that moves no {device} tensors
  fix: xpu: init_process_group('xccl'), before torch 2.8 'ccl' with oneCCL's package; hpu, npu:
    'hccl' with the vendor's plug-in. mps has none: train on the CPU with gloo.

accelerator-collectives (generic, unknown): the device's own library of collectives failed
  /oneCCL: / /\|CCL_ERROR\| / /HCCL (?:function )?error in/ /EJ000[13]\b/
  /\w+ isn't implemented on backend \[\w+\]/ /what\(\): +Collective call returned error/
  why: oneCCL (Intel), HCCL (Ascend, Gaudi) could not start or finish a collective: its build does
    not fit torch, it finds no network, or an earlier job's processes hold the devices
  fix: The plug-in must fit torch; end processes that are left over; oneCCL: FI_PROVIDER=tcp.
  case pthread_create|worker thread => oneCCL's threads may not run on the cores that it chose =>
    CCL_WORKER_AFFINITY=cores of this rank, or unset it and I_MPI_PIN_*; CCL_WORKER_COUNT=1.
  case OUT_OF_(?:DEVICE|HOST)_MEMORY => No memory is left for its buffers => A smaller batch;
    activation checkpointing; one process per device.
  case EJ0003|bind the IP => HCCL's port is taken: by a process left over, or an earlier job =>
    npu-smi info lists the processes: end them, wait 10 s; or another HCCL_IF_BASE_PORT.

accelerator-timeout (timeout): work of an NPU, as a collective, did not finish in time
  /execute failed, reason=\[(?:\w+ )*timeout\]/ /EI000[26]: / /error code is 507046/
  /Hccl\w+, error code is/ /hccl fftsplus task timeout/
  why: The rank that prints it waits for another one, which failed before, hangs, or is slow
  fix: Read the other ranks' logs first (plog in ~/ascend/log); if one is slow: HCCL_EXEC_TIMEOUT.
  case EI0006|socket times? ?out => The ranks could not connect: one did not come so far, or no
    network is between them => Read the other ranks' logs; hccn_tool pings; HCCL_CONNECT_TIMEOUT.

jax-task-missing (timeout, accuses named): a process of JAX or TensorFlow is missing
  /\/task:(?P<ranks>\d+) (?:heartbeat timeout|unexpectedly tried to connect)/
  /Barrier timed out\. (?:Barrier_i|I)d: / /JAX distributed service detected fatal errors/
  /Coordination service agent in error status: / /WatchTasksAsync failed for task \d/
  why: A process crashed, was preempted, or never came: `Timed out task names` lists those missing
  fix: Read its own log first. jax.distributed.initialize: as many processes as num_processes, each
    with its process_id, and never in a process that a data loader starts.

killed-sigfpe (generic): a process ended by an arithmetic exception in native code (SIGFPE)
  /Signal 8 \(SIGFPE\) received by PID (?P<pid>\d+)/ /Fatal Python error: Floating point exception/
  /Floating point exception(?: +\(core dumped\)|$)/
  /(?:terminated with signal |died with <Signals\.|\*\*\* )SIGFPE/
  why: An integer division by zero: cuBLAS before 12.4.5.8 on H20, or an extension on empty tensors
  fix: A newer nvidia-cublas-cu12 or torch; PYTHONFAULTHANDLER=1; assert tensor.numel() before it.
"""

FAMILIES = read_families(_TEXT, DRAIN=_DRAIN)
