"""Causes in NCCL: timeouts, connections, network, set-up, and what only says that it failed."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[NCCL: timeouts and connections]

nccl-timeout (timeout): a collective of NCCL did not finish in time
  /Watchdog caught collective operation timeout: *(?:WorkNCCL\(|$)/
  /Work WorkNCCL\(.* timed out in blocking wait/ /Timeout at collective: \w+, #\d+/
  /Timeout at NCCL work: \d+, last enqueued NCCL work/
  /Received a dump signal due to a collective timeout from +(?:this local )?rank/
  why: The ranks that print this wait for one that did not come: it crashed, hangs, is slow (data,
    evaluation, a save on rank 0 alone), took another branch, or has fewer batches
  fix: Look at the log of the missing rank. No collective (DDP forward, barrier, all_reduce) under
    `if rank == 0`; equal numbers of batches per rank (DistributedSampler, or with model.join());
    long work of one rank: init_process_group(timeout=timedelta(hours=1)).
  lightning: DDPStrategy(timeout=timedelta(hours=1)); log with sync_dist only on all ranks
  accelerate: InitProcessGroupKwargs(timeout=timedelta(hours=1)); gather on all ranks
  trainer: TrainingArguments(ddp_timeout=3600)
  confirm: TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, and give explain the dumps.
  case Timeout at NCCL work: 1\b|SeqNum=1\b|collective: \w+, #1\b => It is the group's first
    collective, so nothing was exchanged yet: the GPUs can't reach each other, or a rank is late =>
    NCCL_DEBUG=INFO; as a trial NCCL_P2P_DISABLE=1 (then IOMMU, ACS off); nodes: NCCL_SOCKET_IFNAME;
    read the log of a rank that prints nothing.

collective-missing (timeout, accuses named): a rank did not reach a collective
  /\[(?P<ranks>\d+(?:, ?\d+)*)\] finished collective #\d+.*but didn't join collective #\d+/
  /\[(?P<ranks>\d+(?:, ?\d+)*)\] didn't (?:join|enter) collective/
  /[Mm]issing ranks: \[?(?P<ranks>\d+(?:, ?\d+)*)/
  /Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass monitoredBarrier in \d+ ms/
  /submitted to be reduced, gathered or broadcasted by subset of ranks/
  why: The report names it: it crashed, hangs, is slow, or branched
  fix: Read its log; py-spy dump. No collective under `if rank == 0`; equal numbers of batches.

collective-mismatch (mismatch, likely): the ranks called different collectives
  /Impossible to apply the desired operation due to inadequate shapes/
  /Detected mismatch between collectives on ranks/ /[Cc]ollective (?:mismatch|sequence mismatch)/
  /Mismatch between collective operation types across ranks/ /op\.preamble\.length <= op\.nbytes/
  /Received data size doesn't match expected size\. Is there a distributed collective mismatch/
  /Some ranks called different collectives/ /disagreement between rank\d+ and rank\d+:/
  /Mismatched collective detected/ /Cannot apply desired operation due to shape mismatches/
  why: At one point one rank ran another operation, or the same one with another size or type: a
    collective under a condition that differs, unequal batches, or sizes in all_gather
  fix: Take collectives out of conditions that differ between ranks; pad tensors to one length
    before all_gather (gather the lengths first); same order of calls everywhere.
  accelerate: accelerator.pad_across_processes(tensor, dim=1) before gather
  confirm: TORCH_DISTRIBUTED_DEBUG=DETAIL on nccl names both operations (on gloo it crashes 2.13).

nccl-duplicate-gpu (accuses nobody): two ranks use the same GPU
  /Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device/
  /Multiple CUDA devices? (?:found|used) for rank/
  why: The processes did not choose their own device, so they all took GPU 0, or
    CUDA_VISIBLE_DEVICES is wrong, or there are more ranks than GPUs
  fix: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group and before any
    .cuda(); --nproc_per_node at most the number of GPUs. MIG: slices of one GPU count as one; gloo.

nccl-remote-error (lost): NCCL lost the connection to another rank
  /ncclRemoteError: A call failed possibly due to a network error or a remote process/
  /[Cc]onnection closed by remote peer/ /socketProgress.*(?:closed|reset)/
  /NCCL error: remote process exited or there was a network error/
  /socketPollConnect.*(?:ECONNREFUSED|refused)/ /Socket recv failed while polling for opId/
  /Call to recv from .* failed : Connection (?:reset|timed out)/
  why: A rank that this one talks to ended, or the network between them failed
  fix: The rank that ended first (see its log) is the cause; if none: network, NCCL_SOCKET_IFNAME.

nccl-version (mismatch): the ranks use different versions of NCCL
  /[Mm]ismatched NCCL version detected/ /NCCL version mismatch/
  /Invalid config \w+ attribute value -2147483648/
  why: Nodes have other wheels of torch, or LD_LIBRARY_PATH or LD_PRELOAD puts another libnccl first
  fix: One image on all nodes; unset LD_LIBRARY_PATH; compare torch.cuda.nccl.version() on each.

nccl-shm (accuses nobody): NCCL could not use /dev/shm
  /Error while (?:creating|attaching to) shared memory segment /
  /Error: failed to extend /dev/shm/nccl\S+ to \d+ bytes/
  /Call to posix_fallocate failed : No space left on device/
  why: NCCL passes data between GPUs of one node in shared memory; containers have 64 MB by default
  fix: docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium Memory mounted at
    /dev/shm; remove stale /dev/shm/nccl-* files; or NCCL_SHM_DISABLE=1 (slower).

nccl-missing (accuses nobody): NCCL was asked for on a torch or a machine without it
  /Distributed package doesn't have NCCL built in/ /The NCCL backend requires GPUs/
  /ProcessGroupNCCL is only supported with GPUs, no GPUs found/
  /Backend nccl is not (?:available|supported)/
  why: This torch is a CPU build (or one for Windows or macOS), or no GPU is visible
  fix: gloo (on Windows always, or WSL); on Linux with a GPU: torch with CUDA, nvidia-smi.

nccl-wrong-device-tensor: a collective got a tensor on the wrong device
  /No backend type associated with device type (?:cpu|cuda)/ /Tensors must be CUDA and dense/
  why: A group of NCCL moves GPU tensors only, and one of gloo in some operations only the CPU's
  fix: tensor.to(device); or init_process_group('cpu:gloo,cuda:nccl'); torch.cuda.set_device first.
  case nn/parallel/distributed\.py|_sync_module_states|_verify => The model is not on a GPU yet =>
    torch.cuda.set_device(local_rank) and model.to(local_rank) before DDP(model), not behind it.

nccl-store-get (timeout, accuses named): rank 0 did not announce its NCCL id
  /is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<ranks>\d+)\]/
  /retreiving ncclUniqueId from \[(?P<ranks>\d+)\]/
  why: The rank in `from [..]` makes the id; it ended or did not get there; who prints this waits
  fix: Read the log of the named rank: it crashed, or it does work alone before its first collective
    (download, preprocessing, a prompt of wandb). A longer wait: init_process_group(timeout=...).

nccl-heartbeat (timeout): NCCL's watchdog thread got stuck
  /[Hh]eartbeat monitor timed out/ /ProcessGroupNCCL's watchdog got stuck for \d+ seconds/
  why: A call of CUDA or NCCL does not return, or holds the GIL: a hung GPU or driver, an abort
  fix: Look for an Xid in dmesg, an earlier timeout; if slow: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800

[NCCL: network]

nccl-ib-retry (hardware, accuses nobody): an InfiniBand or RoCE connection failed
  /Got completion from peer \S+ with (?:status=|error )(?!4\b|10\b)\d+/
  /NET/IB ?: .*(?:local catastrophic|Got async (?:error )?event|device fatal)/
  /IBV_WC_(?:RNR_)?RETRY_EXC_ERR/ /transport retry counter exceeded/
  why: A broken cable, port or switch, a wrong GID index on RoCE, or the other node died: after all
    retries there was no answer (status 12; 5 only follows from another failure)
  fix: ibstat, perfquery on both nodes; to leave a link out: NCCL_IB_HCA=^mlx5_2; RoCE:
    NCCL_IB_GID_INDEX=3; if brief: NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=13; or NCCL_IB_DISABLE=1.
  case gloo/transport/ibverbs|UCX +ERROR => A connection of gloo or UCX over InfiniBand or RoCE had
    no answer: NCCL's settings do not count => ibstat on both nodes; gloo over TCP, UCX_TLS=tcp.
  or_else: If the peer's log ends with a crash, the crash is the cause, not the link.

nccl-ib-queue (generic, accuses nobody): InfiniBand or RoCE could not set up a queue to a peer
  /Call to ibv_modify_qp failed/ /Failed to modify QP to RTR/
  why: The GID index is not the network's (RoCE), or the container or peer has not that network
  fix: show_gids; NCCL_IB_GID_INDEX=3; docker --network=host; NCCL_IB_HCA=adapters of one network.

nccl-ib-gpu-memory (accuses nobody): InfiniBand could not use the memory of a GPU
  /Got completion from peer \S+ with (?:status=|error )(?:4|10)\b/
  /Call to ibv_reg_(?:dmabuf_)?mr\w* failed with error (?:Bad address|Invalid arg)/
  why: GPUDirect RDMA fails: no nvidia_peermem, no dma-buf in the driver, or IOMMU or ACS is on
  fix: modprobe nvidia_peermem on each node; NCCL_NET_GDR_LEVEL=LOC goes by the host's memory.
  or_else: It fails with NCCL_NET_GDR_LEVEL=LOC, too: the adapter's driver or firmware.

nccl-ib-memory: InfiniBand could not lock memory
  /Call to ibv_(?:reg_mr(?!.* (?:Bad addr|Invalid))|create_[cq][pq]|alloc_pd)\w* failed/
  /Please set max locked memory/
  why: The limit of locked memory is too low (ulimit -l), in a container or under Slurm
  fix: docker run --ulimit memlock=-1 --ulimit stack=67108864; Kubernetes: capability IPC_LOCK;
    Slurm: LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK.
  or_else: `ulimit -l` in the job says unlimited: the adapter's own limits, or its driver.

nccl-interface (likely): NCCL found no network interface that it can use
  /Bootstrap : no socket interface found/ /NET/Socket : no (?:usable )?interface/
  /NCCL_SOCKET_IFNAME does not match/ /Failed to initialize any NET plugin/
  /unable to find (?:any )?(?:suitable|matching) (?:network|interface)/
  /ncclSocketInit: connecting to address .* neither AF_INET/
  why: NCCL_SOCKET_IFNAME or NCCL_NET names what this node does not have, or only loopback is up
  fix: `ip -br addr` on each node; NCCL_SOCKET_IFNAME=eth0 (or ^docker,lo); or unset them.

nccl-connect (lost): NCCL could not connect to another rank
  /Connect to \S+<\d+> failed/ /socketPollConnect: .*(?:timeout|timed out|No route|exceeded)/
  /Call to connect (?:returned|failed :) (?:Connection (?:refused|timed out)|No route to host)/
  /connect to [\d.]+<\d+> returned/
  /Unresponsive receiver \(reachable by EFA device but handshake failed\)/
  why: The address that the other rank announced can't be reached: a firewall between the nodes, an
    interface of docker or of another network, or the other rank ended
  fix: NCCL_SOCKET_IFNAME=the interface of the cluster's network; open all ports between the nodes;
    containers: --network=host; EFA: a security group that lets all traffic to itself in and out.

[NCCL: general words and set-up]

nccl-cuda-error (generic, unknown): a CUDA call inside NCCL failed
  /ncclUnhandledCudaError: Call to CUDA function failed/
  /NCCL (?:error in: |failure |Error \d+: ).*unhandled cuda error/
  /NCCL WARN Cuda failure (?:\d+ )?'?[a-zA-Z]/
  why: CUDA failed in a call of NCCL: no memory left for its buffers, or an earlier kernel's error
  fix: NCCL_DEBUG=INFO; leave 1 GB per GPU free (smaller batch); CUDA_LAUNCH_BLOCKING=1.
  case 'invalid (?:arg|resource)|mapping of buf|\bpeer (?:access|mapping) => The GPUs could not open
    each other's memory, or driver, CUDA and NCCL do not fit => NCCL_P2P_DISABLE=1 and
    NCCL_CUMEM_ENABLE=0 as trials; torch.cuda.set_device(LOCAL_RANK) first; a newer driver.

nccl-system-error (lost, generic, accuses nobody, unknown): a system call inside NCCL failed
  /ncclSystemError: System call \(e\.g\. socket, malloc\)/ /unhandled system error/
  /NCCL WARN Call to \w+ (?:returned|failed)/
  /NCCL WARN NET/OFI .*(?:Couldn't|Creating|completed with error|RC: -\d+|failed: )/
  why: A socket, shared memory or a plug-in failed; `Last error` or the first NCCL WARN says which
  fix: NCCL_DEBUG=INFO. Network: NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1. ulimit -l unlimited, -n
    65536.
  case NET/OFI|\bEFA\b => The plug-in for AWS's network failed => A security group with all traffic
    from and to itself; FI_PROVIDER=efa, or tcp without EFA; a plug-in that fits this NCCL.
  case ibv_|NET/IB => A call of InfiniBand or RoCE failed => ibstat; NCCL_IB_HCA of one network,
    NCCL_IB_GID_INDEX; ulimit -l unlimited; NCCL_IB_DISABLE=1 as a trial.
  case shm|shared memory => /dev/shm is full or too small => docker run --shm-size=8g or --ipc=host.

nccl-internal-error (lost, generic, accuses nobody): NCCL failed an internal check
  /ncclInternalError: Internal check failed/ /internal error.*NCCL (?:version|developers)/
  /NCCL Error \d+: internal error/
  why: Often the ranks see different GPUs or networks: a topology file, MIG, containers, a plug-in
  fix: Unset NCCL_TOPO_FILE and NCCL_NET_PLUGIN; NCCL_DEBUG=INFO; a newer NCCL.

nccl-invalid-usage (generic, accuses nobody): NCCL was used in a way that it does not allow
  /ncclInvalidUsage: This usually reflects invalid usage of NCCL library/
  /ncclInvalidArgument: Invalid value for an argument/
  /NCCL (?:error in|Error \d+): .*invalid (?:usage|argument)/
  why: Most often two ranks have the same GPU, or ranks disagree on number, type or root
  fix: torch.cuda.set_device(LOCAL_RANK) before init_process_group; one rank per GPU or MIG slice.

nccl-aborted (teardown): NCCL's communicator was aborted
  /NCCL [Cc]ommunicator (?:was )?aborted/ /Process group watchdog thread terminated with exception/
  /To avoid data inconsistency, we are taking the entire process down/
  why: An earlier error or timeout ended the communicator; this only follows from it
  fix: Look further up, and in the logs of the other ranks, for the first error.

nccl-p2p (accuses nobody): direct access between GPUs does not work on this machine
  /peer mapping resources exhausted/ /P2P is disabled between NVLINK connected GPUs/
  /transport\/p2p\.cc:\d+ NCCL WARN Cuda failure(?: \d+)? '(?:invalid arg|mapping of buf)/
  /PCI ACS is enabled/ /series doesn't support faster communication/
  /peer access is not supported between these two devices/
  why: PCIe's access control (ACS), the IOMMU, a virtual machine, or too many peers block it
  fix: NCCL_P2P_DISABLE=1 (shm.cc: NCCL_SHM_DISABLE=1, too); then no ACS and IOMMU in the BIOS.
  case series doesn't => These cards have no P2P, and Accelerate refuses to start =>
    NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1; accelerate launch sets both.
  or_else: It changes nothing: the lines of NCCL before it name another failure.

nccl-nvml (hardware, generic): the NVIDIA driver can't be asked about its GPUs
  /nvml(?:Init|DeviceGet)\w*\(?\)? failed/ /undefined symbol: nvml\w+/ /Failed to initialize NVML: /
  why: The driver was updated without a reboot, is too old, or the container lost its GPUs
  fix: Reboot the node, or reload the driver's modules. Container: start it again; docker: --device
    /dev/nvidiactl ..., or the cgroup driver systemd fix of NVIDIA.
"""

FAMILIES = read_families(_TEXT)
