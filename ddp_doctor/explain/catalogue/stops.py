"""Causes outside of the program: signals, schedulers, Kubernetes, and what launchers say."""

from ddp_doctor.explain.events import Blame, Cause, Tier

# No message tells these two: they are seen in who ended, and in what the others lost.
SILENT = Cause(
    code="stop-silent",
    title="a rank ended without an exception, and the others lost it",
    why="It ended and printed no error: sys.exit() or os._exit(), an exception that was caught and "
    "not printed, output that went elsewhere; or, if no launcher tells its status, it was killed",
    fix="Read what it printed last; search the program for sys.exit, os._exit and broad except "
    "clauses; raise instead of exiting; dmesg -T | grep -i 'killed process' on its node.",
    confirm="python -X faulthandler -u; a breakpoint in sys.exit.",
)
FINISHED = Cause(
    code="lost-finished-rank",
    title="a rank had finished while others still waited for it",
    tier=Tier.MISMATCH,
    is_generic=True,
    why="The launcher lists no other failure than those that lost a connection: the rank at the "
    "other end had ended with status 0. It had fewer batches, or left its loop early",
    fix="Equal numbers of batches: DistributedSampler(drop_last=True), or `with model.join():`; no "
    "break, return or sys.exit(0) that one rank alone takes.",
    lightning="use_distributed_sampler=True; limit_train_batches for iterable datasets",
    accelerate="accelerator.prepare(loader); accelerator.join_uneven_inputs([model])",
    trainer="TrainingArguments(dataloader_drop_last=True)",
    confirm="print(rank, len(loader)) on each rank, and a print after the loop.",
)

