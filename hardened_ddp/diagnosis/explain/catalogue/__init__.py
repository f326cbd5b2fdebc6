"""The catalogue of causes: one table makes the rules and the index of the guide."""

from hardened_ddp.diagnosis.explain.catalogue import (
    accelerators,
    checkpoints,
    data,
    gloo,
    gpu,
    gpu_software,
    graph,
    launch,
    launch_setup,
    memory,
    model,
    nccl,
    nccl_network,
    nccl_setup,
    own,
    platforms,
    precision,
    python,
    stops,
    storage,
)

FAMILIES = {
    "Graph: what DDP expects of forward and backward": graph.CAUSES,
    "Model": model.CAUSES,
    "NCCL: timeouts and connections": nccl.CAUSES,
    "NCCL: network": nccl_network.CAUSES,
    "NCCL: general words and set-up": nccl_setup.CAUSES,
    "GPU faults": gpu.CAUSES,
    "GPU software": gpu_software.CAUSES,
    "Other accelerators, arithmetic exceptions": accelerators.CAUSES,
    "Memory": memory.CAUSES,
    "Data": data.CAUSES,
    "Storage and downloads": storage.CAUSES,
    "Launch and rendezvous": launch.CAUSES,
    "Launch: frameworks, containers, settings": launch_setup.CAUSES,
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
