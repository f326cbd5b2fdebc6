"""Image classifiers of the transformers library, by folder or by name: --model hf:PATH_OR_NAME.

Owns loading one for fine-tuning, with its head fitted to the classes, and converting images to its
size and number of channels. The weights are read from safetensors only, and no code from the folder
runs (trust_remote_code stays off).
What goes wrong here: a missing package, no network, a folder that is no image classifier.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from hardened_ddp.data.extras import import_extra
from hardened_ddp.data.fetch import describe
from hardened_ddp.errors import HardenedError, ModelError
from hardened_ddp.settings.model import ModelConfig

PREFIX = "hf:"
log = logging.getLogger(__name__)


class ImageClassifier(nn.Module):
    """A transformers model as a plain one: (N, C, H, W) float -> (N, num_classes) logits."""

    # Any: a transformers model; its types are known only where the package is installed
    def __init__(self, net: Any, *, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        self.size = _size_of(net.config)
        wanted = getattr(net.config, "num_channels", None) or 3
        if len(input_shape) != 3 or input_shape[0] not in (1, wanted):
            raise ModelError(
                f"the model takes images with {wanted} channels, and the data has samples of shape "
                f"{input_shape}",
                fix="choose a dataset of grey images, or of images with as many channels",
            )
        self.num_repeats = wanted // input_shape[0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.num_repeats > 1:
            images = images.repeat(1, self.num_repeats, 1, 1)
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = interpolate(images, self.size, mode="bilinear", antialias=True)
        logits: torch.Tensor = self.net(pixel_values=images).logits
        return logits

    def gradient_checkpointing_enable(self, **how: Any) -> None:
        """Recompute activations in backward, by the blocks that the model defines."""
        self.net.gradient_checkpointing_enable(**how)

    @property
    def hub_config(self) -> dict[str, Any]:
        """The transformers configuration as JSON, from which the model is built again."""
        config: dict[str, Any] = json.loads(self.net.config.to_json_string(use_diff=False))
        return config


def load_classifier(
    config: ModelConfig, *, num_classes: int, input_shape: tuple[int, ...]
) -> ImageClassifier:
    """Load the model that config names, with a head for num_classes. Rank-local.

    model_args go to its configuration. Raises ModelError, MissingPackageError.
    """
    transformers = import_extra("transformers", what=f"--model {config.model}")
    transformers.logging.set_verbosity_error()  # WHY: we report the new head ourselves
    transformers.logging.disable_progress_bar()
    name = config.model.removeprefix(PREFIX)
    folder = Path(name)
    is_bare = folder.is_dir() and not any(folder.glob("*.safetensors"))
    given = {"num_labels": num_classes, **config.model_args, "trust_remote_code": False}
    auto = transformers.AutoModelForImageClassification
    try:
        if is_bare:
            log.warning("%s has no *.safetensors: the model starts from random weights", folder)
            net = auto.from_config(transformers.AutoConfig.from_pretrained(name, **given))
        else:
            # ignore_mismatched_sizes: the old head has another number of classes, and is replaced
            net, info = auto.from_pretrained(
                name,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **given,
            )
            _check_loaded(net, info, num_classes=num_classes)
        return ImageClassifier(net, input_shape=input_shape)
    except HardenedError:
        raise
    except (
        Exception
    ) as error:  # WHY broad: the library raises many kinds of errors for a bad folder
        log.debug("loading %s failed", name, exc_info=True)
        raise ModelError(
            f"{config.model} can't be loaded as an image classifier: {describe(error)}",
            fix="give a folder made by save_pretrained() (config.json, model.safetensors); a name "
            "needs network, or the model in the cache of huggingface_hub",
        ) from error


def build_from_config(
    hub_config: Mapping[str, Any], *, input_shape: tuple[int, ...]
) -> ImageClassifier:
    """Build a model, with random weights, from its hub_config: nothing is read or downloaded.

    Raises ModelError, MissingPackageError.
    """
    transformers = import_extra("transformers", what="a model of hf:")
    try:
        described = transformers.AutoConfig.for_model(**hub_config)
        net = transformers.AutoModelForImageClassification.from_config(described)
    except Exception as error:  # WHY broad: as in load_classifier
        raise ModelError(
            f"the model of the checkpoint can't be built again: {describe(error)}",
            fix="install the version of transformers that it was trained with: "
            f"{hub_config.get('transformers_version')}",
        ) from error
    return ImageClassifier(net, input_shape=input_shape)


def _check_loaded(net: Any, info: Mapping[str, Any], *, num_classes: int) -> None:
    """Log which weights are new; raise ModelError if that is more than a head."""
    names = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    new = sorted({*names, *info["missing_keys"]})
    live = net.state_dict()
    body = [name for name in new if name not in live or live[name].shape[:1] != (num_classes,)]
    if body:
        raise ModelError(
            f"the weights do not fit the model: {', '.join(body[:5])} of {len(live)} would be new",
            fix="leave --model_args out, or give the folder of a whole image classifier",
        )
    log.info("new, with random weights: %s; the rest is loaded", ", ".join(new) or "nothing")


def _size_of(config: Any) -> tuple[int, int] | None:  # Any: a transformers configuration
    """Return the height and width that the model expects; None if it takes any."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else None
