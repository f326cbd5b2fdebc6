"""Our models with save_pretrained() and from_pretrained() of the Hugging Face libraries.

    from hardened_ddp.model.hub import HubModel
    model = HubModel.from_pretrained("exports/first-huggingface")

Owns only this form: zoo.py builds the model, huggingface_hub reads and writes it.
Importing this module needs huggingface_hub (requirements-extras.txt); nothing else here does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

from hardened_ddp.model.zoo import build_described


class HubModel(nn.Module, PyTorchModelHubMixin):  # type: ignore[misc]  # an extra, so not followed
    """A classifier that stores its own description: (N, *input_shape) float -> (N, num_classes)."""

    # Any: JSON, as config.json has it; the names are those of DESCRIPTION
    def __init__(self, *, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.facts = dict(facts)
        self.net = build_described(facts)

    @property
    def class_names(self) -> Sequence[str]:
        return self.facts.get("class_names") or ()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.net(inputs)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output["logits"]
        return logits
