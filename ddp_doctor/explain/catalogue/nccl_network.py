"""Causes in the network under NCCL: InfiniBand, RoCE, sockets."""

from ddp_doctor.explain.events import Blame, Cause, Fix, Tier

_NO_GPU = "needs NCCL and GPUs; composed from the format string"
_IB = "NCCL src/transport/net_ib"

CAUSES = (
    Cause(
        code="nccl-ib-retry",
        title="an InfiniBand or RoCE connection failed",
        phrases=(
            r"Got completion from peer (?P<peer>\S+) with (?:status=|error )(?P<status>\d+)",
            r"NET/IB ?: .*(?:local catastrophic|Got async event : port error|device fatal)",
            r"IBV_WC_RETRY_EXC_ERR",
            r"IBV_WC_RNR_RETRY_EXC_ERR",
            r"transport retry counter exceeded",
            r"NET/IB : Got async (?:error )?event",
        ),
        tier=Tier.HARDWARE,
        blame=Blame.NOBODY,
        why="A message was not acknowledged after all retries (status 12): a broken cable, port or "
        "switch, a wrong GID index on RoCE, or the other node died",
        fix=Fix(
            plain="ibstat and perfquery on both nodes; exclude the link: NCCL_IB_HCA=^mlx5_2; "
            "RoCE: "
            "NCCL_IB_GID_INDEX=3; network that fails only briefly: NCCL_IB_TIMEOUT=22 "
            "NCCL_IB_RETRY_CNT=13. As a workaround: NCCL_IB_DISABLE=1.",
        ),
        confirm="ib_write_bw between the two nodes over the named port; symbol errors in "
        "perfquery.",
        source=_IB,
        or_else="If the peer's log ends with a crash, the crash is the cause, not the link.",
        no_test="needs InfiniBand; composed from the format string",
    ),
    Cause(
        code="nccl-ib-memory",
        title="InfiniBand could not lock memory",
        phrases=(
            r"Call to ibv_(?:reg_mr|reg_mr_iova2|create_qp|create_cq|alloc_pd)\w* failed",
            r"(?:ibv_reg_mr|ibv_create_cq|ibv_create_qp) failed.*Cannot allocate memory",
        ),
        why="The limit of locked memory is too low (ulimit -l), in a container or under Slurm",
        fix=Fix(
            plain="docker run --ulimit memlock=-1 --ulimit stack=67108864; Kubernetes: capability "
            "IPC_LOCK; Slurm: LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept="
            "MEMLOCK. As a workaround: NCCL_IB_DISABLE=1.",
        ),
        confirm="`ulimit -l` in the job prints unlimited.",
        source="NCCL src/misc/ibvwrap.cc",
        no_test="needs InfiniBand; composed from the format string",
    ),
    Cause(
        code="nccl-interface",
        title="NCCL found no network interface that it can use",
        phrases=(
            r"Bootstrap : no socket interface found",
            r"NET/Socket : no (?:usable )?interface",
            r"NCCL_SOCKET_IFNAME (?:set by|does not match).*",
            r"unable to find (?:any )?(?:suitable|matching) (?:network|interface)",
        ),
        why="NCCL_SOCKET_IFNAME names an interface that this node does not have, or only the "
        "loopback interface is up",
        fix=Fix(
            plain="`ip -br addr` on each node; NCCL_SOCKET_IFNAME=eth0 (or ^docker,lo), the same "
            "for GLOO_SOCKET_IFNAME; or unset both.",
        ),
        confirm="NCCL_DEBUG=INFO prints the interface that it uses.",
        source="NCCL src/bootstrap.cc, src/misc/socket.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-connect",
        title="NCCL could not connect to another rank",
        phrases=(
            r"socketStartConnect: Connect to (?P<peer>\S+) failed",
            r"Call to connect returned (?:Connection refused|No route to host|Connection timed "
            r"out)",
            r"socketPollConnect: .*(?:timeout|timed out|No route|exceeded)",
            r"connect to (?P<peer>[\d.]+<\d+>) returned",
        ),
        tier=Tier.LOST,
        blame=Blame.NOBODY,
        why="The address that the other rank announced can't be reached: a firewall between the "
        "nodes, an interface of docker or of another network, or the other rank ended",
        fix=Fix(
            plain="NCCL_SOCKET_IFNAME=the interface of the cluster's network; open all ports "
            "between the nodes; containers: --network=host.",
        ),
        confirm="nc -zv PEER PORT from this node; the peer's address is not of docker0.",
        source="NCCL src/misc/socket.cc",
        no_test=_NO_GPU,
    ),
    Cause(
        code="nccl-efa",
        title="AWS's network plug-in of NCCL (EFA, libfabric) failed",
        phrases=(
            r"NCCL WARN NET/OFI (?P<what>(?:Couldn't|Creating|Request \S+ completed with error).*)",
            r"NCCL WARN NET/OFI (?P<what>.*(?:RC: -\d+|failed: ).*)",
        ),
        blame=Blame.NOBODY,
        why="libfabric refused an address, an endpoint or a transfer: the security group does not "
        "allow all traffic within itself, the instance has no EFA, or versions do not fit",
        fix=Fix(
            plain="A security group with all traffic from and to itself; "
            "FI_PROVIDER=efa with the installer's libfabric and aws-ofi-nccl; containers: "
            "--device /dev/infiniband; without EFA: FI_PROVIDER=tcp, or remove the plug-in.",
        ),
        confirm="fi_info -p efa on each node; NCCL_DEBUG=INFO says NET/OFI Selected Provider.",
        source="aws-ofi-nccl src/nccl_ofi_net.c",
        no_test=_NO_GPU,
    ),
)
