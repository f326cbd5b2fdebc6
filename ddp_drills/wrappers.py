"""The user's model and dataset, with hooks that inject faults at given moments.

    --model ddp_drills.wrappers:model --model_args '{inner: mlp, board: FOLDER}'

A hook on the optimizer knows the step, hooks on the model the phase. The model itself does not
change: the same names, the same numbers, so that its checkpoints can be compared.
"""

import functools
import os
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as hooks
from torch.utils.data import Dataset, get_worker_info

from ddp_drills import injectors
from ddp_drills.digest import digest_of
from ddp_drills.injections import DEPENDS_ON_PARTS, Board, Injection
from hardened_ddp.data.sources.datasets import build_data, prepare_data
from hardened_ddp.model.zoo import build_model
from hardened_ddp.ranks.launch import environment, read_launch
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.streams.planner import id_of
from hardened_ddp.streams.views import StreamView

BUFFER = "drill_average"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Moments:
    """Knows the current step of this process, and which faults are due."""

    def __init__(self, board: Board) -> None:
        launch = read_launch(environment())
        self.rank, self.world_size, self.board = launch.rank, launch.world_size, board
        self.step = 0  # optimizer steps done, over all starts; 0 before the first one of this start
        all_ranks = enumerate(board.injections())
        self._injections = {n: i for n, i in all_ranks if i.is_for(self.rank, self.world_size)}

    def has(self, kind: str) -> bool:
        return any(injection.kind == kind for injection in self._injections.values())

    def due(self, phase: str) -> list[tuple[int, Injection]]:
        """Return the faults whose moment is now, each once unless it lasts."""
        return [
            (number, injection)
            for number, injection in self._injections.items()
            if injection.phase == phase and self.step >= injection.step
            if self._take(number, injection)
        ]

    def bad_samples(self, index: int) -> list[Injection]:
        injections = [one for one in self._injections.values() if one.phase == "sample"]
        if not injections or self.board.has("cause removed"):
            return []
        # WHY from a step on: a sample that is bad from the start is found before the first step.
        may_choose = self.rank == self.world_size - 1 and self.step >= injections[0].step
        return injections if self.board.is_bad_sample(index, may_choose=may_choose) else []

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step. WHY by the optimizer's own count: a resumed run has it."""
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        self.step = max(counts, default=self.step + 1)

    def _take(self, number: int, injection: Injection) -> bool:
        is_new = self.board.claim(f"injected-{number}-{self.rank}")
        return not self.board.has("cause removed") if injection.lasts else is_new


@functools.cache
def moments_of(board: str) -> Moments:
    """Return the one Moments of this process: model and dataset are built separately."""
    return Moments(Board(Path(board)))


def model(
    board: str,
    num_classes: int = 0,
    input_shape: tuple[int, ...] = (),
    inner: str = "mlp",
    inner_args: Mapping[str, Any] | None = None,  # Any: the arguments of a callable
) -> nn.Module:
    """Build the model that inner names, with hooks. num_classes: 0 where the data has none."""
    config = ModelConfig(model=inner, model_args=inner_args or {})
    network = build_model(config, num_classes=num_classes, input_shape=tuple(input_shape))
    moments = moments_of(board)
    if moments.has("move a buffer"):
        network.register_buffer(BUFFER, torch.zeros(4))
    _watch_forward(network, moments)
    _watch_optimizer(network, moments)
    # WHY not atexit: a rank that multiprocessing started (run_with_python.py) ends without that
    Finalize(None, _leave_digest, args=(network, moments), exitpriority=0)
    return network


def dataset(
    train: bool,
    board: str,
    inner: Mapping[str, Any],  # Any: settings of the section data
    data_dir: str = "data",
) -> Any:  # Any: a dataset, or None
    """Open the dataset that inner describes; faults are injected when training samples are read."""
    config = DataConfig(**inner, data_dir=data_dir)
    # WHY here, on every rank: a dataset without a download must not leave a folder for it
    prepare_data(config)
    task = build_data(config)
    if not train:
        return task.test
    if isinstance(task.train, StreamView):
        return MisbehavingStream(task, task.train.stream, board)
    return Misbehaving(task, board)


class Misbehaving(Dataset[Any]):
    """A training set that injects faults when its samples are read."""

    def __init__(self, task: Any, board: str) -> None:  # Any: TaskData
        self.inner, self.board = task.train, board
        _describe(self, task)
        moments = moments_of(board)
        self.size = len(task.train) - len(moments.due("open"))
        if moments.due("start"):
            self.handle = lambda: None  # can't be pickled for another process

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:  # Any: a sample of the inner dataset
        is_worker = get_worker_info() is not None
        return _read(self, index, lambda: self.inner[index], is_worker=is_worker)


