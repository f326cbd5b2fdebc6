"""The catalogue of causes: one table makes the rules and the index of the guide."""

from ddp_doctor.explain.catalogue import (
    checkpoints,
    data,
    gloo,
    gpu,
    graph,
    launch,
    memory,
    nccl,
    own,
    platforms,
    precision,
    python,
    stops,
)

FAMILIES = {
    "Graph: what DDP expects of forward and backward": graph.CAUSES,
    "Model": graph.MODEL,
    "NCCL: timeouts and connections": nccl.CAUSES,
    "NCCL: network": nccl.NETWORK,
    "NCCL: general words and set-up": nccl.SETUP,
    "GPU faults": gpu.CAUSES,
    "GPU software": gpu.SOFTWARE,
    "Other accelerators, arithmetic exceptions": gpu.OTHERS,
    "Memory": memory.CAUSES,
    "Data": data.CAUSES,
    "Storage and downloads": data.STORAGE,
    "Launch and rendezvous": launch.CAUSES,
    "Launch: frameworks, containers, settings": launch.SETUP,
    "Signals, schedulers, Kubernetes": stops.CAUSES,
    "gloo and connections": gloo.CAUSES,
    "Mixed precision and torch.compile": precision.CAUSES,
    "Checkpoints": checkpoints.CAUSES,
    "Windows, macOS, packages": platforms.CAUSES,
    "Python": python.CAUSES,
    "This suite": own.CAUSES,
}
CAUSES = tuple(cause for causes in FAMILIES.values() for cause in causes)
BY_CODE = {cause.code: cause for cause in CAUSES}
