"""What a model takes and returns: the conventions by which its logits and its loss are found."""

from collections.abc import Mapping
from typing import Any

import torch

from hardened_ddp.errors import ModelError

# Where an output with names has its logits: Hugging Face says logits, torchvision out.
LOGITS = ("logits", "out")
_MOST_NAMED = 6
_ROUNDING = 1e-3  # of probabilities in fp32, or written with few digits
_LABEL_IS_LAST = "the last part of a sample is its label"
_BY_NAME = (
    "If a sample has no label, or forward takes the parts by name: have the dataset, or --collate, "
    "return a mapping of names to parts"
)
_NO_LABEL = (
    "none of them was taken as the label, which is what is called labels, label, targets or target"
)


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
    """Say what to do about an error of a first forward."""
    if fix := fix_for_gradients(error):
        return fix
    named = inputs if isinstance(inputs, Mapping) else {"the input": inputs}
    lists = {name: part for name, part in named.items() if isinstance(part, list) and part}
    if texts := [str(name) for name, part in lists.items() if isinstance(part[0], str)]:
        return (
            f"{', '.join(texts)}: text, which a model can't take: tokenize it in the dataset, or "
            "in --collate: tokenizer(texts, padding=True, return_tensors='pt')"
        )
    if lists and isinstance(inputs, Mapping):
        return (
            f"{', '.join(map(str, lists))}: a list in each sample, and so a list of tensors in a "
            "batch: make it a tensor in the dataset; or set --collate, which samples of different "
            "lengths need: a function that pads, as DataCollatorWithPadding of transformers does"
        )
    is_call = isinstance(error, TypeError) and "argument" in str(error)
    if is_call and isinstance(inputs, Mapping):
        names = ", ".join(map(str, inputs))
        told = f"the inputs are a mapping, so they go to forward by name: {names}"
        return told if has_labels else f"{told}; {_NO_LABEL}"
    if isinstance(inputs, tuple | list) and isinstance(error, TypeError | AttributeError):
        return (
            f"{_LABEL_IS_LAST}; the other {len(inputs)} parts go to forward as one argument, "
            f"unless it needs several (without default values). {_BY_NAME}"
        )
    if is_call and "missing" in str(error) and has_labels:
        return f"{_LABEL_IS_LAST}, and the other is the input. {_BY_NAME}"
    return _fix_by_shape(str(error), named)


def fix_for_gradients(error: BaseException) -> str:
    """Say what to do if a forward needs gradients where none are computed; else empty."""
    if "does not require grad" not in str(error):
        return ""
    return (
        "an evaluation, and the first look at the output, compute no gradients: what forward "
        "differentiates itself (torch.autograd.grad) belongs under `with torch.enable_grad():`"
    )


def _fix_by_shape(text: str, named: Mapping[Any, Any]) -> str:  # Any: as the dataset nests them
    """Say what to do about an error of tensors that do not fit, by their shapes and types."""
    tensors = {name: part for name, part in named.items() if isinstance(part, torch.Tensor)}
    parts = [f"{name} is {described_labels(part)}" for name, part in tensors.items()]
    told = "; ".join(parts[:_MOST_NAMED])
    for part in tensors.values():
        if part.dim() == 4 and part.shape[3] in (1, 3, 4) and part.shape[1] > 4:
            return f"{told}: images have their channels first: return image.permute(2, 0, 1)"
    is_of_types = any(words in text for words in ("dtype", "scalar type", "should be the same"))
    if is_of_types and any(part.dtype != torch.float32 for part in tensors.values()):
        return (
            f"{told}; the model computes with another type: return float32 from the dataset, such "
            "as torch.as_tensor(x, dtype=torch.float32)"
        )
    return "; ".join(filter(None, (told, "the whole traceback is in this rank's log")))


def are_one_hot(labels: torch.Tensor) -> bool:
    """Return whether each row of labels (N, classes) has one 1, and else zeros."""
    if labels.dim() != 2 or labels.shape[1] < 2:
        return False
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(dim=1) == 1).all())


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
