"""Causes in memory: of the GPU, of the host, of a container, of a job."""

from ddp_doctor.explain.catalogue.entries import read_families

_HOST = (
    "Fewer DataLoader workers, a smaller prefetch_factor, arrays instead of Python lists in the "
    "dataset (each worker copies them), memory-mapped files, more memory for the job."
)
_TEXT = r"""
[Memory]

memory-gpu: the GPU ran out of memory
  /^(?!.*Failed to clone\(\))(?:.|\n)*(?:CUDA|[MNHX]PU|MPS backend) out of memory/
  /cudaErrorMemoryAllocation/ /(?:torch\.|cuda\.)OutOfMemoryError/
  /RESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|OOM|hbm|Attempting to (?:reserve|allocate))/
  why: Activations grow with the batch; weights, gradients, AdamW's state take 16 bytes a parameter
  fix: Halve the batch and double gradient accumulation; autocast with bfloat16; activation
    checkpointing; map_location='cpu' when loading; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    against fragmentation. If only GPU 0 is full: torch.cuda.set_device(LOCAL_RANK).
  trainer: gradient_accumulation_steps, gradient_checkpointing=True, auto_find_batch_size=True
  or_else: A batch of one is too large, too: shard it (FSDP, ZeRO 3), LoRA, a shorter sequence.
  case hbm|XLA:TPU => A TPU's memory (HBM) is short => More shards, smaller batch, remat.

memory-gpu-weights (likely): the GPU ran out of memory while weights were loaded, moved or saved
  /Failed to clone\(\) tensor with name/
  why: Each rank holds, or gathers, all weights of the model, or a second copy of them
  fix: Load on the CPU (map_location='cpu', low_cpu_mem_usage), then shard (FSDP, ZeRO 3) or
    quantise; each rank on its own GPU (set_device). Save sharded, or whole weights on rank 0 and
    the CPU: StateDictOptions(full_state_dict=True, cpu_offload=True). Look at what was being saved.

memory-gpu-driver: the GPU's driver gave no memory, to CUDA, NCCL or torch
  /CUDA [eE]rror: out of memory/ /C(?:uda|UDA) failure (?:\d+ )?'out of memory'/
  /HSA_STATUS_ERROR_OUT_OF_RESOURCES/ /(?:Triton Error \[CUDA\]: |driver error:)out of memory/
  why: Torch's allocator may hold all that is left, so that CUDA or NCCL get none; or other
    processes fill the GPU: one left over, or ranks that all use GPU 0
  fix: nvidia-smi (rocm-smi --showpids) lists them; torch.cuda.set_device(LOCAL_RANK) before all
    else; torch.load with map_location='cpu'; leave 1 GB free by a smaller batch.
  or_else: If much is free: a limit of this process (MIG, vGPU, WSL), or the driver.

memory-gpu-others (likely): other processes hold most of this GPU's memory
  why: They have {others} GiB, and this process {own} GiB: another job or rank, or one left over
  fix: nvidia-smi shows them: end what is left over (kill PID), or choose another GPU with
    CUDA_VISIBLE_DEVICES. If they are ranks of this job: torch.cuda.set_device(LOCAL_RANK).

memory-kernel-oom (killed): the kernel killed a process: out of memory
  /[Oo]ut of memory: Kill(?:ed)? process (?P<pid>\d+)/ /oom-kill:constraint=/ /invoked oom-killer/
  /oom_reaper: reaped process (?P<pid>\d+)/
  why: Host memory was full; the kernel sent SIGKILL to the largest process, which logged nothing
  fix: %HOST%

memory-slurm-oom (killed): the scheduler killed processes for memory
  /Detected \d+ oom[-_]kill event/ /Exceeded (?:job|step) memory limit/ /TERM_MEMLIMIT/
  /task [\d,-]+: Out Of Memory/ /PBS: job killed: v?mem / /memory usage exceeded request_memory/
  why: The processes of this node used more memory than the job asked for
  fix: sbatch --mem=0 (all of the node) or a larger --mem; bsub -M, qsub -l mem=. %HOST%

memory-pod-oom (killed): the container was killed for memory (OOMKilled)
  /OOMKilled/ /[Cc]ontainer .*(?:exceeded|exceeds) (?:its )?memory limit/
  why: All processes of the pod together used more than resources.limits.memory
  fix: Raise resources.limits.memory; an emptyDir of medium Memory (/dev/shm) counts, too. %HOST%

memory-worker-killed (killed, accuses speaker, likely): a DataLoader worker was killed with SIGKILL
  /DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Killed/
  why: Mostly the kernel or the container ran out of memory, and killed the largest process
  fix: %HOST%

memory-host (likely): the host refused memory
  /(?:DefaultCPUAllocator: can't|not enough memory: you tried to) allocate/
  /(?:\[Errno 12\]|from file <.*>:) Cannot allocate memory/ /std::bad_alloc(?!: cuda)/
  /Unable to allocate [\d.]+ [KMGT]iB for an array/
  /\bMemoryError(?::(?!.*cudaError)|$| in DataLoader)/
  why: The process asked for more than there is, or than ulimit -v, the container or, for very many
    small files, vm.max_map_count allows; a size beyond all reason: a wrong shape, a damaged file
  fix: %HOST%

memory-shm: shared memory (/dev/shm) is full
  /unable to allocate shared memory\(shm\) for file/ /unable to write to file <\/?torch_/
  /unable to open shared memory object .*No space/ /[Uu]nexpected bus error encountered in worker/
  /DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Bus error/
  /unable to mmap \d+ bytes from file <\/?torch_[^>]*>(?!.*Cannot allocate)/
  why: Workers hand their batches over through /dev/shm; a container has 64 MB by default
  fix: docker run --shm-size=8g or --ipc=host; Kubernetes: emptyDir with medium Memory at /dev/shm;
    fewer workers; torch.multiprocessing.set_sharing_strategy('file_system').

killed-sigkill (generic): a process was killed with SIGKILL
  /Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)/ /died with <Signals\.SIGKILL: 9>/ /^Killed$/
  /line \d+: +\d+ Killed\b/ /ligne ?:? ?\d+ ?: +\d+ Processus arrêté/
  /Zeile ?:? ?\d+ ?: +\d+ Getötet/ /^(?:zsh: |\[\d+\] +\+? *\d+ )killed  /
  /exit (?:code|status):? *137\b/ /returned non-zero exit status -9\b/
  why: Nothing in the process can log that. Mostly memory was short; else the scheduler, or a person
  fix: If it was memory: %HOST%
  or_else: Memory: dmesg -T names the pid. Scheduler: TIMEOUT or PREEMPTED in sacct. Else: a person.

killed-segfault (generic): a process crashed in native code (SIGSEGV, or a damaged heap)
  /Signal 11 \(SIGSEGV\) received by PID (?P<pid>\d+)/ /Fatal Python error: Segmentation fault/
  /`Segmentation fault` is detected by/ /[Ss]egmentation fault(?: +\((?:core dumped|11)\)|$|:)/
  /died with <Signals\.SIGSEGV/ /returned non-zero exit status (?:-11|3221225477)\b/
  /\*\*\* SIGSEGV (?:\(@\w+\) )?received / /\]: segfault at [0-9a-f]+ ip /
  /(?:free|alloc|chunk|consolidate)\(\): (?:invalid|corrupted|unaligned|double free|memory corr)/
  /double free or corruption/ /corrupted (?:size vs|double-linked)/
  /DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Segmentation fault/
  why: An extension (image or video decoding, HDF5, custom CUDA, another ABI) or a full stack
  fix: PYTHONFAULTHANDLER=1 shows the line; num_workers=0; ulimit -s unlimited; newer extensions.
  case distributed_c10d\.py => It crashed in a collective: NCCL (RCCL), its plug-in, or gloo =>
    NCCL_DEBUG=INFO; as trials NCCL_NET_PLUGIN=none, NCCL_P2P_DISABLE=1; another NCCL or driver.
  or_else: TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo crashes torch 2.13 when DDP is made; use INFO.

killed-bus (generic): a process got a bus error (SIGBUS)
  /Signal 7 \(SIGBUS\) received by PID (?P<pid>\d+)/ /Fatal Python error: Bus error/
  /Bus error(?: +\((?:core dumped|7)\)|: nonexistent)/ /died with <Signals\.SIGBUS/
  why: /dev/shm is full, or a memory-mapped file was cut or lies on a disk that failed
  fix: Raise shared memory (--shm-size=8g); copy memory-mapped data to a local disk.

killed-sigill (generic): a process executed an instruction that this CPU does not have (SIGILL)
  /Signal 4 \(SIGILL\) received by PID (?P<pid>\d+)/ /Illegal instruction(?: +\(core dumped\)|$)/
  /died with <Signals\.SIGILL/
  why: A package was built for a newer CPU (AVX-512) than that of this node
  fix: Install it on the oldest node, or build without -march=native.

memory-ray (killed): Ray killed a worker because its node ran low on memory
  /killed due to memory pressure \(OOM\)/ /Task was killed due to the node running low on memory/
  /exceeds the memory usage threshold of/
  why: All processes of the node together crossed Ray's memory threshold
  fix: RAY_memory_usage_threshold=0.98 only if it is close. %HOST%
"""

FAMILIES = read_families(_TEXT, HOST=_HOST)
