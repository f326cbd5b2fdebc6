"""The search for the module that gives the first NaN or inf, in the retry of a step that had one.

By hooks on all modules in forward, and on their inputs and outputs in backward. They change
nothing, so a step that succeeds with them counts like any other; they wait for the device at every
module, so they are used in such retries only. A compiled model does not call those of its parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.step.failure import NUM_SHOWN, format_samples


class NonFiniteFinder:
    """Remembers where forward and backward first had NaN or inf."""

    def __init__(self, module: nn.Module, batches: Sequence[Batch]) -> None:
        """batches: the micro-batches that are watched."""
        self._root, self._batches = module, batches
        self._names = {part: name for name, part in module.named_modules()}
        # Samples and place of the first NaN or inf in each, as text.
        self._forward: tuple[str, str] | None = None
        self._backward: tuple[str, str] | None = None
        self._num_forwards = 0
        self._running: list[nn.Module] = []
        # Of each tensor between modules: what computes its gradient.
        self._users = WeakTensorKeyDictionary()

    def tell(self, what: str) -> str:
        """Return samples and place of what was found as text."""
        if found := self._forward or self._backward:
            samples, where = found
            return f"samples {samples}: {what}; {where}"
        where = "no module produced NaN or inf while they were observed"
        if self._num_forwards == 0:
            where = "which module was first is not known: a compiled model hides its modules"
        elif what.startswith("the loss"):
            where = "the model's output is finite, its loss is not: look at the labels"
        return f"samples {format_samples(self._batches)}: {what}; {where}"

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # Any: a user's arguments
        is_root = module is self._root
        if is_root:
            self._num_forwards += 1
            self._running.clear()
        for tensor in _tensors((args, kwargs)):
            if self._forward is None and _is_bad(tensor, allows_mask=not is_root):
                text = "the input itself is not finite"
                if not is_root:
                    first = f"produced the first {_kind(tensor)}, in its own forward, before"
                    text = f"{self._name(self._caller())} {first} {self._name(module)}"
                self._forward = self._samples(tensor), text
            # WHY also if it has one: a block passes its input on to its first layer
            self._note_user(tensor, self._name(module))
        self._running.append(module)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Check the output of a module. Any: a user's arguments and result."""
        if self._running:
            self._running.pop()
        for tensor in _tensors(output):
            if self._forward is None and _is_bad(tensor, allows_mask=True):
                text = f"{self._name(module)} produced the first {_kind(tensor)}, of finite inputs"
                own = module.named_parameters(recurse=False)
                bad = [name for name, value in own if not bool(value.isfinite().all())]
                text += f": its {' and '.join(bad)} had it already" if bad else ""
                self._forward = self._samples(tensor), text
            caller = self._name(self._caller())
            user = f"{caller}, for what it did after {self._name(module)},"
            self._note_user(tensor, "the loss" if module is self._root else user)

    def after_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._backward is None and parameter.grad is not None and _is_bad(parameter.grad):
            owner = self._root.get_submodule(name.rpartition(".")[0])
            text = f"in backward {self._name(owner)} produced the first {_kind(parameter.grad)}"
            self._backward = self._samples(), f"{text}, the gradient of {name}"

    def _note_user(self, tensor: torch.Tensor, user: str) -> None:
        """Note what uses a tensor, and so computes its gradient; watch that if it is new."""
        if tensor not in self._users:
            self._users[tensor] = []
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_back, self._users[tensor]))  # type: ignore[no-untyped-call]  # torch
        self._users[tensor].append(user)

    def _look_back(self, users: Sequence[str], gradient: torch.Tensor) -> None:
        if self._backward is None and _is_bad(gradient):
            text = f"in backward {users[-1]} produced the first {_kind(gradient)}"
            self._backward = self._samples(gradient), text

    def _caller(self) -> nn.Module:
        return self._running[-1] if self._running else self._root

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module, "")
        return f"{name or 'the model'} ({type(module).__name__})"

    def _samples(self, tensor: torch.Tensor | None = None) -> str:
        """Name the samples of a NaN or inf: those of its rows in tensor, if it has one for each."""
        batch = self._batches[min(self._num_forwards, len(self._batches)) - 1]
        if tensor is not None and tensor.dim() and len(tensor) == batch.num_samples:
            is_bad = ~tensor.detach().isfinite().reshape(len(tensor), -1).all(dim=1).cpu()
            if not is_bad.all():
                return str(batch.indices[is_bad][:NUM_SHOWN].tolist())
        return format_samples([batch])


@contextmanager
def watch(module: nn.Module, batches: Sequence[Batch]) -> Iterator[NonFiniteFinder]:
    """Watch all forwards and backwards of module inside, on batches. Rank-local."""
    finder = NonFiniteFinder(module, batches)
    with ExitStack() as hooks:  # ends each of them
        for part in module.modules():
            hooks.enter_context(part.register_forward_pre_hook(finder.before, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(finder.after, with_kwargs=True))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                look = partial(finder.after_gradient, name)
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]  # torch
        yield finder


def _tensors(value: Any) -> list[torch.Tensor]:  # Any: whatever a module takes or gives
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def _is_bad(tensor: torch.Tensor, *, allows_mask: bool = False) -> bool:
    """Return whether a tensor has NaN or inf; waits for the device.

    allows_mask: accept -inf in a tensor that needs no gradient, as in attention masks.
    """
    values = tensor.detach()
    if allows_mask and not tensor.requires_grad:
        return bool((values.isnan() | (values == float("inf"))).any())
    return not bool(values.isfinite().all())


def _kind(tensor: torch.Tensor) -> str:
    return "nan" if bool(tensor.detach().isnan().any()) else "inf"
