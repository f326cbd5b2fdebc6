"""The model of a checkpoint, rebuilt from the description in it.

Owns: from a checkpoint's tensors and meta to an nn.Module in eval mode, on the CPU. The folder of
the run is not needed.
What goes wrong here: the code of the user's own model is missing or has changed since. Then names
or shapes differ from those saved, and the error lists them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardened_ddp.checkpoint.tensors import differences, specs_of
from hardened_ddp.errors import CheckpointMismatchError, ModelError
from hardened_ddp.model.described import build_described
from hardened_ddp.model.moving_attributes import TASK, MovingAttributes
from hardened_ddp.preflight.lazy import shape_by_weights

MODEL_PREFIX = "model."


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the model's tensors of a checkpoint, under their names in state_dict()."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


def rebuild_model(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> nn.Module:
    """Build the model that meta describes, and load weights. Rank-local; advances the RNG.

    Raises ModelError if it can't be built, CheckpointMismatchError if the weights do not fit.
    """
    model = build_described(meta)
    shape_by_weights(model, weights)
    problems = differences(specs_of(weights), specs_of(model.state_dict()))
    if problems:
        raise CheckpointMismatchError(
            f"the model {meta['model']}, built again, differs from the one saved: "
            + "; ".join(problems),
            fix="has its code changed since the training? Use the code of that time",
        )
    model.load_state_dict(dict(weights))
    found = meta.get("attributes", {})
    MovingAttributes(model).load({n: v for n, v in found.items() if not n.startswith(TASK)})
    return model.eval()


def example_inputs(meta: Mapping[str, Any], *, num_samples: int) -> Tensor:
    """Create inputs of the trained shape to compare models with: the same every time.

    Raises ModelError if the model takes anything but one tensor.
    """
    shape = tuple(int(size) for size in meta.get("input_shape") or ())
    if not shape:
        raise ModelError(
            "the inputs of this model are not one tensor, so it can't be tried here",
            fix="--format safetensors writes the weights without running the model",
        )
    count = num_samples * int(torch.Size(shape).numel())
    # WHY a sine: values of both signs and usual size, without the random number generators
    return torch.sin(torch.arange(count, dtype=torch.float32)).view(num_samples, *shape)
