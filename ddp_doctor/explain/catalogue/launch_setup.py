"""Causes before a process group exists: frameworks, notebooks, containers, pods, settings files."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

_CLUSTER = "needs a cluster; composed from the format string"

CAUSES = (
    Cause(
        code="launch-local-rank-flag",
        title="the script does not know the launcher's --local-rank",
        phrases=(
            r"unrecognized arguments: .*--local[-_]rank",
            r"--local[-_]rank.*(?:unrecognized|no such option|not recognized)",
        ),
        blame=Blame.NOBODY,
        why="torch.distributed.launch gives --local-rank (with a dash since torch 2) to the script",
        fix=Fix(
            plain="Start with torchrun and read os.environ['LOCAL_RANK']; or "
            "parser.add_argument('--local-rank', '--local_rank', type=int).",
        ),
        confirm="The command line in the log has torch.distributed.launch or deepspeed.",
        source="torch/distributed/launch.py",
        test="launch_local_rank_flag",
    ),
    Cause(
        code="launch-arguments",
        title="the command line has an argument that the script does not know",
        phrases=(
            r"error: unrecognized arguments: (?P<what>.+)",
            r"error: the following arguments are required: (?P<what>.+)",
            r"error: argument \S+: (?:invalid|expected) (?P<what>.+)",
            r"ValueError: Some specified arguments are not used by the HfArgumentParser",
        ),
        blame=Blame.NOBODY,
        is_generic=True,
        why="A flag is misspelled, or a flag of the launcher stands behind the script's name",
        fix=Fix(
            plain="Flags of torchrun come before the script's name, those of the script after it."
        ),
        confirm="python train.py --help.",
        source="Python's argparse",
        test="launch_arguments",
    ),
    Cause(
        code="launch-devices",
        title="the launcher's number of processes is not the one that the program was told",
        phrases=(
            r"You set `devices=(?P<what>[^`]+)` in Lightning, but the number of tasks per node",
            r"You set `num_nodes=(?P<what>[^`]+)` in Lightning, but the number of nodes",
            r"the number of tasks per node configured in SLURM .*does not match",
            r"You set `--ntasks=(?P<what>\d+)` in your SLURM bash script",
            r"num_processes \(\d+\) .*does not match",
        ),
        blame=Blame.NOBODY,
        why="Each process asks for other devices or nodes than the launcher started processes for",
        fix=Fix(
            plain="One process per GPU: --ntasks-per-node, --nproc_per_node and the program's own "
            "setting are the same number; --nodes is the number of nodes.",
            lightning="#SBATCH --ntasks-per-node=N (not --ntasks) with Trainer(devices=N, "
            "num_nodes=NODES), started by srun; in an interactive shell of Slurm: "
            "SLURM_JOB_NAME=bash python train.py",
            accelerate="accelerate launch --num_processes (of all nodes) --num_machines",
            suite="the launcher's numbers are the only ones",
        ),
        confirm="env | grep -E 'SLURM_NTASKS|SLURM_NNODES|WORLD_SIZE' in a task.",
        source="lightning/fabric/plugins/environments/slurm.py",
        no_test="Lightning is not a part of the tests of explain; composed from its text",
    ),
    Cause(
        code="launch-notebook",
        title="a notebook can't start the processes like this",
        phrases=(
            r"is not compatible with an interactive environment",
            r"To (?:launch|train) .*(?:from|on) your notebook",
            r"`Accelerator` should only be initialized inside your training function",
            r"CUDA has been initialized before the `notebook_launcher`",
            r"Lightning can't create new processes if CUDA is already initialized",
        ),
        blame=Blame.NOBODY,
        why="The processes are forked from the notebook, so nothing before may have touched CUDA "
        "or made an Accelerator, and functions must be importable",
        fix=Fix(
            plain="Move the training into a file and start it with !torchrun --nproc_per_node=N "
            "train.py; or restart the kernel and touch CUDA inside of the started function only.",
            lightning='Trainer(strategy="ddp_notebook") after a restart of the kernel',
            accelerate="notebook_launcher(train, args, num_processes=N) with the Accelerator made "
            "in train",
        ),
        confirm="The same code in a file works with torchrun.",
        source="accelerate/launchers.py, lightning/pytorch/trainer/connectors",
        no_test="notebooks are not a part of the tests of explain; composed from the texts",
    ),
    Cause(
        code="launch-config",
        title="a settings file or one of its keys is wrong",
        phrases=(
            r"yaml\.(?:scanner|parser|composer|constructor)\.\w+Error",
            r"Could not override '(?P<what>[^']+)'",
            r"Key '(?P<what>[^']+)' is not in struct",
            r"(?:hydra|omegaconf)\.errors\.\w+",
            r"MissingMandatoryValue: (?P<what>.+)",
            r"TOMLDecodeError: (?P<what>.+)",
            r"(?P<what>\d+) validation errors? for \w+",
        ),
        blame=Blame.NOBODY,
        why="A typing mistake, an indentation, or a key that this version of the program does not "
        "have",
        fix=Fix(
            plain="Correct the key or the line that is named; hydra: +key=value adds a new one; "
            "HYDRA_FULL_ERROR=1 shows the stack.",
            suite="mistyped settings get the nearest name (DDP-C01); all of them: "
            "python ddp_training.py --help",
        ),
        confirm="python -c 'import sys, yaml; yaml.safe_load(open(sys.argv[1]))' FILE.",
        source="PyYAML, omegaconf, hydra, pydantic",
        no_test="these packages are not a part of the tests of explain; composed from the texts",
    ),
    Cause(
        code="launch-container",
        title="the container did not start, or has no GPU",
        phrases=(
            r"could not select device driver .* with capabilities",
            r"nvidia-container-cli: (?P<what>.+)",
            r"OCI runtime (?:create|exec) failed: (?P<what>.+)",
            r"CreateContainer(?:Config)?Error",
            r"RunContainerError",
            r"\[ERROR\] (?:pyxis|enroot|runc)[^:]*: ?(?P<what>.+)",
        ),
        blame=Blame.NOBODY,
        why="The container runtime does not know the GPU (no NVIDIA container toolkit), or a "
        "mount, an image or a right is missing",
        fix=Fix(
            plain="Install nvidia-container-toolkit, nvidia-ctk runtime configure, restart docker; "
            "Kubernetes: the device plugin and resources.limits nvidia.com/gpu; check mounts.",
        ),
        confirm="docker run --rm --gpus all IMAGE nvidia-smi.",
        source="docker, nvidia-container-toolkit, Kubernetes",
        no_test=_CLUSTER,
    ),
    Cause(
        code="launch-pod-pending",
        title="Kubernetes found no node for a pod, so its ranks never start",
        phrases=(
            r"\d+/\d+ nodes are available: (?P<what>.+)",
            r"Insufficient nvidia\.com/gpu",
            r"FailedScheduling",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="{what}",
        fix=Fix(
            plain="Ask for what the nodes have (GPUs, memory, taints, selectors), use gang "
            "scheduling (Kueue, Volcano), so that all pods of a job start or none; a longer "
            "rendezvous timeout if nodes are still to come.",
        ),
        confirm="kubectl describe pod POD; kubectl describe nodes | grep -A8 Allocated.",
        source="kube-scheduler",
        no_test=_CLUSTER,
    ),
    Cause(
        code="launch-pod-crash",
        title="a pod ends again and again; this output does not say why",
        phrases=(
            r"CrashLoopBackOff",
            r"Back-off restarting failed container",
        ),
        tier=Tier.TEARDOWN,
        blame=Blame.NOBODY,
        is_generic=True,
        why="Its container exits with an error, and Kubernetes starts it anew",
        fix=Fix(plain="kubectl logs POD --previous, and explain that."),
        confirm="kubectl describe pod POD: Last State, Exit Code.",
        source="kubelet",
        no_test=_CLUSTER,
    ),
    Cause(
        code="launch-ray-actor",
        title="a worker of Ray ended, and Ray does not know why",
        phrases=(
            r"The actor died unexpectedly before finishing this task",
            r"A worker died or was killed while executing a task by an unexpected system error",
            r"Worker unexpectedly exits with a connection error code \d+",
        ),
        tier=Tier.LOST,
        blame=Blame.NOBODY,
        why="Ray lists its guesses with each such message: memory, ray stop, a crash in native "
        "code. What the worker itself wrote is in its own log",
        fix=Fix(
            plain="Read worker-*-PID.err of that pid in /tmp/ray/session_latest/logs on its node, "
            "with explain; memory: fewer workers per node, or more memory per worker.",
        ),
        confirm="dmesg -T | grep -i 'killed process' on the node; ray logs raylet.out -ip HOST.",
        source="Ray, python/ray/exceptions.py",
        no_test="Ray is not a part of the tests of explain; composed from its text",
    ),
    Cause(
        code="launch-lightning",
        title="Lightning refused its settings",
        phrases=(r"MisconfigurationException: (?P<what>.+)",),
        blame=Blame.NOBODY,
        is_generic=True,
        why="Arguments of the Trainer, of the model's hooks or of the environment contradict each "
        "other; the message says which",
        fix=Fix(
            plain="Change what the message names.",
            lightning="Trainer(accelerator, devices, num_nodes, strategy) must be what the "
            "launcher started",
        ),
        confirm="The same message comes with Trainer(fast_dev_run=True).",
        source="lightning/pytorch/utilities/exceptions.py",
        no_test="Lightning is not a part of the tests of explain; composed from its text",
    ),
)
