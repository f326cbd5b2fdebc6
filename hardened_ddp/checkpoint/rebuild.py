"""The model of a checkpoint, built again from what the checkpoint says of it.

Owns: from a checkpoint's tensors and meta to an nn.Module in eval mode, on the CPU. The folder of
the run is not needed, and nothing is downloaded: published weights would be overwritten anyway.
What goes wrong here: the model is the user's own, and its code is gone or has changed since. Then
names or shapes differ from those saved, and that is an error with their list.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardened_ddp.checkpoint.tensors import differences, specs_of
from hardened_ddp.errors import CheckpointError, CheckpointMismatchError
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import ModelConfig

MODEL_PREFIX = "model."
# torchvision gives these two another input scale if they start from its published weights.
_SCALED_IF_PRETRAINED = ("googlenet", "inception_v3")


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pick the model's tensors out of a checkpoint's, under their names in state_dict()."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


def rebuild_model(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> nn.Module:
    """Build the model that meta names, and fill it. Rank-local; moves the random numbers.

    Raises ModelError if it can't be built, CheckpointMismatchError if the weights do not fit.
    """
    if not isinstance(meta.get("model"), str) or not meta.get("num_classes"):
        raise CheckpointError(
            "the checkpoint does not say which model it is of",
            fix="--format safetensors writes the weights alone",
        )
    arguments = dict(meta.get("model_args") or {})
    if meta.get("pretrained") and meta["model"] in _SCALED_IF_PRETRAINED:
        arguments["transform_input"] = True
    config = ModelConfig(model=meta["model"], model_args=arguments)
    model = build_model(
        config,
        num_classes=int(meta["num_classes"]),
        input_shape=tuple(meta.get("input_shape") or ()),
    )
    problems = differences(specs_of(weights), specs_of(model.state_dict()))
    if problems:
        raise CheckpointMismatchError(
            f"the model {config.model}, built again, differs from the one saved: "
            + "; ".join(problems),
            fix="has its code changed since the training? Take the code of that time",
        )
    model.load_state_dict(dict(weights))
    return model.eval()


def example_inputs(meta: Mapping[str, Any], *, num_samples: int) -> Tensor:
    """Make inputs of the trained shape to compare models on: smooth, and the same every time.

    Raises CheckpointError if the model takes something else than one tensor.
    """
    shape = tuple(int(size) for size in meta.get("input_shape") or ())
    if not shape:
        raise CheckpointError(
            "the inputs of this model are not one tensor, so it can't be tried here",
            fix="--format safetensors writes the weights without running the model",
        )
    count = num_samples * int(torch.Size(shape).numel())
    # WHY a sine: values of both signs and of a usual size, without touching the random numbers
    return torch.sin(torch.arange(count, dtype=torch.float32)).view(num_samples, *shape)
