"""Causes in the launch: environment, rendezvous, ports, torchrun, frameworks, containers."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[Launch and rendezvous]

launch-environment (accuses nobody): the variables of a launcher are missing
  /environment variable \w+ expected, but not set/ /(?:rank|world size) parameter missing/
  /KeyError: '(?:OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD|SLURM)_\w+'/ /raise _env_error\(/
  /KeyError: '(?:LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_WORLD_SIZE)'/
  why: It was started by python, or by a launcher (srun, mpirun) with other names than torch's
  fix: torchrun --standalone --nproc_per_node=2 train.py. srun: RANK=$SLURM_PROCID
    LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS and MASTER_ADDR, MASTER_PORT.
  case OMPI_|PMI|MV2_|SLURM_ => The program wants to be started by mpirun, or srun => mpirun -np 2
    python train.py, or srun in a job; or adapt how it reads its rank.

launch-port (accuses nobody, likely): a port is taken
  /EADDRINUSE/ /error: 10048\b/ /^(?!.*(?:gloo|\bOFI\b|\bMPI[_D]|\bUCX)).*[Aa]ddress already in use/
  why: Another job on this node, or a process left over, listens there; or each rank starts a server
  fix: Another --master_port above 1024, on one node torchrun --standalone; `ss -ltnp | grep PORT`
    names the owner: end it if it is left over. srun: one launcher per node, since each opens it.

launch-port-refused (generic, accuses nobody): the port of the rendezvous can't be opened
  /The server socket has failed to (?:bind|listen)(?!.*errno: 97\b)/
  why: `Permission denied`: below 1024, or Windows has it; `Cannot assign`: the address is another's
  fix: --master_port from 1024 to 65535; the address of the node that has rank 0.

launch-client-timeout (timeout): the address of another process could not be reached
  /The client socket has (?:timed out|failed to connect to any network address)/ /No route to host/
  /connect\(\) timed out\./ /Ping failed, invalid value returned from server/ /errno: 113\b/
  /The IPv[46] network addresses of \([^,]+, \d+\) cannot be retrieved/ /Network is unreachable/
  /failed to connect to [\w.-]+:\d+/
  why: The first node did not start or has another address, a firewall, or rank 0 ended already
  fix: On the node: getent hosts NAME and nc -zv NAME PORT; use the address of the cluster's network
    (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); open the port; read rank 0's log first.
  case [\[(, ]0\.(?!0\.0\.0)\d+\.\d+\.\d+ => A host name of digits alone was taken for an address =>
    The node's IP address, or a name with a letter; torchrun --local-addr=localhost on one node.
  case 127\.0\.\d\.1|localhost => The process with the store, on this node, ended or has not begun;
    or MASTER_ADDR should name another node => Read rank 0's log first; `ss -ltnp | grep PORT`.

launch-ranks-missing (timeout): not all ranks joined the rendezvous
  /Timed out after \d+ seconds waiting for clients\.(?: (?P<here>\d+)/(?P<all>\d+) clients joined)?/
  /Timed out initializing process group in store based barrier on rank:
    \d+.*\(world_size=(?P<all>\d+), (?:worker_count|num_workers_joined)=(?P<here>\d+)/
  /RuntimeError: Wait timeout/ /wait timeout after \d+ms, keys: \/default_pg\/0\/\/cpu\/\/0\//
  why: Some ranks ended before, were started late, or never; or world_size is more than there are
  fix: Look for the ranks without this message: their logs have the cause. Check --nnodes and
    --nproc_per_node on each node; Slurm: srun --ntasks (SLURM_NTASKS) is the world size.
  accelerate: --num_machines, --num_processes (of all together), and on each its --machine_rank

launch-ranks-too-many (timeout): more processes joined than there are ranks
  why: Two jobs, or a job and its restart, share a store; or each task of srun starts all ranks
  fix: Another port or --rdzv_id for each job; end what is left over; remove the file of a
    FileStore; srun: one task per node for torchrun or mp.spawn, one per GPU without them.

launch-rendezvous (timeout): torchrun's rendezvous failed
  /Rendezvous(?:Timeout|Connection|Closed|State)Error/ /The connection to the C10d store has failed/
  why: Fewer nodes than --nnodes came in time, a wrong endpoint, or the --rdzv_id of an ended job;
    closed, or lost amid the training: another node ended first, and its log has the cause
  fix: The same --rdzv_endpoint HOST:PORT and a fresh --rdzv_id on all nodes; HOST is one of the
    nodes; its port is open; --rdzv_conf join_timeout=1200 for slow starts.
  case RendezvousClosed|num_nodes_waiting|^sync$ => The agent of another node, or the process with
    the store, ended first => Read its log, and that of --rdzv_endpoint's node; two jobs on a node
    need two ports; a new start a fresh --rdzv_id.

launch-name (accuses nobody, likely): a host name can't be resolved
  /^(?!.*HTTPS?Connection|.*ssh: ).*Name or service not known/ /getaddrinfo failed/
  /^(?!.*HTTPS?Connection|.*ssh: ).*Temporary failure in name resolution/ /nslookup: can't resolve/
  /^(?!.*ssh: ).*nodename nor servname provided, or not known/
  why: DNS or /etc/hosts of this node lacks it: MASTER_ADDR, the endpoint, or a download's server
  fix: Use the address, or a name that getent hosts finds on all nodes; Slurm:
    MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1); a headless service.

launch-ssh (accuses nobody): a host could not be reached by ssh
  /ssh: (?:Could not resolve hostname|connect to host) (?!git|\S*(?:hub|lab)\.com)/
  /Command '\[?'?ssh\b.* returned non-zero exit status 255/ /ssh exited with exit code 255/
  /Host key verification failed/ /Permission denied \(publickey/
  why: deepspeed, mpirun and others start processes by ssh: a line of the host file names no host,
    or is empty (ssh takes the command for the name), there is no key, or sshd has another port
  fix: `ssh HOST hostname` must work without a password from the first node, for each line of the
    host file. One node needs no host file; torchrun on each node needs no ssh.
  or_else: It is of git, scp or rsync in the job's script, and no launcher's.

launch-no-group (accuses nobody): the process group was used before it was made
  /Default process group (?:has not been|is not) initialized/
  why: DDP, SyncBatchNorm, a sampler or a collective ran before init_process_group, after
    destroy_process_group, or in one process alone, which has no group
  fix: dist.init_process_group() first in main(), and torchrun for one GPU, too; or in one process
    BatchNorm for SyncBatchNorm, and collectives only if dist.is_initialized().

launch-init-method (accuses nobody): the init_method of the process group is no address
  /No rendezvous handler for \S*:/ /assert result\.hostname is not None/
  why: Known are env://, tcp://HOST:PORT and file:///PATH, with a host, or three slashes
  fix: init_process_group(backend) alone, which is env://, started by torchrun.

launch-spawn-guard (accuses nobody): a process was started amid an import
  /An attempt has been made to start a new process before the\s*/
  /current process has finished its bootstrapping phase/
  why: spawn imports the script again in each process: code outside of functions runs there, too
  fix: if __name__ == '__main__': main() at the end of the script.

launch-torch-version: the code is for another version of torch
  /No module named 'torch\.(?:_six|utils\.ffi)'/ /cannot import name '\w+' from 'torch[.']/
  why: What it imports was removed from torch, or came to it later
  fix: The version of torch that the code's requirements name; or newer code.

launch-import: a package is missing or does not fit
  /ModuleNotFoundError: No module named '[^']+'/ /python[\d.]*: No module named / /ImportError: /
  /operator torchvision::nms does not exist/ /undefined symbol: / /cuDNN version incompatibility/
  /implementation for device cuda:\d+ not found/ /version `GLIBC\w*_[\d.]+' not found/
  why: This Python has other packages than where it worked, or other versions
  fix: One environment on all nodes (pip list); its torchrun: python -m torch.distributed.run.
  case cuDNN version|undefined symbol: (?:nccl|cudnn|cublas|nv)\w* => Another version of it comes
    first than torch's => unset LD_LIBRARY_PATH; remove the second nvidia package.
  case torchvision::nms|undefined symbol => A package was built for another torch => Install the
    version of it that belongs to this torch (torchvision, flash-attn, apex).
  case GLIBC => It needs a newer system library than this node has => A container; an older build.
  case torch_extensions\S*: cannot open => Its build failed before, or another rank builds it =>
    Read the build's first error further up; rm -rf ~/.cache/torch_extensions; build on one rank.
  case HOROVOD_WITH => It was built without torch => HOROVOD_WITH_PYTORCH=1 pip install horovod.
  case cannot open shared object => A library of the system or of CUDA is not there, or not found =>
    ldconfig -p | grep NAME on that node; install its package; LD_LIBRARY_PATH in the job, too.
  case circular import => Modules import each other, or a file has a package's name => Rename it.
  case implementation for device => It has no CUDA => Its wheel for this torch; FORCE_CUDA=1.
  case cannot import name .*\(/(?!.*(?:-packages|/lib/python)) => It is of a checkout of your own: a
    wrong name, or not built => Correct the name; pip install -e . or make.
  case cannot import name => An installed package is of another version than the code was written
    for => pip install the versions that the program's requirements name.
  or_else: A module of yours: start in its folder, or PYTHONPATH; or a file of yours has its name.

launch-versions (generic): a function or a module does not have what is asked of it
  /__init__\(\) got an unexpected keyword argument '/ /is not in the \S+ registry/
  /module '(?:torch|numpy|collections|transformers|accelerate|deepspeed|\w+\.\w)[\w.]*' has no attr/
  why: Mostly the package is of another version than the code was written for
  fix: pip install the version that the program's requirements name (pip show NAME); or newer code.
  case registry => The module that registers this name was not imported, or another package of it is
    installed => custom_imports in the config; pip install -e . of that repository; the spelling.
  or_else: It is code of your own: the line that is named; or a file that has a package's name.

launch-parallel-sizes (accuses nobody): the ranks can't be divided into the groups asked for
  /[Ww]orld[_ ]size:? ?\(?\d+\)? (?:is not|must be) (?:divisible|a multiple)/
  /should be divisible by (?:the )?(?:tensor|context|sequence|pipeline)[- ](?:model[- ])?parallel/
  why: The sizes of tensor, pipeline, context and data parallel must multiply to the number of ranks
  fix: Change one of them, or the number of ranks.
  case [Dd]imension of the tensor => Sequence parallel gives each rank a part of a sequence => Pad
    sequences to a multiple of that size; or no sequence parallel.

launch-rank-range (accuses nobody, likely): rank and world size contradict each other
  /more than one node have assigned same rank/ /rank \d+ of \d+ ranks has already checked in/
  /(?:rank|Rank) \d+ .*(?:must be|is not|out of).*world[_ ]size/ /Invalid rank requested : \d+\/\d+/
  /[Ii]nvalid rank \d+, rank should be in the interval/
  /world_size \(\d+\) (?:is not equal to|does not match)/
  why: RANK and WORLD_SIZE were set by hand, two share a rank, or the sampler differs
  fix: Let the launcher set them: torchrun --nnodes N --nproc_per_node M.

[Launch: frameworks, containers, settings]

launch-local-rank-flag (accuses nobody): the script does not know the launcher's --local-rank
  /unrecognized arguments: .*--local[-_]rank/
  /--local[-_]rank.*(?:unrecognized|no such option|not recognized)/
  why: torch.distributed.launch gives --local-rank (with a dash since torch 2) to the script
  fix: torchrun and os.environ['LOCAL_RANK']; or add_argument('--local-rank', '--local_rank').

launch-arguments (generic, accuses nobody): the script refuses the arguments of its command
  /error: unrecognized arguments: /
  /error: (?:the following arguments are required: |argument \S+: (?:invalid|expected) )/
  /ValueError: Some specified arguments are not used by the HfArgumentParser/
  why: A flag is misspelled or missing, or one of the launcher stands behind the script's name
  fix: Flags of torchrun come before the script's name, those of the script after it.
  case arguments: (?!-)\S => A value was given to a flag that takes none, or a list was not quoted
    => Drop the value (--flag, no true behind it), or quote what belongs together.

launch-devices (accuses nobody): the number of processes is not what the program was told
  /You set `devices=[^`]+` in Lightning, but the number of tasks per node/
  /You set `num_nodes=[^`]+` in Lightning, but the number of nodes/
  /You set `--ntasks=\d+` in your SLURM bash script/ /num_processes \(\d+\) .*does not match/
  why: Each process asks for other devices or nodes than the launcher started processes for
  fix: --ntasks-per-node and --nproc_per_node equal the program's devices; --nodes its num_nodes.

launch-batch-size (accuses nobody): DeepSpeed's batch sizes do not fit the ranks
  /train_batch_size is not equal to micro_batch_per_gpu/
  why: train_batch_size must be micro batch x accumulation x ranks (the numbers in the message): one
    of them is wrong, or there are fewer ranks than planned (1: started without a launcher)
  fix: Leave one of the three out, or "auto" (Accelerate, Trainer); deepspeed or torchrun starts it.

launch-notebook (accuses nobody): a notebook can't start the processes like this
  /is not compatible with an interactive environment/
  /To (?:launch|train) .*(?:from|on) your notebook/
  /`Accelerator` should only be initialized inside your training function/
  /CUDA has been initialized before the `notebook_launcher`/
  /Lightning can't create new processes if CUDA is already initialized/
  why: They are forked from the notebook: nothing before may touch CUDA or make an Accelerator
  fix: Move the training into a file and start it with !torchrun --nproc_per_node=N train.py; or
    restart the kernel and touch CUDA inside of the started function only.

launch-config (accuses nobody): settings were refused: a key or a value is wrong
  /yaml\.(?:scanner|parser|composer|constructor)\.\w+Error/ /Could not override '[^']+'/
  /Could not find the transformer layer class/ /Key '[^']+' is not in struct/ /TOMLDecodeError: /
  /(?:hydra|omegaconf)\.errors\.(?!Inst)\w+/
  /\b\d{1,6} validation errors? for \w*(?:Config|Arg|Param|Setting|Option)/
  why: A typing mistake, an indentation, or a key that this version lacks: the lines below name it
  fix: Correct what is named; hydra: +key=value adds a key; HYDRA_FULL_ERROR=1 shows the stack.
  case transformer layer class => FSDP's settings name a class of layers that this model lacks =>
    Set fsdp_transformer_layer_cls_to_wrap to a class that print(model) shows.

launch-container (generic, accuses nobody, unknown): the container did not start, or has no GPU
  /ErrImagePull/ /ImagePullBackOff/ /Back-off pulling image/ /nvidia-container-cli: /
  /could not select device driver .* with capabilities/ /OCI runtime (?:create|exec) failed: /
  /pyxis: container start failed/ /(?:Create|Run)Container(?:Config)?Error/
  /\[ERROR\] (?:pyxis|enroot|runc)[^:]*:/
  why: There is no NVIDIA container toolkit, or a mount, an image or a right is missing
  fix: Read the lines below the message; check the mounts, and what the node has of them.
  case ImagePull|ErrImage|pulling image|manifest => The image could not be fetched => Its name and
    tag, imagePullSecrets; kubectl describe pod POD shows what the registry said.
  case device driver|nvidia-container-cli|nvidia\.com/gpu => The container got no GPU =>
    nvidia-container-toolkit; restart docker; Kubernetes: device plugin and resources.limits.

launch-pod-pending (generic, accuses nobody): no node for a process, so it waits
  /\d+/\d+ nodes are available: (?P<what>.+)/ /No available node types can fulfill (?P<what>.+)/
  /FailedScheduling .*pod group is not ready, (?P<what>.+)/
  why: {what}
  fix: Ask for what the nodes have (GPUs, memory, taints, selectors), use gang scheduling (Kueue,
    Volcano), so that all pods of a job start or none; a longer rendezvous timeout.

launch-pod-crash (teardown, generic): a pod ends again and again
  /CrashLoopBackOff/ /Back-off restarting failed container/ /BackoffLimitExceeded/
  why: Its container exits with an error, and Kubernetes starts it anew
  fix: kubectl logs POD --previous, and explain that.
  case container init- => An init container fails: it waits for the master, or can't be fetched =>
    kubectl logs POD -c its name; kubectl get pods,svc: is the master's pod there, and its service?

launch-ray-actor (lost, generic): a worker of Ray ended, and Ray does not know why
  /The actor died unexpectedly before finishing this task/
  /A worker died or was killed while executing a task by an unexpected system error/
  why: Ray lists guesses: memory, ray stop, a crash. The worker's own log has its last words
  fix: Explain worker-*-PID.err in /tmp/ray/session_latest/logs on its node; memory: fewer workers.
  case K8s pod memory => Ray takes it for killed by the pod's memory limit => kubectl describe pod
    says OOMKilled, if so: raise resources.limits.memory; fewer or smaller workers.
"""

FAMILIES = read_families(_TEXT)
