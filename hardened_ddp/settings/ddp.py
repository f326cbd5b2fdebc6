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
        "Search in each step for parameters that get no gradient. auto: look once before the "
        "first step, and search in each step if there are any. off: the run stops if there are "
        "any.",
        bare="on",
    )
    static_graph: bool = setting(
        False,
        "Promise that every step uses the same parameters in the same way, which saves DDP work. "
        "If the promise is broken, gradients are wrong.",
    )
    gradient_as_bucket_view: bool = setting(
        True,
        "Make gradients views into DDP's buckets. Saves a copy, and as much memory as the "
        "gradients take.",
    )
    bucket_cap_mb: float = setting(
        25.0,
        "Size of DDP's gradient buckets, in MiB. Smaller: the all-reduce starts earlier, but "
        "sends more messages.",
        bounds=MEGABYTES,
    )
    shared_memory: bool = setting(
        True,
        "Sum the gradients of CPU ranks on one machine through shared memory, after backward. "
        "false: through DDP's hooks over gloo, as between machines.",
    )
    comm_hook: CommHook = setting(
        "none",
        "Compress gradients for the all-reduce. Less to send, but gradients are rounded; with "
        "powersgd a resumed run is also not bitwise equal.",
    )
