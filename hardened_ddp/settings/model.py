"""Settings of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardened_ddp.settings.declare import ANY_TEXT, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    model: str = setting(
        "simple_cnn",
        "simple_cnn, mlp, a torchvision model such as resnet18, hf:FOLDER_OR_NAME for a Hugging "
        "Face model of images or text, or your own as package.module:callable.",
        is_place=True,
    )
    # Any: the arguments are those of a callable that we don't know
    model_args: Mapping[str, Any] = setting(
        {}, "Arguments of the model, as a mapping: {name: value, ...}."
    )
    pretrained: bool = setting(
        False,
        "Start from torchvision's pretrained weights. Only for torchvision models; an hf: model "
        "always starts from its own.",
    )
    init_from: str = setting(
        "",
        "Weights that a new run starts from, as far as they fit: an export, a run or a checkpoint, "
        "a safetensors file, or a folder of Hugging Face. What does not fit is named. Empty: "
        "random weights. A resumed run has its own.",
        shape=ANY_TEXT,
        may_differ=True,
        is_place=True,
    )
    sync_batchnorm: bool = setting(
        False,
        "Batch normalization over all ranks (SyncBatchNorm) instead of over each rank's own "
        "samples. GPU only. Costs one collective per layer.",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Recompute activations in backward instead of keeping them: less memory, about a third "
        "more time.",
    )
    channels_last: bool | None = setting(
        None,
        "Store images in the channels_last memory format. auto: on the CPU where the convolutions "
        "read and write at least as many values per micro-batch as their kernels have, on a GPU "
        "with amp; off with compile.",
    )
    compile: bool = setting(
        False,
        "Compile the model with torch.compile: a slow first step, faster steps after it. How often "
        "it compiled in the first epoch is logged.",
    )
