"""Settings of DistributedDataParallel."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import Bounds, setting

FindUnused = Literal["auto", "on", "off"]
CommHook = Literal["none", "bf16", "fp16", "powersgd"]
MEGABYTES = Bounds(low=0, high=65536, is_low_open=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    find_unused_parameters: FindUnused = setting(
        "auto",
        "Look in each step for parameters that get no gradient. auto: look once, before the "
        "first step. off with such parameters: the run stops.",
        bare="on",
    )
    static_graph: bool = setting(
        False,
        "Promise that every step uses the same parameters in the same way; lets DDP do less. "
        "A broken promise gives wrong gradients.",
    )
    gradient_as_bucket_view: bool = setting(
        True, "Let gradients live in DDP's buckets: saves a copy and the memory of one model."
    )
    bucket_cap_mb: float = setting(
        25.0,
        "MiB of gradients that are sent together. Small: starts earlier, more messages.",
        bounds=MEGABYTES,
    )
    shared_memory: bool = setting(
        True,
        "Sum gradients of CPU ranks on one machine through shared memory, after backward. false: "
        "by DDP's hooks over gloo, as between machines.",
    )
    comm_hook: CommHook = setting(
        "none",
        "Compress gradients on their way between ranks. Less to send, rounded gradients; "
        "powersgd also does not resume bit for bit.",
    )