CAUSES = (
    Cause(
        code="stop-time-limit",
        title="the scheduler ended the job at its time limit",
        phrases=(
            r"CANCELLED AT \S+ DUE TO TIME LIMIT",
            r"PBS: job killed: walltime",
            r"TERM_RUNLIMIT",
            r"was active on the node longer than the specified deadline",
        ),
        tier=Tier.KILLED,
        why="The job ran longer than it asked for",
        fix="Save checkpoints and resume: sbatch --time=..., --signal=B:USR1@300 with a handler "
        "that saves, --requeue.",
        lightning="SLURMEnvironment(auto_requeue=True)",
        trainer="save_steps, then train(resume_from_checkpoint=True)",
        confirm="sacct -j JOB --format=State,Elapsed,Timelimit.",
    ),
    Cause(
        code="stop-preempted",
        title="the scheduler took the node back (preemption)",
        phrases=(
            r"CANCELLED AT \S+ DUE TO PREEMPTION",
            r"[Pp]reempted in order to admit",
            r"reempted by (?:a )?pod",
        ),
        tier=Tier.KILLED,
        why="A job of higher priority, or the cloud, took the machine",
        fix="Handle SIGTERM: save, exit 0; sbatch --requeue; restartPolicy: OnFailure.",
        lightning="SLURMEnvironment(auto_requeue=True)",
        trainer="save_steps, then train(resume_from_checkpoint=True)",
        confirm="sacct -j JOB --format=State says PREEMPTED.",
    ),
    Cause(
        code="stop-node-failed",
        title="a node of the job failed",
        phrases=(
            r"CANCELLED AT \S+ DUE TO NODE FAILURE",
            r"Node failure on ",
            r"NodeNotReady",
            r"Node is not ready",
        ),
        tier=Tier.HARDWARE,
        blame=Blame.NOBODY,
        why="The scheduler lost contact with the node: it crashed, was rebooted, or is cut off",
        fix="Start again without it: sbatch --exclude=NODE; report it.",
        confirm="sinfo -R or kubectl describe node.",
    ),
    Cause(
        code="stop-cancelled",
        title="the job was cancelled",
        phrases=(
            r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT [\dT:-]+ (?:\*\*\*|DUE TO (?:SIGNAL|TASK))",
        ),
        tier=Tier.TEARDOWN,
        why="Somebody ran scancel, or one task failed and srun ended the others",
        fix="Look for the first failed task; srun --kill-on-bad-exit=1 prints it first.",
        confirm="sacct -j JOB --format=JobID,State,ExitCode: CANCELLED by UID is a person.",
    ),
    Cause(
        code="stop-evicted",
        title="Kubernetes evicted the pod",
        phrases=(
            r"The node was low on resource: [\w-]+",
            r"Pod .* (?:was )?[Ee]victed",
            r"Usage of EmptyDir volume \"[^\"]+\" exceeds the limit",
            r"TaintManagerEviction",
        ),
        tier=Tier.KILLED,
        why="The node ran out of memory, disk or was drained",
        fix="Set resources.requests to what is used (ephemeral-storage, too); write checkpoints to "
        "a volume, not to the container's disk.",
        confirm="kubectl describe pod and kubectl get events.",
    ),
    Cause(
        code="stop-sighup",
        title="the terminal was closed (SIGHUP)",
        phrases=(
            r"got signal: 1\b",
            r"[Rr]eceived (?:Signals\.)?SIGHUP",
            r"Received 1 death signal",
        ),
        tier=Tier.KILLED,
        why="The ssh session or terminal that torchrun was started in ended; nohup does not help, "
        "because torchrun handles SIGHUP itself",
        fix="Start it in tmux or screen, or with setsid, or as a job of a scheduler.",
        confirm="It ended when the connection did: last, journalctl -u ssh.",
    ),
    Cause(
        code="stop-sigterm",
        title="it was told to stop (SIGTERM)",
        phrases=(
            r"got signal: 15\b",
            r"Received (?:Signals\.)?SIGTERM",
            r"Signal 15 \(SIGTERM\) received by PID (?P<pid>\d+)",
            r"Sending process (?P<pid>\d+) closing signal (?:Signals\.)?SIGTERM",
            r"Closing process \d+ via signal SIGTERM",
        ),
        tier=Tier.TEARDOWN,
        why="The launcher ends the other ranks like this after one failed; without any failure "
        "before it, the scheduler or a person ended the job",
        fix="Look for the first failure before it. If there is none: sacct, kubectl describe pod, "
        "or the cloud's events; handle SIGTERM to save a checkpoint.",
        lightning="SLURMEnvironment(auto_requeue=True)",
        trainer="save_steps, then train(resume_from_checkpoint=True)",
    ),
    Cause(
        code="stop-interrupt",
        title="the job was stopped by hand (Ctrl-C)",
        phrases=(
            r"KeyboardInterrupt",
            r"got signal: 2\b",
            r"[Rr]eceived (?:Signals\.)?SIGINT death signal",
        ),
        tier=Tier.TEARDOWN,
        why="SIGINT was sent: Ctrl-C in the terminal, or the scheduler",
        fix="Start it again.",
    ),
    Cause(
        code="stop-aborted",
        title="a process aborted (SIGABRT)",
        phrases=(
            r"Signal 6 \(SIGABRT\) received by PID (?P<pid>\d+)",
            r"died with <Signals\.SIGABRT",
            r"\*\*\* SIGABRT received at time=",
            r"Fatal Python error: Aborted",
            r"terminate called (?:after throwing an instance of '[^']+'|without an active)",
            r"Aborted +\(core dumped\)",
        ),
        tier=Tier.TEARDOWN,
        blame=Blame.SPEAKER,
        is_generic=True,
        why="C++ code ended the process: NCCL's watchdog after a timeout, or an exception that "
        "nothing caught. Its message stands before",
        fix="Read what stands before it on the same rank: what() has the reason.",
    ),
    Cause(
        code="launch-slurm-step",
        title="Slurm or mpirun could not start the processes",
        phrases=(
            r"srun: error: Unable to (?:create step|confirm allocation|allocate resources)[^:]*: ",
            r"Batch job submission failed: ",
            r"Task launch for StepId=\S+ failed on node [^:]+: ",
            r"(?:srun|sbatch): error: .*(?:[Ii]nvalid|not available|More processors "
            r"requested|Requested node configuration).*",
            r"execve\(\): \S+: ",
            r"There are not enough slots available in the system to satisfy",
            r"PMI2_Init failed",
            r"OPAL ERROR: .*PMI",
            r"not built with .*PMI support",
            r"RTE (?:was unable to|does not know how to|has lost communication)",
            r"mpirun has detected an attempt to run as root",
            r"Host key verification failed",
        ),
        blame=Blame.NOBODY,
        why="The request does not fit the cluster, the allocation or the host list, the node does "
        "not have the program, or MPI and Slurm do not fit",
        fix="Compare #SBATCH lines with sinfo -o '%P %G %c %m'; srun needs the same --gres and "
        "--cpus-per-task. mpirun: slots= in the host list, --oversubscribe, --allow-run-as-root "
        "in containers, ssh without password between nodes; srun --mpi=pmix.",
        confirm="srun --pty hostname, or mpirun -np N hostname, with the same options.",
    ),
    Cause(
        code="launch-command",
        title="the command or a file of it was not found",
        phrases=(
            r"can't open file '?[^':]+'?: \[Errno 2\]",
            r"executable file not found in \$PATH",
            r"command not found",
            r"ErrImagePull",
            r"ImagePullBackOff",
        ),
        blame=Blame.NOBODY,
        why="The environment is not active in the job, or a path is not the same on this node",
        fix="Activate the environment in the job's script; absolute paths; which torchrun.",
    ),
    SILENT,
    FINISHED,
)
