"""The exponential moving average of the weights: --ema.

Owns the averages: of the trained parameters, and of the floating-point buffers that a forward moves
(the statistics of a BatchNorm). Averaged outside of forward, after an update: so a step that is
retried, or left out, or skipped by fp16's scaler, is averaged once or not at all. How much a new
value counts follows from the step alone, so a checkpoint needs the averages and no counter.
Read next: step/step.py, which calls update; training/evaluation.py, which measures the averages.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from hardened_ddp.errors import ModelError

AVERAGE = "average."
"""Begins the names of averages in a checkpoint; the name in the model follows."""

_WARM_UP = 10
"""How slowly the decay rises to its value: (1 + step) / (10 + step), as TensorFlow's does."""


class WeightAverage:
    """The averages of one model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        trained: Mapping[str, nn.Parameter],
        moving: Collection[str],
        decay: float,
        every: int,
    ) -> None:
        """trained: the parameters that the optimizer updates. moving: names of moving buffers."""
        self.decay, self.every = decay, every
        self._model = model
        ids = {id(parameter) for parameter in trained.values()}
        live = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in ids or (name in moving and tensor.is_floating_point())
        }
        if half := [f"{n} is {t.dtype}" for n, t in live.items() if t.element_size() < 4]:
            raise ModelError(
                f"--ema: {half[0]}, which rounds away what one step adds to an average",
                fix="keep the weights in float32: --amp bf16 computes in 16 bits all the same",
            )
        # WHY by id: tied weights have two names and one average.
        copies = {id(tensor): tensor.detach().clone() for tensor in live.values()}
        self._averages = {name: copies[id(tensor)] for name, tensor in live.items()}
        self._names = list({id(tensor): name for name, tensor in live.items()}.values())
        self.is_in_model = False  # model and averages are exchanged: see in_model

    def __str__(self) -> str:
        size_mib = sum(self._averages[name].nbytes for name in self._names) / 2**20
        return f"averages of {len(self._names)} tensors (--ema, {size_mib:.1f} MiB)"

    @torch.no_grad()
    def update(self, step: int, skipped: torch.Tensor | None = None) -> None:
        """Average the weights after an update. Rank-local; does not wait for the device.

        step: steps done. skipped: on the device, 1.0 if the update changed nothing; then the
        averages must not change either.
        """
        if step % self.every:
            return
        # With ema_every the same decay per step.
        new = 1 - min(self.decay, (1 + step) / (_WARM_UP + step)) ** self.every
        averages, live = [self._averages[name] for name in self._names], self._live()
        if skipped is None:
            torch._foreach_lerp_(averages, live, new)
            return
        # WHY where: of weights that don't change, a mean with the average would still move it.
        share = torch.where(skipped.bool(), 0.0, new)
        for average, tensor in zip(averages, live, strict=True):
            average.lerp_(tensor, share.to(average.dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by their names in a checkpoint. Nothing is copied.

        While the averages are in the model, also the model's own weights.
        """
        kept = {name: tensor.detach() for name, tensor in self._averages.items()}
        found = {}
        if self.is_in_model:
            found = {f"model.{name}": tensor for name, tensor in kept.items()}
            state = self._model.state_dict()
            kept = {name: state[name] for name in kept}
        return found | {f"{AVERAGE}{name}": tensor for name, tensor in kept.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take averages by the weights' names; without any, begin with the weights as they are."""
        for name, tensor in zip(self._names, self._live(), strict=True):
            self._averages[name].copy_(tensors.get(name, tensor))

    @contextlib.contextmanager
    def in_model(self, lock: threading.Lock) -> Iterator[None]:
        """Exchange model and averages within the context; nothing is copied.

        lock: held while they are exchanged: another thread that saves holds it.
        """
        self._exchange(lock)
        try:
            yield
        finally:
            self._exchange(lock)

    def _exchange(self, lock: threading.Lock) -> None:
        with lock:
            for name, tensor in zip(self._names, self._live(), strict=True):
                average = self._averages[name]
                tensor.data, average.data = average.data, tensor.data
            self.is_in_model = not self.is_in_model

    def _live(self) -> list[torch.Tensor]:
        # WHY each time: a model may replace a buffer
        places = (name.rpartition(".") for name in self._names)
        return [getattr(self._model.get_submodule(owner), leaf) for owner, _, leaf in places]
