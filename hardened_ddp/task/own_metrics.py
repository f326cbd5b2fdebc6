"""Metrics of the test set that the user brings: objects with update, compute and reset.

Owns calling them so that each test sample counts once on any number of ranks: rank 0 has the only
objects that count, and the other ranks send it the output and the labels of each batch.
WHY not merge their states: only their author knows how, and a wrong merge looks like a number. It
costs sending the outputs, in evaluations only, and only with --metrics.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.foreign_code import import_callable, told_as
from hardened_ddp.errors import ConfigError, ModelError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import keeping_random_state
from hardened_ddp.task.output import split_output
from hardened_ddp.task.task import Metric

_METHODS = ("update", "compute", "reset")


class OwnMetrics:
    """The metrics of --metrics, by name."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """given: for each name package.module:Class, or {class: that, argument: value}.

        Raises ConfigError.
        """
        self._objects = {name: _built(name, how) for name, how in given.items()}
        self.metrics = tuple(
            Metric(name, is_higher_better=getattr(found, "higher_is_better", True) is not False)
            for name, found in self._objects.items()
        )

    def __bool__(self) -> bool:
        return bool(self._objects)

    def reset(self) -> None:
        for metric in self._objects.values():
            metric.reset()

    def check(self, output: Any, batch: Batch) -> None:
        """Try each metric on the first batch. Raises ModelError if it can't be used."""
        if not self:
            return
        pair = self._pair(output, batch)
        for name in self._objects:
            with keeping_random_state():
                self._update(name, *pair)
                self._compute(name)
                self._objects[name].reset()

    def add(self, output: Any, batch: Batch | None, group: Group) -> None:
        """Count one batch of each rank; None: this rank has none. Collective: all ranks."""
        mine = [] if batch is None else list(self._pair(output, batch))
        for pair in _gathered(mine, group):  # collective
            if pair and group.is_main:
                for name in self._objects:
                    self._update(name, *pair)

    def compute(self, group: Group) -> dict[str, float]:
        """Return the value of each metric over all samples. Collective: all ranks."""
        mine = {name: self._compute(name) for name in self._objects} if group.is_main else {}
        found: dict[str, float] = group.gather_json(mine)[0]  # collective
        return found

    def _pair(self, output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the labels of a batch, as the metrics get them."""
        logits, loss = split_output(output)
        found = loss if logits is None else logits
        if found is None or not isinstance(batch.targets, torch.Tensor):
            raise ModelError(
                "--metrics needs an output with logits and labels that are tensors",
                fix="return logits from the model, or leave --metrics out",
            )
        return found.detach(), batch.targets

    def _update(self, name: str, output: torch.Tensor, labels: torch.Tensor) -> None:
        metric = self._objects[name]
        shapes = f"output {tuple(output.shape)}, labels {tuple(labels.shape)}"
        fix = "it gets the logits of a batch and its labels; convert them in update()"
        with told_as(ModelError, f"metric {name}: update({shapes}) failed", fix=fix):
            if callable(getattr(metric, "to", None)):  # its state, to where the output is
                metric.to(output.device)
            metric.update(output, labels)

    def _compute(self, name: str) -> float:
        what = f"metric {name}: compute() did not return a number"
        with told_as(ModelError, what, fix="return one number from compute()"):
            return float(self._objects[name].compute())


def _built(name: str, how: Any) -> Any:  # Any: the user's class
    """Build a metric from package.module:Class, or {class: that, argument: value}."""
    arguments = dict(how) if isinstance(how, Mapping) else {"class": how}
    path = arguments.pop("class", None)
    if not isinstance(path, str) or ":" not in path:
        raise ConfigError(
            f"metrics: {name} is {how!r}; need package.module:Class",
            fix="--metrics '{NAME: package.module:Class}'",
        )
    build = import_callable(path, setting="metrics", error=ConfigError)
    fix = "give its arguments: --metrics '{NAME: {class: package.module:Class, argument: value}}'"
    with told_as(ConfigError, f"metrics: {path} can't be built with {arguments}", fix=fix):
        found = build(**arguments)
    missing = [m for m in _METHODS if not callable(getattr(found, m, None))]
    if missing or inspect.isclass(found):
        raise ConfigError(
            f"metrics: {path} returned a {type(found).__name__} without {', '.join(missing)}",
            fix="name a class with update(output, labels), compute() and reset()",
        )
    for part in found.modules() if isinstance(found, nn.Module) else [found]:
        if hasattr(part, "distributed_available_fn"):
            # WHY: a metric of torchmetrics, and those in it, would run a collective in compute(),
            # but only rank 0 computes, and it has every sample: it would wait forever
            part.distributed_available_fn = lambda: False
    return found


def _gathered(tensors: list[torch.Tensor], group: Group) -> list[list[torch.Tensor]]:
    """Return the tensors of each rank, in the order of the ranks. Collective: all ranks."""
    if group.world_size == 1:
        return [tensors]
    mine = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    everyone = []
    for rank, layout in enumerate(group.gather_json(mine)):  # collective
        found = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            for dtype, shape in layout
        ]
        found = tensors if rank == group.launch.rank else found
        for tensor in found:
            if tensor.numel():
                # WHY bytes: gloo does not move every dtype.
                group.broadcast_(tensor.reshape(-1).view(torch.uint8), source=rank)  # collective
        everyone.append(found)
    return everyone
