"""Causes in gloo and in the connections between ranks."""

from ddp_doctor.explain.events import Blame, Cause, Tier

CAUSES = (
    Cause(
        code="lost-peer",
        title="the connection to another rank was lost",
        phrases=(
            r"Connection reset by peer",
            r"Connection closed by peer",
            r"Broken pipe",
            r"(?:recvValue|sendBytes|recvBytes|recvVector) failed on SocketImpl",
            r"[Ff]ailed to recv, got 0 bytes",
            r"Application timeout caused pair closure",
            r"Failed to check the \"should dump\" flag on TCPStore",
            r"[Cc]onnection was likely closed",
            r"DDP-G04\]",
            r"Failed to meet rendezvous",
        ),
        tier=Tier.LOST,
        why="The rank at the other end ended, so this message is a consequence: the cause is in "
        "that rank's log",
        fix="Find the rank that ended first: torchrun --log-dir logs --tee 3 keeps one log per "
        "rank. No message there: it was killed (memory, scheduler).",
    ),
    Cause(
        code="gloo-timeout",
        title="a collective of gloo did not finish in time",
        phrases=(
            r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
            r"Operation timed out!",
            r"wait timeout after \d+ms, keys: ",
            r"Socket Timeout",
        ),
        tier=Tier.TIMEOUT,
        why="The ranks that print this wait for one that did not come: it hangs, is slow, took "
        "another branch, or has fewer batches",
        fix="py-spy dump each rank while it hangs. Equal numbers of batches per rank, no "
        "collective under `if rank == 0`; init_process_group(timeout=...) if one rank is slow.",
        accelerate="InitProcessGroupKwargs(timeout=...)",
        trainer="TrainingArguments(ddp_timeout=...)",
        lightning="DDPStrategy(timeout=timedelta(hours=1))",
        confirm="dist.monitored_barrier() in its place names the ranks that are missing.",
    ),
    Cause(
        code="gloo-barrier",
        title="ranks did not reach a barrier in time",
        phrases=(r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass monitoredBarrier in \d+ ms",),
        tier=Tier.TIMEOUT,
        blame=Blame.NAMED,
        why="The named ranks did not reach the barrier: they crashed, hang, are slow, or took "
        "another branch",
        fix="Read the end of their logs; py-spy dump them; the barrier must be reached by all "
        "ranks.",
    ),
    Cause(
        code="gloo-barrier-rank0",
        title="rank 0 did not reach a barrier",
        phrases=(
            r"successfully reached monitoredBarrier, but received errors while waiting for "
            r"(?:send/)?recv from rank (?P<ranks>\d+)",
        ),
        tier=Tier.LOST,
        why="Rank 0 collects the barrier. It may have failed because another rank did not come: "
        "its own log says which",
        fix="Read rank 0's log: it names the ranks that failed to pass the barrier.",
    ),
    Cause(
        code="gloo-connect",
        title="gloo could not connect all ranks",
        phrases=(
            r"gloo/transport/tcp/pair\.cc:\d+\] no error",
            r"Gloo connectFullMesh failed with ",
            r"timed out connecting: ",
            r"SO_ERROR: Connection refused",
            r"connect \[[^\]]+\]: (?:Connection refused|No route to host|Connection timed out)",
        ),
        tier=Tier.TIMEOUT,
        why="gloo announces the address of the host's own name. If /etc/hosts maps it to "
        "127.0.1.1, or it belongs to another network, the others can't connect; or a rank ended",
        fix="GLOO_SOCKET_IFNAME=eth0 (the cluster's interface) on all nodes; one line for the node "
        "in /etc/hosts with its real address.",
        confirm="getent hosts $(hostname) gives an address that the other nodes can reach.",
    ),
    Cause(
        code="gloo-interface",
        title="gloo found no network interface that it can use",
        phrases=(
            r"Unable to find address for: ",
            r"Unable to find interface ",
            r"interface or hostname can't be empty",
            r"[Uu]nable to resolve hostname to a \(local\) address",
            r"makeDeviceFor(?:Hostname|Interface)\(\): unsupported gloo device",
        ),
        blame=Blame.NOBODY,
        why="GLOO_SOCKET_IFNAME names an interface that this node does not have, or its host name "
        "has no address here",
        fix="`ip -br addr` lists the interfaces; set GLOO_SOCKET_IFNAME, or unset it; add the "
        "host's name to /etc/hosts.",
        confirm="ip -br addr show NAME on that node.",
    ),
    Cause(
        code="gloo-unsupported",
        title="gloo can't do this operation or type",
        phrases=(
            r"Invalid scalar type",
            r"ProcessGroupGloo .*(?:not support|does not support)",
            r"Backend gloo does not (?:support|implement)",
            r"does not support (?:reduce_scatter|alltoall\w*|_reduce_scatter_base)",
            r"argument \w+ not supported for the selected backend gloo",
            r"Cannot use ReduceOp\.\w+ with Gloo",
        ),
        blame=Blame.NOBODY,
        why="gloo has fewer operations and types than NCCL: no AVG, no bool in some, no "
        "reduce_scatter in older versions",
        fix="SUM and a division instead of AVG; another dtype; nccl for GPU tensors.",
        confirm="The same operation works with nccl.",
    ),
    Cause(
        code="group-shapes",
        title="the tensors of a collective do not fit",
        phrases=(
            r"Split sizes doesn't match total dim 0 size",
            r"Tensors must be contiguous",
            r"Invalid function argument\. Expected parameter `\w+`",
            r"(?:in|out)put tensor (?:size )?must be (?:equal to|the same size as) .*world[_ ]size",
            r"output tensor must have the same type as input tensor",
            r"invalid tensor (?:size|type|layout) at index \d+",
        ),
        why="Size, layout or type of a list of tensors is not what the operation needs",
        fix=".contiguous(); one output per rank; world_size * input size for gather.",
        confirm="print shapes and strides before the call on each rank.",
    ),
    Cause(
        code="group-rank",
        title="a collective was given a rank that is not in its group",
        phrases=(
            r"(?:Group rank|Global rank) \d+ is not part of group",
            r"invalid root rank: -?\d+",
            r"The given group does not exist",
        ),
        why="src, dst or root is a global rank; or new_group was called by some ranks only",
        fix="Every rank calls new_group in the same order, also those not in it; src is the global "
        "rank (group_src= for the rank in the group).",
        confirm="print(dist.get_process_group_ranks(group)).",
    ),
    Cause(
        code="gloo-ddp-outlives-group",
        title="DDP was the last to hold the process group, and its end waits for ever",
        phrases=(r"c10d::Reducer::~Reducer",),
        tier=Tier.TIMEOUT,
        why="The program has finished: the DDP model is freed after destroy_process_group(). Its "
        "destructor waits for a thread of gloo and keeps the GIL, which that thread needs in order "
        "to free a tensor of its last collective",
        fix="del model (the DDP wrapper) before dist.destroy_process_group(); or train in a "
        "function of its own, and destroy the group after it has returned.",
        confirm="py-spy dump --native: the main thread is in std::thread::join, a thread of gloo "
        "in gil_scoped_acquire.",
    ),
    Cause(
        code="gloo-destroy-hang",
        title="a process waits in the destructor of its process group",
        phrases=(
            r"distributed_c10d\.py\", line \d+ in (?:_?destroy_process_group|_shutdown_backend)",
            r"(?:destroy_process_group|_shutdown_backend) \(.*distributed_c10d\.py:\d+\)",
            r"ProcessGroupGloo::~ProcessGroupGloo",
            r"gloo::transport::tcp::Pair::~Pair",
            r"gloo::transport::tcp::Device::~Device",
        ),
        tier=Tier.TEARDOWN,
        why="The stack of a process that has finished its work: it closes its connections and "
        "waits for a rank that has stopped, or still trains",
        fix="dist.barrier() before dist.destroy_process_group(), so that all ranks leave together; "
        "os._exit(0) after the last save, where a rank that does not answer must not hold up the "
        "others.",
        confirm="py-spy dump of the other ranks: one is stopped (state T in ps) or still trains.",
    ),
    Cause(
        code="gloo-detail-crash",
        title="TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo",
        phrases=(r"parallel/distributed\.py\", line \d+ in _ddp_init_helper",),
        tier=Tier.ADVICE,  # a cause only where the process crashed: verdict.py
        blame=Blame.NOBODY,
        why="The process crashes in native code while DDP is made, on all ranks alike: torch 2.13 "
        "does so with gloo and TORCH_DISTRIBUTED_DEBUG=DETAIL",
        fix="export TORCH_DISTRIBUTED_DEBUG=INFO (it names unused parameters, too); DETAIL with "
        "the nccl backend only.",
        confirm="echo $TORCH_DISTRIBUTED_DEBUG; the crash is gone with INFO.",
        or_else="DETAIL is not set: torch and an extension of it don't fit together.",
    ),
)
