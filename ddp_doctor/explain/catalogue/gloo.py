"""Causes in gloo and in the connections between ranks."""

from ddp_doctor.explain.catalogue.entries import read_families

_TEXT = r"""
[gloo and connections]

lost-peer (lost): the connection to another rank was lost
  /Connection (?:reset|closed) by peer/ /Broken pipe/ /[Ff]ailed to recv, got 0 bytes/ /DDP-G04\]/
  /(?:recvValue|sendBytes|recvBytes|recvVector) failed on SocketImpl/ /Failed to meet rendezvous/
  /Application timeout caused pair closure/ /Failed to check the \"should dump\" flag on TCPStore/
  /[Cc]onnection was likely closed/ /Horovod has been shut down/
  /successfully reached monitoredBarrier, but received errors while waiting for (?:send/)?recv from/
  why: The rank at the other end ended, so this is a consequence: its log has the cause
  fix: Find the rank that ended first: torchrun --log-dir logs --tee 3. If it says nothing: killed.

gloo-timeout (timeout): a wait for ranks, in gloo or the store, took too long
  /Timed out waiting \d+ms for (?:recv|send) operation to complete/ /Operation timed out!/
  /wait timeout after \d+ms, keys: (?!\/default_pg\/0\/\/cpu\/\/0\/)/ /Socket Timeout/
  /waitForInput: .*timed out after \d+ms/ /Stop_waiting response is expected/
  why: These ranks wait for one that hangs, is slow, took another branch, or has fewer batches
  fix: py-spy dump each rank while it hangs. Equal numbers of batches per rank, no collective under
    `if rank == 0`; init_process_group(timeout=...) if one rank is slow.
  case exit[ _]barrier => This node is done; another's agent still works, or ended => Read its log.

gloo-connect (timeout): gloo could not connect all ranks
  /gloo/transport/tcp/pair\.cc:\d+\] (?:no error|Connect timeout)/ /timed out connecting: /
  /Gloo connectFullMesh failed with / /SO_ERROR: Connection refused/
  /connect \[[^\]]+\](?::\d+)?: (?:Connection refused|No route to host|Connection timed out)/
  why: gloo announces the address of the host's own name. If /etc/hosts maps it to 127.0.1.1, or it
    belongs to another network, the others can't connect; or a rank ended
  fix: GLOO_SOCKET_IFNAME=eth0 (the cluster's) on all nodes; the node's real address in /etc/hosts.

gloo-interface (accuses nobody): gloo found no network interface that it can use
  /Unable to find (?:address for:|interface) / /interface or hostname can't be empty/
  /[Uu]nable to resolve hostname to a \(local\) address/
  /makeDeviceFor(?:Hostname|Interface)\(\): unsupported gloo device/
  why: GLOO_SOCKET_IFNAME names an interface that this node lacks, or its host name has no address
  fix: `ip -br addr` lists them; set or unset GLOO_SOCKET_IFNAME; the host's name in /etc/hosts.
  or_else: On Windows: gloo of this build of torch does not work there; take another.

gloo-unsupported (accuses nobody): gloo can't do this operation or type
  /Invalid scalar type/ /ProcessGroupGloo .*(?:not support|does not support)/
  /Backend gloo does not (?:support|implement)/ /Cannot use ReduceOp\.\w+ with Gloo/
  /does not support (?:reduce_scatter|alltoall\w*|_reduce_scatter_base)/
  /argument \w+ not supported for the selected backend gloo/
  why: gloo has fewer operations and types than NCCL: no AVG, in some no bool
  fix: SUM and a division instead of AVG; another dtype; nccl for GPU tensors.

group-shapes (likely): the tensors or the rank that a collective was given do not fit its group
  /(?:Group rank|Global rank) \d+ is not part of group/ /invalid root rank: -?\d+/
  /The given group does not exist/ /Split sizes doesn't match total dim 0 size/
  /Tensors must be contiguous/ /Invalid function argument\. Expected parameter `\w+`/
  /(?:in|out)put tensor (?:size )?must be (?:equal to|the same size as) .*world[_ ]size/
  /output tensor must have the same type as input tensor/
  /invalid tensor (?:size|type|layout) at index \d+(?!.*device=(?:mps|xpu|npu|hpu))/
  why: Size, layout or type of a list of tensors is not what the operation needs
  fix: .contiguous(); one output per rank; world_size * input size for gather.
  case part of group|root rank|given group => src, dst or root is no rank of the group, or new_group
    was called by some ranks only => All ranks call new_group, in one order; src is global
    (group_src=).
"""

FAMILIES = read_families(_TEXT)
