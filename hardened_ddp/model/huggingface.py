"""Models of the transformers library, by folder or by name: --model hf:PATH_OR_NAME.

Owns loading one for fine-tuning: image classifiers, with images converted to their size and number
of channels; causal and masked language models; sequence and token classifiers. A classifier's head
is fitted to the classes. The weights are read from safetensors only, and no code from the folder
runs (trust_remote_code stays off).
What goes wrong here: a missing package, no network, a folder whose model fits no task.
"""

import inspect
import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from hardened_ddp.data.foreign_code import import_extra, told_as
from hardened_ddp.data.sources.hub_sets import find_place
from hardened_ddp.errors import ModelError
from hardened_ddp.settings.config import ModelConfig

_KINDS = (
    *("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification"),
    "ImageClassification",
)
log = logging.getLogger(__name__)


class _OfHub(nn.Module):
    """A model of transformers as a plain one: net does the work."""

    net: Any  # its types are known only where the package is installed

    @property
    def hub_config(self) -> dict[str, Any]:
        """The configuration as JSON, with the model's class: it is built again from that."""
        config: dict[str, Any] = json.loads(self.net.config.to_json_string(use_diff=False))
        return {**config, "architectures": [type(self.net).__name__]}


class ImageClassifier(_OfHub):
    """A transformers model as a plain one: (N, C, H, W) float -> (N, num_classes) logits."""

    def __init__(self, net: Any, *, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        size = getattr(net.config, "image_size", None)
        size = (size, size) if isinstance(size, int) else size
        # The height and width that the model expects; None if it takes any.
        self.size = tuple(size) if isinstance(size, list | tuple) else None
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


class TextModel(_OfHub):
    """A transformers model for text: its inputs by name -> {"logits"}, with labels {"loss"} too."""

    def __init__(self, net: Any) -> None:  # Any: as above
        super().__init__()
        self.net = net
        # WHY off: keys and values of earlier tokens are only of use for generating text.
        has_cache = "use_cache" in inspect.signature(net.forward).parameters
        self._always = {"use_cache": False} if has_cache else {}

    def forward(
        self, labels: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found = self.net(labels=labels, **self._always, **inputs)
        losses = {} if found.loss is None else {"loss": found.loss}
        return {"logits": found.logits, **losses}


HubModel = ImageClassifier | TextModel


def load_hub_model(
    config: ModelConfig, *, num_classes: int, input_shape: tuple[int, ...], task: str = "auto"
) -> HubModel:
    """Load the model that config names, with a head for num_classes. Rank-local.

    task: as --task names it; it decides between the heads that one body may have. model_args go to
    its configuration. Raises ModelError, MissingPackageError.
    """
    name = find_place(config.model, error=ModelError)  # WHY first: the import takes longer
    transformers = import_extra("transformers", what=f"--model {config.model}")
    transformers.logging.set_verbosity_error()  # WHY: we report the new head ourselves
    transformers.logging.disable_progress_bar()
    folder = Path(name)
    is_bare = folder.is_dir() and not any(folder.glob("*.safetensors"))
    how: dict[str, Any] = {"trust_remote_code": False}
    fix = (
        "give a folder made by save_pretrained() (config.json, model.safetensors); a name needs "
        "network, or the model in the cache of huggingface_hub and HF_HUB_OFFLINE=1"
    )
    # WHY: the library raises many kinds of errors for a bad folder
    with told_as(ModelError, f"{config.model} can't be loaded", fix=fix):
        given: dict[str, Any] = {**config.model_args, **how}
        described = transformers.AutoConfig.from_pretrained(name, **how)
        kind = _kind_of(transformers, described, task, has_classes=num_classes > 0)
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if num_classes and "LM" not in kind:
            given = {"num_labels": num_classes, **given}
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
            new = _check_loaded(net, info)
        if config.adapter:
            add_adapter(net, config.adapter, new=() if is_bare else new)
        return _wrapped(net, kind, input_shape)


def add_adapter(net: Any, adapter: Mapping[str, Any], *, new: Collection[str] = ()) -> None:
    """Add adapters of the library peft in place: they are trained, and what is new in the model."""
    peft = import_extra("peft", what="--adapter")
    settings = peft.get_peft_config({"peft_type": "LORA", **adapter})
    peft.inject_adapter_in_model(settings, net, adapter_name="default")
    for name, parameter in net.named_parameters():
        if name in new:
            parameter.requires_grad_(True)


def build_from_config(
    hub_config: Mapping[str, Any],
    *,
    input_shape: tuple[int, ...],
    adapter: Mapping[str, Any] | None = None,
) -> HubModel:
    """Build a model, with random weights, from its hub_config: nothing is read or downloaded.

    Raises ModelError, MissingPackageError.
    """
    transformers = import_extra("transformers", what="a model of hf:")
    version = hub_config.get("transformers_version")
    fix = f"install the version of transformers that it was trained with: {version}"
    with told_as(ModelError, "the model of the checkpoint can't be built again", fix=fix):
        described = transformers.AutoConfig.for_model(**hub_config)
        kind = _kind_of(transformers, described, "auto", has_classes=False)
        net = getattr(transformers, f"AutoModelFor{kind}").from_config(described)
        if adapter:
            add_adapter(net, adapter)
    return _wrapped(net, kind, input_shape)


def _wrapped(net: Any, kind: str, input_shape: tuple[int, ...]) -> HubModel:
    is_image = kind == "ImageClassification"
    return ImageClassifier(net, input_shape=input_shape) if is_image else TextModel(net)


def _kind_of(transformers: Any, config: Any, task: str, *, has_classes: bool) -> str:
    """Return which of transformers' automatic classes a model is loaded as: AutoModelFor<kind>.

    The task decides; where it leaves a choice, the head that the folder has. Raises ModelError.
    """
    names = [re.sub("LMHeadModel$", "ForCausalLM", name) for name in config.architectures or []]
    heads = [name.partition("For")[2] for name in names]  # GPT2LMHeadModel -> CausalLM
    head = next((head for head in heads if head in _KINDS), "")
    is_image = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if task == "classification" or (task == "auto" and not head and is_image):
        return "ImageClassification" if is_image else "SequenceClassification"
    if task in ("multilabel", "regression"):
        return "SequenceClassification"
    if task == "tokens" and head not in ("CausalLM", "MaskedLM", "TokenClassification"):
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        return "TokenClassification" if has_classes or not is_causal else "CausalLM"
    if not head:
        raise ModelError(
            f"a {config.model_type} model may be trained for several tasks",
            fix="say which: --task classification | tokens",
        )
    return head


def _check_loaded(net: Any, info: Mapping[str, Any]) -> list[str]:
    """Return and log which weights are new; raise ModelError if that is more than a head.

    The pooler counts as one: a language model has none.
    """
    names = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    new = sorted({*names, *info["missing_keys"]})
    live = net.state_dict()
    inside = f"{net.base_model_prefix}."
    body = [
        name
        for name in new
        if name not in live or (name.startswith(inside) and ".pooler." not in name)
    ]
    if body:
        raise ModelError(
            f"the weights do not fit the model: {', '.join(body[:5])} of {len(live)} would be new",
            fix="leave --model_args out, or give the folder of a whole model",
        )
    log.info("new, with random weights: %s; the rest is loaded", ", ".join(new) or "nothing")
    return new
