"""A model built from its description in a checkpoint or an export.

Owns the keys that describe a model (DESCRIPTION), and building from them without any download:
published weights would be overwritten anyway. Does not own: the trained weights.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.model.huggingface import build_from_config
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import ModelConfig

DESCRIPTION = (
    *("model", "model_args", "pretrained", "hub_config"),
    *("num_classes", "input_shape", "class_names"),
)
# torchvision scales the input of these two differently with its published weights.
_SCALED_IF_PRETRAINED = ("googlenet", "inception_v3")


def build_described(facts: Mapping[str, Any]) -> nn.Module:
    """Build the model that facts describe. Rank-local; advances the random number generators.

    Raises ModelError if they don't describe one, or if it can't be built.
    """
    if not isinstance(facts.get("model"), str):
        raise ModelError("the checkpoint does not say which model it belongs to")
    input_shape = tuple(facts.get("input_shape") or ())
    if facts.get("hub_config"):
        return build_from_config(facts["hub_config"], input_shape=input_shape)
    arguments = dict(facts.get("model_args") or {})
    if facts.get("pretrained") and facts["model"] in _SCALED_IF_PRETRAINED:
        arguments["transform_input"] = True
    return build_model(
        ModelConfig(model=facts["model"], model_args=arguments),
        num_classes=int(facts.get("num_classes") or 0),
        input_shape=input_shape,
    )
