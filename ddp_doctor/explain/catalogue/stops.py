"""Causes outside of the program: signals, schedulers, Kubernetes, and what launchers say."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Signals, schedulers, Kubernetes]

stop-time-limit (killed): the scheduler ended the job at its time limit
  /CANCELLED AT \S+ DUE TO TIME LIMIT/ /job (?:killed: walltime|exceeded wallclock limit)/
  /exceeded its time limit and its allocation has been revoked/ /TERM_RUNLIMIT/
  /was active (?:on the node )?longer than (?:the )?specified deadline/
  why: The job ran longer than it asked for
  or_else: It hung before: its last lines of progress are much older.
  fix: Save checkpoints and resume: sbatch --time=..., --signal=B:USR1@300 (a handler), --requeue.

stop-preempted (killed): the scheduler took the node back, or the job was queued again
  /CANCELLED AT \S+ DUE TO (?:PREEMPTION|JOB REQUEUE)/ /[Pp]reempted in order to admit/
  /reempted by (?:a )?pod/
  why: A job of higher priority, or the cloud, took the machine; JOB REQUEUE may also be the job's
    own `scontrol requeue` before its time limit (submitit, Lightning)
  fix: Handle SIGTERM: save, exit 0; sbatch --requeue; restartPolicy: OnFailure.

stop-node-failed (hardware, accuses nobody): a node of the job failed
  /CANCELLED AT \S+ DUE TO NODE FAILURE/ /Node failure on / /NodeNotReady/
  /because its node has died/ /RTE has lost communication with a remote daemon/
  why: The scheduler lost the node: a crash, a reboot, the network, preemption (see around it)
  fix: Start again without it: sbatch --exclude=NODE; report it.

stop-cancelled (teardown): the job was cancelled
  /(?:JOB|STEP) \S+ ON \S+ CANCELLED AT [\dT:-]+ (?:\*\*\*|DUE [Tt][Oo] (?:SIGNAL|TASK))/
  why: Somebody ran scancel, or one task failed and srun ended the others
  fix: Look for the first failed task; srun --kill-on-bad-exit=1 prints it first.
  confirm: sacct -j JOB --format=JobID,State,ExitCode: CANCELLED by UID is a person.

stop-evicted (killed): Kubernetes evicted the pod
  /The node (?:was low on resource: [\w-]+|had condition: \[\w+)/ /Pod (?:\S+ )?(?:was )?[Ee]victed/
  /Usage of EmptyDir volume \"[^\"]+\" exceeds the limit/ /TaintManagerEviction(?!.*Cancelling)/
  why: The node ran out of memory, disk or was drained
  fix: Set resources.requests to what is used, ephemeral-storage, too; checkpoints on a volume.

stop-sighup (killed): the terminal was closed (SIGHUP)
  /got signal: 1\b/ /[Rr]eceived (?:(?:Signals\.)?SIGHUP|1 death signal)/
  /closing signal (?:Signals\.)?SIGHUP/
  why: torchrun's ssh session or terminal ended; nohup does not help, since it handles SIGHUP itself
  fix: Start it in tmux or screen, or with setsid, or as a job of a scheduler.

stop-sigterm (teardown): it was told to stop (SIGTERM)
  /got signal: 15\b/ /Received (?:(?:Signals\.)?SIGTERM|15 death signal)/
  /Signal 15 \(SIGTERM\) received by PID (?P<pid>\d+)/ /Closing process \d+ via signal SIGTERM/
  /Sending process (?P<pid>\d+) closing signal (?:Signals\.)?SIGTERM/
  /Command '.*(?:python|torchrun|deepspeed|accelerate).*died with <Signals\.SIGTERM/
  /^(?:\S+: line \d+: +\d+ )?Terminated(?: {2,}.*)?$/
  /DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Terminated/
  why: The launcher ends the other ranks after one failed; with no failure: a scheduler, a person
  fix: Look for a failure before it; if none: sacct, kubectl describe pod; save on SIGTERM.

stop-interrupt (teardown): the job was stopped by hand (Ctrl-C)
  /KeyboardInterrupt/ /got signal: 2\b/ /[Rr]eceived (?:(?:Signals\.)?SIGINT|2) death signal/
  why: SIGINT was sent: Ctrl-C in the terminal, or the scheduler
  fix: Start it again.

stop-aborted (teardown, generic, accuses speaker): a process aborted (SIGABRT)
  /Signal 6 \(SIGABRT\) received by PID (?P<pid>\d+)/ /died with <Signals\.SIGABRT/
  /\*\*\* SIGABRT (?:\(@\w+\) )?received / /Fatal Python error: Aborted/ /Aborted +\(core dumped\)/
  /`Process abort signal` is detected by/
  /terminate called (?:after throwing an instance of '[^']+'|without an active)/
  why: C++ code ended it: NCCL's watchdog after a timeout, or an exception that nothing caught
  fix: Read what stands before it on the same rank: what() has the reason.

mpi-error (generic, unknown): a call of MPI failed
  /\[(?P<what>[\w.-]+:\d+)\] \*\*\* An error occurred in MPI_/
  # WHY not 0: without PMI each process takes itself for it
  /Abort\(\d+\)(?: on node \d+)? \(rank (?:0|(?P<ranks>\d+)) in comm \d+\): (?!application)/
  why: The library says after it which call, and why
  fix: Read the lines below it; GPU tensors need a CUDA-aware MPI.
  case PMI => MPI takes itself for started by mpirun or srun, and does not find its process manager
    => mpirun of the same MPI, or srun --mpi=pmix; under torchrun unset PMI_* and PMIX_* variables;
    oneCCL: CCL_PROCESS_LAUNCHER=none with CCL_LOCAL_RANK and CCL_LOCAL_SIZE.

launch-slurm-step (generic, accuses nobody, unknown): Slurm or mpirun could not start the processes
  /srun: error: Unable to (?:create step|confirm allocation|allocate resources)[^:]*: /
  /Batch job submission failed: / /Task launch for \S+ failed on node [^:]+: / /PMI2_Init failed/
  /CPU binding outside of job step allocation/ /execve\(\): \S+: (?!No such)/ /OPAL ERROR: .*PMI/
  /(?:srun|sbatch): error: .*(?:[Ii]nvalid|not available|More processors req|Requested node)/
  /There are not enough slots available in the system to satisfy/ /not built with .*PMI support/
  /RTE (?:was unable to|does not know how to)/ /mpirun has detected an attempt to run as root/
  why: It does not fit the cluster or the allocation, or MPI does not fit Slurm
  fix: Compare #SBATCH with sinfo -o '%P %G %c %m'; srun needs the same --gres and --cpus-per-task.
  case CPU binding outside => The CPUs that --cpu-bind names are not in the job's allocation => srun
    --cpu-bind=none, or ask for these CPUs: --cpus-per-task, --exclusive.
  case credential => The node refused the job's credential: its clock, munge key or slurm.conf
    differs => sbatch --exclude=NODE; its administrator compares the three.
  case PMI => MPI and the launcher speak different versions of PMI => srun --mpi=list, then
    --mpi=pmix or pmi2, as MPI was built; or mpirun of the same MPI.
  case not enough slots => The hosts have fewer slots than -np => A smaller -np, or HOST slots=N.

launch-command (accuses nobody, likely): the command or a file of it was not found
  /can't open file '?[^':]+'?: \[Errno 2\]/ /executable file not found in \$PATH/
  /execve\(\): \S+: No such file/
  /(?:torchrun|python[\d.]*|deepspeed|accelerate|srun|mpirun|docker|orted): (?:command )?not found/
  /command not found: (?:torchrun|python|deepspeed|accelerate|srun|mpirun|apptainer|conda|uv)/
  why: The environment is not active in the job, or a path is not the same on this node
  fix: Activate the environment in the job; absolute paths; a module: torchrun -m package.module.
  case can't open file => No such script there: its folder or its name is wrong, or the job begins
    in another folder => ls of that path on that node; cd before it, or an absolute path.
  case orted: => The other node's shell does not find Open MPI => mpirun --prefix FOLDER of Open MPI
    on that node; or PATH and LD_LIBRARY_PATH at the top of its ~/.bashrc.

stop-silent: a rank ended without an exception, and the others lost it
  # No message tells this one and the next: who ended does, and what the others lost.
  why: It ended and printed no error: sys.exit() or os._exit(), an exception that was caught and not
    printed, output that went elsewhere; or, if no launcher tells its status, it was killed
  fix: Read what it printed last; search the program for sys.exit, os._exit and broad except
    clauses; raise instead of exiting; dmesg -T | grep -i 'killed process' on its node.

lost-finished-rank (mismatch, generic): a rank had finished while others still waited for it
  # Alone these are warnings that nearly each program gives at its end: see silent_ends.
  /destroy_process_group\(\) was not called before program exit/
  /process group has NOT been destroyed before/
  why: The rank that was lost had ended as if all was done: fewer batches, or it left its loop early
  fix: DistributedSampler(drop_last=True), or `with model.join():`; no rank returns or breaks alone.
"""

FAMILIES = read_families(_TEXT)
