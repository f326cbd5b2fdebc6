"""The classifiers of torchvision, with their first and last layer fitted to the data.

Owns the download of their published weights. Does not own: models of other sources (zoo.py).
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.data.sources.downloads import fetch, weights_of
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.settings.config import ModelConfig
from hardened_ddp.settings.typed_command import ROOT, python_command

log = logging.getLogger(__name__)

WITH_AUXILIARY = ("googlenet", "inception_v3")
"""They have outputs besides their logits; with published weights they scale their input anew."""


def build_classifier(config: ModelConfig, *, num_classes: int, channels: int) -> nn.Module:
    """Build a torchvision classifier with num_classes outputs and the data's channels. Rank-local.

    Raises ModelError for arguments that it does not take, and missing weights.
    """
    models = import_torchvision().models
    arguments: dict[str, Any] = {}
    if config.model in WITH_AUXILIARY and not config.pretrained:
        # WHY: auxiliary outputs are neither logits nor a loss
        arguments = {"init_weights": True, "aux_logits": False}
    try:
        if config.pretrained:
            _download_weights(config.model)
            model = models.get_model(config.model, weights="DEFAULT", **config.model_args)
            _fit_head(model, num_classes, config.model)
        else:
            arguments |= {"num_classes": num_classes, **config.model_args}
            model = models.get_model(config.model, weights=None, **arguments)
    except TypeError as error:
        raise ModelError(
            f"{config.model} can't be built with model_args {dict(config.model_args)}: {error}",
            fix="check --model_args against the torchvision documentation of the model",
        ) from error
    except (OSError, DataError) as error:
        reason = error.message if isinstance(error, DataError) else error
        raise ModelError(
            f"the pretrained weights of {config.model} can't be downloaded: {reason}",
            fix="leave --pretrained out, or copy the folder models here from a machine with "
            "internet, where this writes it: "
            + python_command(ROOT / "download.py", "--model", config.model),
        ) from error
    _fit_channels(model, channels)
    return model  # type: ignore[no-any-return]  # torchvision is untyped here


def _download_weights(name: str) -> None:
    """Download published weights to torchvision's cache, once for all ranks of a node.

    WHY no check of an existing file: its hash was checked at the download, and takes seconds.
    """
    wanted = weights_of(name, Path(torch.hub.get_dir()) / "checkpoints")
    if not wanted.path.is_file():
        fetch(wanted, say=log.info)


def _fit_head(model: nn.Module, num_classes: int, name: str) -> None:
    """Replace the last layer, which gives ImageNet's 1000 classes, by one for num_classes."""
    for path, layer in reversed(list(model.named_modules())):
        if isinstance(layer, nn.Linear) and layer.out_features == 1000:
            head: nn.Module = nn.Linear(layer.in_features, num_classes)
        elif isinstance(layer, nn.Conv2d) and layer.out_channels == 1000:
            head = nn.Conv2d(layer.in_channels, num_classes, layer.kernel_size)  # type: ignore[arg-type]  # a pair, typed as any tuple
        else:
            continue
        model.set_submodule(path, head)
        return
    raise ModelError(f"{name} has no layer with 1000 outputs to replace by {num_classes}")


def _fit_channels(model: nn.Module, channels: int) -> None:
    """Let the first convolution take the data's channels; RGB weights are summed over colour."""
    found = next(
        (item for item in model.named_modules() if isinstance(item[1], nn.Conv2d)), (None, None)
    )
    path, first = found
    if path is None or not isinstance(first, nn.Conv2d) or first.in_channels == channels:
        return
    fitted = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]  # a pair, typed as any tuple
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    with torch.no_grad():
        # WHY: the result is that of a grey image in three equal channels.
        mean_weight = first.weight.sum(dim=1, keepdim=True) / channels
        fitted.weight.copy_(mean_weight.expand_as(fitted.weight))
        if first.bias is not None and fitted.bias is not None:
            fitted.bias.copy_(first.bias)
    model.set_submodule(path, fitted)