class MisbehavingStream:
    """A stream that injects faults when its samples are read."""

    def __init__(self, task: Any, stream: Any, board: str) -> None:  # Any: TaskData, a Stream
        self.stream, self.board, self.num_shards = stream, board, stream.num_shards
        self.main_pid = os.getpid()
        _describe(self, task)
        for name in ("sizes", "files", "splits_by_worker"):
            if (value := getattr(stream, name, None)) is not None:
                setattr(self, name, value)
        moments = moments_of(board)
        if moments.due("open"):  # it has a shard less than on the other ranks
            self.num_shards, self.sizes = self.num_shards - 1, None
        if moments.due("start"):
            self.handle = lambda: None  # as above

    def open(self, shard: int, *, epoch: int, state: Any) -> "MisbehavingReader":
        """Open a shard of the inner stream; state: (index of the next sample, its own state)."""
        index, inner = state or (0, None)
        samples = self.stream.open(shard, epoch=epoch, state=inner)
        return MisbehavingReader(self, shard, index, samples)


class MisbehavingReader:
    """Reads a shard, and injects faults. Has a state if the inner reader has one."""

    def __init__(self, stream: MisbehavingStream, shard: int, index: int, samples: Any) -> None:
        self.stream, self.shard, self.index, self.samples = stream, shard, index, iter(samples)
        if hasattr(self.samples, "state_dict"):
            self.state_dict = lambda: [self.index, self.samples.state_dict()]

    def __iter__(self) -> "MisbehavingReader":
        return self

    def __next__(self) -> Any:  # Any: a sample of the inner stream
        number = id_of(self.shard, self.index, self.stream.num_shards)
        self.index += 1
        is_worker = os.getpid() != self.stream.main_pid  # WHY: a stream sees no worker
        return _read(self.stream, number, lambda: next(self.samples), is_worker=is_worker)


def _describe(dataset: Any, task: Any) -> None:  # Any: one of the above, TaskData
    if task.num_classes:
        dataset.num_classes, dataset.classes = task.num_classes, list(task.class_names)
    for name in ("targets", "labels", "mixed"):
        if (value := getattr(task.train, name, None)) is not None:
            setattr(dataset, name, value)
    dataset.uses_randomness = getattr(task.train, "uses_randomness", True)
    if (collate := getattr(task.train, "collate_fn", None)) is not None:
        dataset.collate_fn = collate


def _read(dataset: Any, index: int, read: Callable[[], Any], *, is_worker: bool) -> Any:
    """Read a sample, with the faults that are due. Any: one of the above; a sample."""
    moments = moments_of(dataset.board)
    for number, injection in moments.due("worker" if is_worker else "data"):
        injectors.do(injection, moments, number)
    moments.step += is_worker  # WHY: a worker has no optimizer that counts steps
    sample = read()
    for injection in moments.bad_samples(index):
        sample = injectors.spoil(injection.kind, sample, getattr(dataset, "num_classes", 0))
    return sample


def _watch_forward(network: nn.Module, moments: Moments) -> None:
    first: list[torch.Tensor] = []  # the state of the generator at the start of a forward

    def before(module: nn.Module, inputs: Any) -> Any:
        if module.training and torch.is_grad_enabled() and len(first) < 2:
            first[:] = [_generator_state(module)]
        for number, injection in moments.due("forward" if module.training else "evaluation"):
            if injection.kind == "move a buffer":
                module.get_buffer(BUFFER).add_(moments.rank + 1)
            elif injection.kind == "normalise":
                inputs = injectors.normalise(inputs)
            else:
                injectors.do(injection, moments, number)
        return inputs

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        if len(first) == 1:
            first.append(_generator_state(module))
            if not torch.equal(*first) or any(isinstance(m, _NORMS) for m in module.modules()):
                moments.board.write(DEPENDS_ON_PARTS, True)
        for _, injection in moments.due("loss"):
            output = injectors.change_output(injection.kind, output)
        for tensor in injectors.tensors_of(output):
            tensor.register_hook(in_backward)  # type: ignore[no-untyped-call]  # torch
        return output

    def in_backward(gradient: torch.Tensor) -> torch.Tensor | None:
        done = [injectors.do(i, moments, n, gradient) for n, i in moments.due("backward")]
        return done[-1] if done else None

    def after_layer(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.detach() if module.training and moments.due("layer") else None

    network.register_forward_pre_hook(before)
    network.register_forward_hook(after)
    injectors.first_layer(network).register_forward_hook(after_layer)


def _generator_state(module: nn.Module) -> torch.Tensor:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _watch_optimizer(network: nn.Module, moments: Moments) -> None:
    def before(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        for number, injection in moments.due("optimizer"):
            injectors.do(injection, moments, number)

    def after(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        moments.count(optimizer)
        for _, injection in moments.due("update"):
            injectors.change_weights(injection.kind, network)

    hooks.register_optimizer_step_pre_hook(before)
    hooks.register_optimizer_step_post_hook(after)


def _leave_digest(network: nn.Module, moments: Moments) -> None:
    """Write the hash of all weights for the drill, which compares the replicas. At the end."""
    moments.board.write(f"digest-{moments.rank}", digest_of(network.state_dict()))
