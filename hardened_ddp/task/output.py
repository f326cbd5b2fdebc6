"""What a model takes and returns: the conventions by which its logits and its loss are found."""

from collections.abc import Mapping
from typing import Any

import torch

from hardened_ddp.errors import ModelError

# Where an output with names has its logits: Hugging Face says logits, torchvision out.
LOGITS = ("logits", "out")
_MOST_NAMED = 6
_ROUNDING = 1e-3  # of probabilities in fp32, or written with few digits
_LABEL_IS_LAST = (
    "the last part of a sample is its label, and several others are one argument of forward: "
    "return a mapping to give it parts by name"
)
_NO_LABEL = "no part was taken as label, which is called labels, label, targets or target"
_LISTS = "forward takes tensors: pad lists, and tokenize text, in the dataset or in --collate"


def split_output(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the logits and the model's own loss from what a model returned; None for what is not.

    Understood: a tensor; a mapping or an object with names (logits or out, loss); a tuple in which
    a scalar is the loss and the first other tensor the logits. Any: whatever it returned.
    """
    if isinstance(output, torch.Tensor):
        return (None, output) if output.dim() == 0 else (output, None)
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        tensors = [part for part in output if isinstance(part, torch.Tensor)]
        losses = [tensor for tensor in tensors if tensor.dim() == 0]
        others = [tensor for tensor in tensors if tensor.dim() > 0]
        return (others[0] if others else None), (losses[0] if losses else None)

    def named(name: str) -> torch.Tensor | None:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        return found if isinstance(found, torch.Tensor) else None

    logits = next((found for name in LOGITS if (found := named(name)) is not None), None)
    return logits, named("loss")


def refuse_several_losses(output: Any) -> None:  # Any: whatever a model returned
    """Raise ModelError if a model returned several losses: a step has one.

    WHY not the first of them: the others would be left out of the training, and nobody told.
    """
    names = _names_of_losses(output)
    if len(names) > 1:
        raise ModelError(
            f"the model returned {len(names)} losses ({', '.join(names[:6])}), and a step has one",
            fix="if one optimizer is for all of them, return their sum as 'loss'; if each has an "
            "optimizer of its own, as in a GAN: that can't be trained here, see "
            "docs/OWN_TRAINING.md, Parameter groups",
        )


def _names_of_losses(output: Any) -> list[str]:  # Any: whatever a model returned
    named: dict[str, Any] = {}
    if isinstance(output, Mapping):
        inner = output.get("loss")
        if isinstance(inner, Mapping | tuple | list):
            pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
            named = {f"loss {key}": part for key, part in pairs}
        elif "loss" not in output:
            named = {str(key): part for key, part in output.items() if "loss" in str(key).lower()}
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        # WHY the gradient: a scalar without one is a number for the log.
        has_gradient = [getattr(part, "requires_grad", False) for part in output]
        named = {f"part {i}": output[i] for i, is_loss in enumerate(has_gradient) if is_loss}
    return [n for n, part in named.items() if isinstance(part, torch.Tensor) and part.dim() == 0]


def logits_of(output: Any, *, need: str) -> torch.Tensor:  # Any: whatever a model returned
    """Return the logits of an output. need: their shape, for the ModelError if there are none."""
    logits, _ = split_output(output)
    if logits is None:
        raise ModelError(
            f"the model returned {described(output)}; need a tensor of shape {need}, or a mapping "
            "with 'logits'",
            fix=f"return a tensor of shape {need} from forward; or --task own if the model returns "
            "its own loss",
        )
    return logits


def fix_for(
    error: BaseException, inputs: Any, *, has_labels: bool = True
) -> str:  # Any: nested data
    """Say what to do about an error of a first forward: what it was given, and how."""
    is_named = isinstance(inputs, Mapping)
    named = inputs if is_named else {"the input": inputs}
    told = [f"{name} is {described_labels(part)}" for name, part in named.items()][:_MOST_NAMED]
    if is_named:
        told.append("parts of a mapping go to forward by name")
    if not has_labels:
        told.append(_NO_LABEL)
    elif isinstance(error, TypeError) and not is_named:
        told.append(_LABEL_IS_LAST)
    parts = list(named.values())
    if any(isinstance(part, tuple | list) for part in parts):
        told.append(_LISTS)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if any(part.dim() == 4 and part.shape[3] < 5 <= part.shape[1] for part in tensors):
        told.append("images have their channels first: return image.permute(2, 0, 1)")
    if "type" in str(error) and any(part.dtype != torch.float32 for part in tensors):
        told.append("a model computes in float32 as a rule: return x.float() from the dataset")
    return "; ".join([*told, "the whole traceback is in this rank's log"])


def are_shares(labels: torch.Tensor) -> bool:
    """Return whether labels (N, classes) are probabilities: from 0 to 1, and each row adds to 1."""
    if labels.dim() != 2 or labels.shape[1] < 2 or not labels.is_floating_point():
        return False
    is_one = (labels.double().sum(dim=1) - 1).abs() < _ROUNDING
    return bool(((labels >= 0) & (labels <= 1)).all() and is_one.all())


def described_labels(labels: object) -> str:
    """Describe the labels of a batch."""
    if isinstance(labels, torch.Tensor):
        return f"{tuple(labels.shape)} {str(labels.dtype).removeprefix('torch.')}"
    if isinstance(labels, tuple | list) and labels:
        return f"a {type(labels).__name__} of {type(labels[0]).__name__}"
    return f"a {type(labels).__name__}"


def check_range(labels: torch.Tensor, count: int, *, what: str, fix: str) -> None:
    """Raise ModelError if labels are not from 0 to count - 1. Waits for the device.

    WHY before the loss: a wrong label raises there; on a GPU it ends the CUDA context.
    """
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= count):
        raise ModelError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, and there are {count} "
            f"{what}, 0 to {count - 1}",
            fix=fix,
        )


def described(output: object) -> str:
    """Describe what a model returned."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {sorted(map(str, output))}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(described(part) for part in output[:4])}"
    return f"a {type(output).__name__}"
