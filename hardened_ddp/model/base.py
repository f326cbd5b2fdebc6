"""The frozen base of a model: weights from a file or a hub, which no checkpoint has to copy.

Owns which tensors these are, known by their hashes, and the check that a later start, an export or
an evaluation has the same ones again.
Does not own: building the model from its source (zoo.py, training/weights.py).
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.ranks.seeding import keeping_random_state, seed_update

_LEAST_BYTES = 2**20
"""Frozen weights that are smaller are saved as all others: simpler for whoever reads them."""

_OTHER_SEED = 0x5EED


def frozen_hashes(model: nn.Module) -> dict[str, str]:
    """Hash each frozen parameter; by name in state_dict(), also where two names share one."""
    frozen = {id(p): "" for p in model.parameters() if not p.requires_grad}
    state = model.state_dict(keep_vars=True)
    for tensor in state.values():
        if frozen.get(id(tensor)) == "":
            raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            frozen[id(tensor)] = hashlib.sha256(memoryview(raw.numpy())).hexdigest()[:16]
    return {name: frozen[id(t)] for name, t in state.items() if id(t) in frozen}


def find_base(model: nn.Module, build: Callable[[], nn.Module]) -> dict[str, str]:
    """Return the hashes of the frozen parameters that build gives again, whatever the seed.

    WHY a second model, and not the list of a file: what is not in it has random values.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if sum(p.nbytes for p in frozen) < _LEAST_BYTES:
        return {}
    with keeping_random_state():
        seed_update(_OTHER_SEED, step=0, device_type="cpu")
        again = frozen_hashes(build())
    return {n: digest for n, digest in frozen_hashes(model).items() if again.get(n) == digest}


def check_base(model: nn.Module, base: Mapping[str, Any]) -> None:  # Any: JSON of a checkpoint
    """Raise CheckpointMismatchError unless model has the frozen weights of a checkpoint."""
    now = frozen_hashes(model)
    if wrong := [name for name, digest in base["sha256"].items() if now.get(name) != digest]:
        raise CheckpointMismatchError(
            f"the checkpoint was trained on the frozen weights of {base['source']}, and "
            f"{len(wrong)} of their {len(base['sha256'])} tensors are others now: {wrong[0]}",
            fix="give the base of that time again: the same files, or the revision of the Hub: "
            "--model_args '{revision: ...}'",
        )
