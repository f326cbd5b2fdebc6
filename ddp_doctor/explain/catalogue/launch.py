"""Causes in the launch: environment, rendezvous, ports, torchrun, elastic, Kubernetes."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

_RDZV = "torch/distributed/rendezvous.py"
_STORE = "torch/csrc/distributed/c10d/TCPStore.cpp, socket.cpp"
_ELASTIC = "torch/distributed/elastic/rendezvous"

CAUSES = (
    Cause(
        code="launch-environment",
        title="the variables of a launcher are missing",
        phrases=(
            r"environment variable (?P<name>\w+) expected, but not set",
            r"KeyError: '(?P<name>LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_WORL"
            r"D_SIZE)'",
        ),
        blame=Blame.NOBODY,
        why="The script was started with python, not with a launcher, or the launcher (srun, "
        "mpirun) sets other names than torch reads",
        fix=Fix(
            plain="torchrun --standalone --nproc_per_node=2 train.py. srun: RANK=$SLURM_PROCID "
            "LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS and MASTER_ADDR, MASTER_PORT.",
            accelerate="accelerate launch train.py",
            suite="torchrun, srun or launchers/run_with_mpirun.py",
            lightning='Trainer(devices=N, strategy="ddp") starts the ranks itself when the '
            "script is started by python",
        ),
        confirm="env | grep -E 'RANK|WORLD|MASTER' in the process.",
        source=_RDZV,
        test="launch_environment",
    ),
    Cause(
        code="launch-port",
        title="the port of the rendezvous is taken",
        phrases=(
            r"EADDRINUSE",
            r"[Aa]ddress already in use",
            r"The server socket has failed to (?:bind|listen)",
        ),
        blame=Blame.NOBODY,
        why="Another job on this node, or a process left over from an earlier one, listens there",
        fix=Fix(
            plain="torchrun --standalone (takes a free port), or another --master_port; find the "
            "owner: ss -ltnp | grep PORT, then kill it by its pid.",
            accelerate="accelerate launch --main_process_port 0",
            suite="--standalone before the script's name",
            lightning="MASTER_PORT=29511 python train.py",
        ),
        confirm="ss -ltnp | grep PORT.",
        source=_STORE,
        test="launch_port",
    ),
    Cause(
        code="launch-client-timeout",
        title="the rendezvous address could not be reached in time",
        phrases=(
            r"The client socket has (?:timed out after|failed to connect to) "
            r".*?\(?(?P<host>[\w.:-]+), "
            r"(?P<port>\d+)\)",
            r"The client socket has (?:timed out|failed to connect to any network address)",
            r"The IPv[46] network addresses of \((?P<host>[^,]+), (?P<port>\d+)\) cannot be "
            r"retrieved",
            r"failed to connect to (?P<host>[\w.-]+):(?P<port>\d+)",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="The first node did not start, its name resolves to another address, or a firewall "
        "drops the packets; or rank 0 ended already",
        fix=Fix(
            plain="On the node: getent hosts NAME and nc -zv NAME PORT; use the address of the "
            "cluster's network; open the port; start all nodes within the timeout. Read rank 0's "
            "log first.",
            lightning="Trainer(num_nodes=NODES), started once per node with the same "
            "MASTER_ADDR and its own NODE_RANK, or by srun",
            accelerate="accelerate launch --main_process_ip HOST --main_process_port PORT "
            "--machine_rank I, another I on each machine",
        ),
        confirm="nc -zv HOST PORT from the node that prints it, while rank 0 waits.",
        source=_STORE,
        test="launch_client_timeout",
    ),
    Cause(
        code="launch-ranks-missing",
        title="not all ranks joined the rendezvous",
        phrases=(
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. "
            r"(?P<here>\d+)/(?P<all>\d+) "
            r"clients joined",
            r"Timed out initializing process group in store based barrier on rank: \d+.*"
            r"\(world_size=(?P<all>\d+), (?:worker_count|num_workers_joined)=(?P<here>\d+)",
            r"RuntimeError: Wait timeout",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="Some ranks ended before, were started late, or never; or world_size is larger than "
        "the "
        "number of processes",
        fix=Fix(
            plain="Look for the ranks without this message: their logs have the cause. Check "
            "--nnodes and --nproc_per_node on each node.",
            suite="the ranks that never joined are named (DDP-G01)",
            lightning="Trainer(num_nodes=NODES) on every node, devices equal everywhere",
            accelerate="--num_machines, --num_processes (of all machines together) and "
            "another --machine_rank on each",
        ),
        confirm="Count the processes: pgrep -fc train.py on each node.",
        source=_STORE,
        test="launch_ranks_missing",
    ),
    Cause(
        code="launch-rendezvous",
        title="torchrun's rendezvous failed",
        phrases=(
            r"RendezvousTimeoutError",
            r"RendezvousConnectionError",
            r"RendezvousClosedError",
            r"RendezvousStateError",
            r"The connection to the C10d store has failed",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="Fewer nodes than --nnodes came within the timeout, the endpoint is wrong, or another "
        "job with the same --rdzv_id is over already",
        fix=Fix(
            plain="The same --rdzv_endpoint HOST:PORT and a fresh --rdzv_id on all nodes; HOST is "
            "one of the nodes; its port is open; --rdzv_conf join_timeout=1200 for slow starts.",
        ),
        confirm="nc -zv HOST PORT from the other nodes.",
        source=_ELASTIC,
        test="launch_rendezvous",
    ),
    Cause(
        code="launch-name",
        title="a host name can't be resolved",
        phrases=(
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"nodename nor servname provided, or not known",
            r"getaddrinfo failed",
        ),
        blame=Blame.NOBODY,
        why="MASTER_ADDR or the endpoint is a name that this node's DNS or /etc/hosts does not "
        "have",
        fix=Fix(
            plain="Use the address, or a name that getent hosts finds on all nodes; Slurm: "
            "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1); Kubernetes: a "
            "headless service.",
        ),
        confirm="getent hosts NAME on that node.",
        source="the C library's getaddrinfo",
        test="launch_name",
    ),
    Cause(
        code="launch-route",
        title="a node can't be reached over the network",
        phrases=(
            r"No route to host",
            r"Network is unreachable",
            r"errno: 113\b",
        ),
        tier=Tier.TIMEOUT,
        blame=Blame.NOBODY,
        why="A firewall that rejects, or the wrong network interface or address",
        fix=Fix(
            plain="ping and nc -zv between the nodes; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "
            "open the ports.",
        ),
        confirm="nc -zv HOST PORT.",
        source="Linux errno 101, 113",
        test="launch_route",
    ),
    Cause(
        code="launch-no-group",
        title="the process group was used before it was made",
        phrases=(r"Default process group has not been initialized",),
        blame=Blame.NOBODY,
        why="DDP, DistributedSampler or a collective ran before init_process_group, or after "
        "destroy_process_group, or in a process without a group",
        fix=Fix(
            plain="torch.distributed.init_process_group() first in main(); in code that runs in "
            "one process, too: if dist.is_initialized().",
            accelerate="make the Accelerator() first",
            lightning="no torch.distributed call before fit(); in hooks "
            "self.trainer.strategy.barrier()",
        ),
        confirm="The line in the traceback runs before init_process_group.",
        source="torch/distributed/distributed_c10d.py",
        test="launch_no_group",
    ),
    Cause(
        code="launch-group-twice",
        title="the process group was made twice",
        phrases=(r"trying to initialize the default process group twice",),
        blame=Blame.NOBODY,
        why="The program and a library (Lightning, Accelerate) both call init_process_group, or a "
        "notebook cell ran again",
        fix=Fix(
            plain="if not dist.is_initialized(): dist.init_process_group(...)",
            lightning="no init_process_group of your own",
            accelerate="no init_process_group of your own; InitProcessGroupKwargs for its "
            "arguments",
        ),
        confirm="Search for init_process_group in the program.",
        source="torch/distributed/distributed_c10d.py",
        test="launch_group_twice",
    ),
    Cause(
        code="launch-spawn-guard",
        title="a process was started while its module was still being imported",
        phrases=(
            r"An attempt has been made to start a new process before the\s*",
            r"current process has finished its bootstrapping phase",
        ),
        blame=Blame.NOBODY,
        why="spawn imports the script again in each process: code outside of functions runs there, "
        "too",
        fix=Fix(plain="if __name__ == '__main__': main() at the end of the script."),
        confirm="The script calls mp.spawn or iterates a DataLoader at top level.",
        source="Python's multiprocessing/spawn.py",
        test="launch_spawn_guard",
    ),
    Cause(
        code="launch-import",
        title="a package is missing or does not fit",
        phrases=(
            r"ModuleNotFoundError: No module named '(?P<name>[^']+)'",
            r"ImportError: (?P<what>.+)",
            r"operator torchvision::nms does not exist",
            r"undefined symbol: (?P<name>\S+)",
            r"version `(?P<name>GLIBC\w*_[\d.]+)' not found",
        ),
        why="This node or this Python has other packages than the one where it worked, or a binary "
        "package was built for another torch",
        fix=Fix(
            plain="Same environment on all nodes; reinstall the package for this torch; torchrun "
            "of the same environment: python -m torch.distributed.run.",
            suite="setup.sh again; what still differs: python ddp_training.py doctor",
        ),
        confirm="python -c 'import NAME' on the node of this rank.",
        source="Python's import system, the dynamic linker",
        test="launch_import",
    ),
    Cause(
        code="launch-rank-range",
        title="rank and world size contradict each other",
        phrases=(
            r"(?:rank|Rank) (?P<rank>\d+) .*(?:must be|is not|out of).*world[_ ]size",
            r"[Ii]nvalid rank (?P<rank>\d+), rank should be in the interval",
            r"world_size \((?P<world>\d+)\) (?:is not equal to|does not match)",
        ),
        blame=Blame.NOBODY,
        why="RANK and WORLD_SIZE were set by hand, or num_replicas and rank given to the sampler "
        "are not those of the group",
        fix=Fix(
            plain="Let the launcher set them: torchrun --nnodes N --nproc_per_node M.",
            accelerate="--machine_rank from 0 to num_machines - 1",
        ),
        confirm="print RANK and WORLD_SIZE of each process.",
        source=_RDZV,
        test="launch_rank_range",
    ),
)
