"""Settings of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardened_ddp.settings.declare import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    model: str = setting(
        "simple_cnn",
        "simple_cnn, mlp, one of torchvision such as resnet18, hf:FOLDER_OR_NAME for an image "
        "classifier of transformers, or your own as package.module:callable.",
    )
    # Any: the arguments are those of a callable that we don't know
    model_args: Mapping[str, Any] = setting(
        {}, "Arguments for the model, as a mapping: {name: value, ...}."
    )
    pretrained: bool = setting(
        False, "Start from torchvision's published weights; only for its models (hf: always does)."
    )
    sync_batchnorm: bool = setting(
        False,
        "Batch normalization over all ranks instead of each rank's own samples. GPU only; "
        "costs one collective per layer.",
    )
    gradient_checkpointing: bool = setting(
        False, "Compute activations again in backward: less memory, about a third more time."
    )
    channels_last: bool | None = setting(
        None,
        "Store images with channels last. auto: measured on the model before a run of more "
        "than ten minutes, and kept when it is at least 1.1 times as fast; off if deterministic.",
    )
    compile: bool = setting(
        False, "Compile the model with torch.compile: a slow first step, faster ones after it."
    )
