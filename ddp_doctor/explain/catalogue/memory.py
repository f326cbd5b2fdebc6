"""Causes in memory: of the GPU, of the host, of a container, of a job."""

from ddp_doctor.explain.events import Blame, Cause, Tier

_HOST = (
    "Fewer DataLoader workers, a smaller prefetch_factor, tensors or arrays instead of Python "
    "lists in the dataset (each worker copies them), memory-mapped files, more memory for the job."
)

CAUSES = (
    Cause(
        code="memory-gpu",
        title="the GPU ran out of memory",
        phrases=(
            r"CUDA out of memory",
            r"(?:torch\.|cuda\.)OutOfMemoryError",
            r"CUDA error: out of memory",
            r"Cuda failure (?:2 )?'out of memory'",
        ),
        why="Activations grow with the batch; weights, gradients and AdamW's state take about 16 "
        "bytes per parameter. The other ranks then wait for this one",
        fix="Halve the batch and double gradient accumulation; autocast with bfloat16; activation "
        "checkpointing; map_location='cpu' when loading; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation. If only GPU 0 is "
        "full: torch.cuda.set_device(LOCAL_RANK), no .cuda() on GPU 0 by all ranks.",
        lightning="Trainer(accumulate_grad_batches=2, precision='bf16-mixed')",
        accelerate="Accelerator(gradient_accumulation_steps=2, mixed_precision='bf16'); "
        "find_executable_batch_size",
        trainer="TrainingArguments(per_device_train_batch_size=..., "
        "gradient_accumulation_steps=..., gradient_checkpointing=True, auto_find_batch_size=True)",
        confirm="torch.cuda.memory_summary(); nvidia-smi for other processes on that GPU.",
    ),
    Cause(
        code="memory-gpu-others",
        title="other processes hold most of this GPU's memory",
        why="They have {others} GiB, and this process {own} GiB: another job, a process left over, "
        "or several ranks on one GPU",
        fix="nvidia-smi shows them: end what is left over (kill PID), or choose another GPU with "
        "CUDA_VISIBLE_DEVICES. If they are ranks of this job: torch.cuda.set_device(LOCAL_RANK).",
        confirm="nvidia-smi --query-compute-apps=pid,used_memory --format=csv.",
    ),
    Cause(
        code="memory-kernel-oom",
        title="the kernel killed a process because the node or the container was out of memory",
        phrases=(
            r"Out of memory: Killed process (?P<pid>\d+) \([^)]+\)",
            r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d+)",
            r"oom-kill:constraint=",
            r"invoked oom-killer",
            r"oom_reaper: reaped process (?P<pid>\d+)",
        ),
        tier=Tier.KILLED,
        why="Host memory was full; the kernel chose the largest process and sent SIGKILL, so it "
        "could not log anything",
        fix=_HOST,
        confirm="dmesg -T | grep -i 'killed process'; memory.events of the cgroup.",
    ),
    Cause(
        code="memory-slurm-oom",
        title="the scheduler killed the job's processes for memory",
        phrases=(
            r"Detected \d+ oom[-_]kill event",
            r"Exceeded (?:job|step) memory limit",
            r"task [\d,-]+: Out Of Memory",
            r"TERM_MEMLIMIT",
            r"PBS: job killed: v?mem ",
            r"memory usage exceeded request_memory",
        ),
        tier=Tier.KILLED,
        why="The processes of this node used more memory than the job asked for",
        fix="sbatch --mem=0 (all of the node) or a larger --mem; bsub -M, qsub -l mem=. " + _HOST,
        confirm="sacct -j JOB --format=JobID,State,MaxRSS,ReqMem; bhist -l JOB; qstat -fx JOB.",
    ),
    Cause(
        code="memory-pod-oom",
        title="the container was killed for memory (OOMKilled)",
        phrases=(r"OOMKilled", r"[Cc]ontainer .*(?:exceeded|exceeds) (?:its )?memory limit"),
        tier=Tier.KILLED,
        why="All processes of the pod together used more than resources.limits.memory",
        fix="Raise resources.limits.memory; an emptyDir of medium Memory (/dev/shm) counts, "
        "too. " + _HOST,
        confirm="kubectl describe pod: Last State: Terminated, Reason: OOMKilled, Exit Code: 137.",
    ),
    Cause(
        code="memory-worker-killed",
        title="a DataLoader worker was killed, most likely for lack of memory",
        phrases=(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Killed",),
        tier=Tier.KILLED,
        blame=Blame.SPEAKER,
        why="The kernel or the container ran out of memory and killed the worker with SIGKILL",
        fix=_HOST,
        trainer="dataloader_num_workers=2, dataloader_prefetch_factor=2",
        confirm="dmesg | grep -i oom; grep oom_kill /sys/fs/cgroup/memory.events.",
    ),
    Cause(
        code="memory-host",
        title="the host refused memory",
        phrases=(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            r"\[Errno 12\] Cannot allocate memory",
            r"Unable to allocate [\d.]+ [KMGT]iB for an array",
            r"std::bad_alloc",
            r"\bMemoryError\b",
        ),
        why="The process asked for more than there is, or than ulimit -v or the container allows",
        fix=_HOST,
        confirm="free -g and ulimit -v at that moment; how large is the allocation in the message?",
    ),
    Cause(
        code="memory-shm",
        title="shared memory (/dev/shm) is full",
        phrases=(
            r"unable to allocate shared memory\(shm\) for file",
            r"unable to open shared memory object",
            r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Bus error",
            r"unable to mmap \d+ bytes from file <.*torch_",
        ),
        why="Workers hand their batches over through /dev/shm; a container has 64 MB by default",
        fix="docker run --shm-size=8g or --ipc=host; Kubernetes: emptyDir with medium Memory at "
        "/dev/shm; fewer workers or a smaller prefetch_factor; "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
        trainer="dataloader_num_workers=0 as a workaround",
        confirm="df -h /dev/shm while it runs.",
    ),
    Cause(
        code="memory-pinned",
        title="page-locked (pinned) memory could not be allocated",
        phrases=(
            r"Pin memory thread exited unexpectedly",
            r"CUDA error: .*cudaHostAlloc",
            r"Caught \w+ in pin memory thread",
        ),
        why="The thread that pins batches died: an error in a custom batch, no memory, or the GPU "
        "was gone",
        fix="pin_memory=False shows the first error; pin_memory() of a custom batch class; "
        "torch.cuda.set_device before the loader.",
        trainer="dataloader_pin_memory=False",
        confirm="The run works with pin_memory=False.",
    ),
    Cause(
        code="killed-sigkill",
        title="a process was killed with SIGKILL",
        phrases=(
            r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)",
            r"died with <Signals\.SIGKILL: 9>",
            r"line \d+: +\d+ Killed\b",
            r"exit (?:code|status):? *137\b",
            r"returned non-zero exit status -9\b",
        ),
        tier=Tier.EXCEPTION,
        is_generic=True,
        why="Nothing in the process can log that. Most often the kernel or the container was out "
        "of memory; else the scheduler, or a person",
        fix="If it was memory: " + _HOST,
        confirm="dmesg -T | grep -i 'killed process'; grep oom_kill /sys/fs/cgroup/memory.events; "
        "sacct or kubectl describe pod.",
        or_else="Memory: dmesg names the pid. Scheduler: its accounting says TIMEOUT or PREEMPTED. "
        "Neither: somebody ran kill -9.",
    ),
    Cause(
        code="killed-segfault",
        title="a process crashed in native code (SIGSEGV)",
        phrases=(
            r"Signal 11 \(SIGSEGV\) received by PID (?P<pid>\d+)",
            r"Fatal Python error: Segmentation fault",
            r"Segmentation fault(?: +\((?:core dumped|11)\)|$|:)",
            r"died with <Signals\.SIGSEGV",
            r"returned non-zero exit status (?:-11|3221225477)\b",  # the second: Windows
            r"\*\*\* SIGSEGV received at time=",
            r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Segmentation fault",
        ),
        is_generic=True,
        why="An extension (image or video decoding, HDF5, custom CUDA, an ABI that does not fit "
        "torch) or a full stack",
        fix="PYTHONFAULTHANDLER=1 shows the Python line; num_workers=0 shows whether it is the "
        "dataset; ulimit -s unlimited; reinstall the extension for this torch.",
        confirm="The stack that PYTHONFAULTHANDLER=1 prints ends in that extension.",
        or_else="TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo: torch 2.13 crashes on all ranks when DDP "
        "is made; use INFO.",
    ),
    Cause(
        code="killed-bus",
        title="a process got a bus error (SIGBUS)",
        phrases=(
            r"Signal 7 \(SIGBUS\) received by PID (?P<pid>\d+)",
            r"Fatal Python error: Bus error",
            r"Bus error(?: +\((?:core dumped|7)\)|: nonexistent)",
            r"died with <Signals\.SIGBUS",
        ),
        is_generic=True,
        why="/dev/shm is full, or a memory-mapped file was cut or lies on a disk that failed",
        fix="Raise shared memory (--shm-size=8g); copy memory-mapped data to a local disk; do not "
        "write files that others map.",
        confirm="df -h /dev/shm and the dataset's disk.",
    ),
    Cause(
        code="killed-sigill",
        title="a process executed an instruction that this CPU does not have (SIGILL)",
        phrases=(
            r"Signal 4 \(SIGILL\) received by PID (?P<pid>\d+)",
            r"Illegal instruction(?: +\(core dumped\)|$)",
            r"died with <Signals\.SIGILL",
        ),
        is_generic=True,
        why="A package was built for a newer CPU (AVX-512) than that of this node",
        fix="Install it on the oldest node, or build without -march=native.",
        confirm="lscpu on this node and on one that works: compare the flags.",
    ),
    Cause(
        code="memory-ray",
        title="Ray killed a worker because its node ran low on memory",
        phrases=(
            r"killed due to memory pressure \(OOM\)",
            r"Task was killed due to the node running low on memory",
            r"exceeds the memory usage threshold of",
        ),
        tier=Tier.KILLED,
        why="All processes of the node together crossed Ray's memory threshold",
        fix="RAY_memory_usage_threshold=0.98 only if it is close. " + _HOST,
        confirm="ray logs raylet.out -ip HOST | grep -i memory.",
    ),
)
