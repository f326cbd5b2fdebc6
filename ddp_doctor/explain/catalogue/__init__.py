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

_READ = (graph, nccl, gpu, memory, data, launch, stops, gloo, precision, checkpoints, platforms)
FAMILIES = {family: causes for module in _READ for family, causes in module.FAMILIES.items()}
FAMILIES |= {"Python": python.CAUSES, "This suite": own.CAUSES}
CAUSES = tuple(cause for causes in FAMILIES.values() for cause in causes)
BY_CODE = {cause.code: cause for cause in CAUSES}
