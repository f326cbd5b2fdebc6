"""Observes steps, backwards, scales of losses, clipping: what ranks must have in common.

A sampled step has fingerprints of all gradients and parameters. The first ones are sampled, then
every 2^k-th: a power of two, so that ranks with other costs have sampled steps in common.
"""

import itertools
import sys
import time
import weakref
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddp_doctor.audit.injected.collectives import Collectives
from ddp_doctor.audit.injected.fingerprints import UNREADABLE, fingerprints
from ddp_doctor.audit.injected.loaders import Loaders, generator_states
from ddp_doctor.audit.injected.recorder import (
    Foreign,
    Hook,
    Recorder,
    Window,
    given_numbers,
    is_called_from,
    user_frames,
    user_line,
)
from ddp_doctor.audit.injected.replicas import Replicas

FIRST_STEPS = 4  # all of them are sampled; then only as many as cost little
STILL_AT = (4, 16, 48)
"""Steps after which parameters that did not move are listed."""

BY_HAND_AT = (3, 6, 12, 24, 48, 96)
"""Numbers of backwards after which weights are looked at that no torch optimizer moves."""

MAX_FACTORS = 8
_SHARDING = ("deepspeed", "megatron.core", "colossalai")
"""Libraries that give each rank other parts of the model."""

_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "transformers.trainer")
MAX_NODES = 40
MEAN, SUM, REDUCED, UNKNOWN = "mean", "sum", "reduced", "unknown"
_PASSES_ON = tuple(
    f"{name}Backward"
    for name in ("Clone", "View", "Alias", "ToCopy", "Squeeze", "Unsqueeze", "Expand", "Detach")
)
_REDUCES = ("LossBackward", "CrossEntropyWithLogits", "BinaryCrossEntropy", "KlDiv")
MAX_RECORDS = 40
UNLIMITED = 1e6  # a limit that clips no gradient: the norm is only asked for
FEW_DRAWS = 4
"""Random numbers: so few are a decision, which ranks may share; more are noise."""

NUM_PROBES, NUM_VALUES = 3, 8
MAX_EVERY = 256
SAMPLING_SHARE = 0.03
"""Of the time of a step: more than that, and fewer steps are sampled."""

LOOKS_COST = 2
"""Times the fingerprints' cost: that of all looks at a sampled step."""


@dataclass(slots=True)
class Optimizer:
    """What is known of one optimizer."""

    line: str
    number: int = -1
    num_steps: int = 0
    layout: list[int] = field(default_factory=list)
    """Parameters of each group, when they were described."""

    first: list[Foreign] = field(default_factory=list)
    """Fingerprints of its parameters before its first step."""

    num_backwards: int = 0
    num_zero: int = 0
    """Backwards since its last step, and how many of them began with empty gradients."""

    last_values: list[float] | None = None
    """A few numbers of the gradients as the last backward left them."""


class Training:
    """The optimizers, backwards, loss scalers and clippings of one process."""

    def __init__(
        self, recorder: Recorder, loaders: Loaders, replicas: Replicas, collectives: Collectives
    ) -> None:
        self._recorder, self._loaders, self._replicas = recorder, loaders, replicas
        self._collectives = collectives
        collectives.owner_of = self.owner_of
        self._optimizers = weakref.WeakKeyDictionary[Foreign, Optimizer]()
        self._num_described = 0
        self._held: set[int] = set()  # ids of parameters of all optimizers, also of those gone
        self._every = 1
        self._inside: Foreign = None
        self._num_total = 0
        self._last_step_at = self._last_cpu_s = 0.0
        self._step_began_at = self._backward_before_s = 0.0
        self._backward_line = self._zero_line = ""
        self._schedule_lines: set[str] = set()
        self._planned = weakref.WeakKeyDictionary[Foreign, dict[str, Foreign]]()
        self._schedules: list[dict[str, Foreign]] = []
        self._weights_before: list[Foreign] = []
        self._amp_scale, self._is_scaled = 1.0, False
        self._num_clips = self._num_metrics = 0

    def hooks(self) -> list[Hook]:
        """Say what is observed beside the steps: of a schedule, those planned and made."""
        optimizer, schedules = "torch.optim.optimizer", "torch.optim.lr_scheduler"
        scaler, clipping = "torch.amp.grad_scaler", "torch.nn.utils.clip_grad"
        load = self._recorder.line_as("load_optimizer")
        lightning = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
        return [
            *(Hook(name, "LightningModule.log", self._note_metric) for name in lightning),
            Hook(optimizer, "Optimizer.__init__", after=self._note_made),
            Hook(optimizer, "Optimizer.zero_grad", self._note_zero),
            Hook(optimizer, "Optimizer.load_state_dict", load),
            Hook("torch.autograd", "backward", self._before_backward, self._after_backward),
            Hook(schedules, "LRScheduler.step", after=self._note_schedule),
            Hook(schedules, "ReduceLROnPlateau.step", after=self._note_schedule),
            Hook(schedules, "LRScheduler.__init__", self._note_planned),
            Hook(scaler, "GradScaler.scale", self._note_scale),
            Hook(scaler, "GradScaler.unscale_", self._note_unscaled),
            Hook(scaler, "GradScaler.step", self._note_unscaled),
            Hook(clipping, "clip_grad_norm_", self._note_clip),
            Hook(clipping, "clip_grad_value_", self._note_clip),
        ]

    def patch_optimizer(self, module: Foreign) -> None:
        """Patch torch.optim.optimizer with its own global hooks."""
        module.register_optimizer_step_pre_hook(self._recorder.guarded(self._before_step))
        module.register_optimizer_step_post_hook(self._recorder.guarded(self._after_step))

    def _note_zero(self, *args: Any, **kwargs: Any) -> None:
        if self._recorder.window.is_sampled:
            self._zero_line = user_line()

    def _note_planned(self, schedule: Foreign, *args: Any, **kwargs: Any) -> None:
        calls = list(given_numbers())
        self._planned[schedule] = {"line": user_line(), "calls": calls, "steps": 0, "horizon": 0}
        self._schedules.append(self._planned[schedule])

    def _note_schedule(self, token: Foreign, result: Foreign, schedule: Foreign) -> None:
        line, plan = user_line(), self._planned.get(schedule)
        is_made = plan is not None and plan["line"] == line  # its first step is its own
        if line not in self._schedule_lines and not is_made:
            self._schedule_lines.add(line)
            self._recorder.emit("schedule", line=line)
        if plan is not None:
            plan["steps"], plan["step_line"] = schedule.last_epoch, line
            plan["horizon"] = plan["horizon"] or horizon_of(schedule)

    def schedules(self) -> list[dict[str, Foreign]]:
        return [plan | {"line": _planned_at(plan)} for plan in self._schedules if plan["horizon"]]

    def _note_made(self, token: Foreign, result: Foreign, optimizer: Foreign) -> None:
        self._optimizers[optimizer] = Optimizer(user_line())
        self._held |= {id(p) for p in parameters_of(optimizer)}

    def _before_step(self, optimizer: Foreign, args: Foreign, kwargs: Foreign) -> None:
        if makes_state():
            return
        began, window = self._recorder.clock(), self._recorder.window
        if self._inside is not None and self._inside is not optimizer:
            return  # a step inside a step (ZeroRedundancyOptimizer): only the outer one counts
        self._inside = optimizer
        self._recorder.is_rank = True
        known = self._optimizers.get(optimizer)
        if known is None:
            known = self._optimizers[optimizer] = Optimizer(user_line())
        if known.layout != (layout := [len(g["params"]) for g in optimizer.param_groups]):
            known.layout = layout  # it is new, or has other parameters than before
            self._describe(optimizer, known)
        known.num_steps += 1
        if window.is_sampled:
            self._weights_before = fingerprints(probes_of(parameters_of(optimizer)))
        self._step_began_at = self._recorder.clock()
        self._backward_before_s = window.times["backward_s"]
        window.times["own_s"] += self._step_began_at - began

    def _describe(self, optimizer: Foreign, known: Optimizer) -> None:
        parameters, names = parameters_of(optimizer), self._replicas.names()
        averaged = self._replicas.averaged()
        known.first = fingerprints(parameters)
        known.number, self._num_described = self._num_described, self._num_described + 1
        self._recorder.emit(
            "optimizer",
            o=known.number,
            line=known.line,
            names=[names.get(id(p), "") for p in parameters],
            shapes=["x".join(map(str, p.shape)) for p in parameters],
            made=[self._replicas.made_at.get(id(p), "") for p in parameters],
            in_ddp=[int(id(p) in averaged) for p in parameters],
            trainable=[int(p.requires_grad) for p in parameters],
            is_sharded=any(is_sharded(p) for p in parameters)
            or any(n in sys.modules for n in _SHARDING)
            or self._replicas.leave_out_some(),
            first=known.first,
            frameworks=[name for name in _FRAMEWORKS if name in sys.modules],
        )

    def _after_step(self, optimizer: Foreign, args: Foreign, kwargs: Foreign) -> None:
        if self._inside is not optimizer:
            return
        self._inside = None
        if (known := self._optimizers.get(optimizer)) is None:
            return
        ended, window = self._recorder.clock(), self._recorder.window
        wall_s = ended - self._last_step_at if self._last_step_at else None
        inner_s = window.times["backward_s"] - self._backward_before_s
        # WHY CPU time, of this thread: on a busy machine the clock shows what others do
        is_first = known.num_steps <= FIRST_STEPS
        step_cpu_s = time.process_time() - self._last_cpu_s if is_first else 0.0
        began_cpu_s = time.thread_time() if is_first else 0.0
        fields = self._sample(optimizer, known) if window.is_sampled else {}
        line, loader = user_line(), (self._loaders.current or (-1, 0))[0]
        if known.num_steps == FIRST_STEPS and wall_s:
            used_s = time.thread_time() - began_cpu_s
            self._every = sampling_interval(used_s, step_s=min(wall_s, step_cpu_s))
        self._recorder.emit(
            "step",
            o=known.number,
            n=known.num_steps,
            line=line,
            lr=[float(g["lr"]) for g in optimizer.param_groups if "lr" in g],
            of=self._loaders.current,
            batches=window.batches[loader],
            backwards=window.backwards,
            backward_line=self._backward_line,
            backward_lines=window.backward_lines,
            wall_s=None if wall_s is None else round(wall_s, 6),
            optimizer_s=round(ended - self._step_began_at - inner_s, 6),
            has_closure=inner_s > 0,
            **{name: round(seconds, 6) for name, seconds in window.times.items()},
            trains=window.trains,
            eval_line=self._replicas.eval_line,
            **fields,
        )
        self._begin_next(known)

    def _begin_next(self, known: Optimizer) -> None:
        known.num_backwards, known.num_zero, known.last_values = 0, 0, None
        upcoming = known.num_steps + 1
        is_sampled = upcoming <= FIRST_STEPS or upcoming % self._every == 0
        self._recorder.window = Window(is_sampled)
        self._recorder.progress += 1
        self._last_step_at = self._recorder.clock()
        self._last_cpu_s = time.process_time() if upcoming <= FIRST_STEPS else 0.0

    def _sample(self, optimizer: Foreign, known: Optimizer) -> dict[str, Foreign]:
        parameters, window = parameters_of(optimizer), self._recorder.window
        # WHY gradients after the step: with a closure (Lightning, LBFGS) backward runs inside it.
        both = fingerprints([p.grad for p in parameters] + parameters)
        gradients, weights = both[: len(parameters)], both[len(parameters) :]
        if known.num_steps in STILL_AT:
            self._emit_still(optimizer, known, gradients, weights)
        local, values = known.last_values, probe_values(parameters)
        return {
            "g": gradients,
            "w": weights,
            "before": self._weights_before,
            "buffers": self._replicas.buffers(),
            "inputs": window.inputs,
            "forward_line": self._replicas.forward_line,
            "lines": self._replicas.lines(),
            "factors": window.factors,
            "amp_scale": self._amp_scale,
            "ratio": ratio(local, values),
            "values": None if self._replicas.living() else [local, values],
            "num_zero": known.num_zero,
            "num_looks": known.num_backwards,
            "reduced_line": window.reduced_line,
            "zero_line": self._zero_line,
            "drawn": window.drawn,
        }

    def _emit_still(
        self, optimizer: Foreign, known: Optimizer, gradients: list[Foreign], weights: list[Foreign]
    ) -> None:
        """List parameters that have gradients, and did not move although they should have."""
        rates = [float(g.get("lr", 1)) for g in optimizer.param_groups for _ in g["params"]]
        still = []
        for i, parameter in enumerate(parameters_of(optimizer)):
            if gradients[i] in (None, 0, UNREADABLE) or weights[i] != known.first[i]:
                continue
            # WHY: rounding may keep a parameter with tiny gradients, as a bias before BatchNorm
            size = parameter.detach().abs().max().clamp_min(1e-30)
            if rates[i] == 0 or rates[i] * float(parameter.grad.abs().max() / size) > 1e-6:
                still.append([i, rates[i]])
        self._held |= {id(p) for p in self._parameters()}
        names = self._replicas.names()
        orphans = [
            names.get(id(p), "")
            for ddp in self._replicas.living()
            for p in ddp.module.parameters()
            if p.requires_grad and id(p) not in self._held
        ]
        self._recorder.emit("still", o=known.number, still=still, orphans=orphans)

    def _before_backward(self, tensors: Foreign, *args: Any, **kwargs: Any) -> float:
        began, window = self._recorder.clock(), self._recorder.window
        self._num_total += 1
        self._recorder.progress += 1
        counts = self._replicas.count_backward()
        window.backwards.update(counts, all=1)
        window.backwards["ends_quiet"] = int(counts["no_sync"] > 0)
        self._backward_line = user_line()
        window.backward_lines[self._backward_line] += 1
        if window.is_sampled:
            self._look(tensors, window)
        if self._num_total in BY_HAND_AT:
            self._look_by_hand()
        now = self._recorder.clock()
        window.times["own_s"] += now - began
        return now

    def _look(self, tensors: Foreign, window: Window) -> None:
        loss = tensors if hasattr(tensors, "grad_fn") else tensors[0] if len(tensors) == 1 else None
        if loss is not None and len(window.factors) < MAX_FACTORS:
            node, world = getattr(loss, "grad_fn", None), self._collectives.world_size
            window.factors.append(_factor_of(node, MAX_NODES, window.reduced, world))
        window.reduced_line = window.reduced_line or _matching_line(window.reduced)
        window.drawn = window.drawn or drawn_since(self._loaders.states)
        self._loaders.states = []
        for optimizer, known in list(self._optimizers.items()):
            known.num_backwards += 1
            probes = probes_of(parameters_of(optimizer))
            if all(p.grad is None or not bool(p.grad.any()) for p in probes):
                known.num_zero += 1

    def _look_by_hand(self) -> None:
        """Look at weights that may be moved without an optimizer of torch."""
        living = self._replicas.living()
        if living and not any(known.num_steps for known in self._optimizers.values()):
            named = [pair for ddp in living for pair in ddp.module.named_parameters()]
            self._recorder.emit(
                "by_hand",
                n=self._num_total,
                names=[name for name, _ in named],
                w=fingerprints([parameter for _, parameter in named]),
                line=self._backward_line,
            )

    def _after_backward(self, began: float, *args: Any, **kwargs: Any) -> None:
        ended, window = self._recorder.clock(), self._recorder.window
        window.times["backward_s"] += ended - began
        if window.is_sampled and self._inside is None:
            for optimizer, known in list(self._optimizers.items()):
                known.last_values = probe_values(parameters_of(optimizer))
            window.times["own_s"] += self._recorder.clock() - ended

    def _note_scale(self, scaler: Foreign, *args: Any) -> None:
        if scaler.is_enabled():
            self._is_scaled = True
            if self._recorder.window.is_sampled and (scale := float(scaler.get_scale())):
                self._amp_scale = scale

    def _note_unscaled(self, scaler: Foreign, *args: Any, **kwargs: Any) -> None:
        self._is_scaled = False

    def _note_clip(self, parameters: Foreign, *args: Any, **kwargs: Any) -> None:
        # WHY not the parameters: they may be a generator, which can be read only once
        measures = (*args, kwargs.get("max_norm", 0))[0] >= UNLIMITED
        if measures or not self._recorder.window.is_sampled or self._num_clips >= MAX_RECORDS:
            return
        self._num_clips += 1
        optimizers = list(self._optimizers.values())
        self._recorder.emit(
            "clip",
            is_scaled=self._is_scaled and self._amp_scale != 1.0,
            scale=self._amp_scale,
            next_steps={o.number: o.num_steps + 1 for o in optimizers},
            num_backwards=max((o.num_backwards for o in optimizers if o.num_steps), default=1),
            g=fingerprints([p.grad for p in self._parameters()]),
            line=user_line(),
        )

    def _note_metric(
        self, module: Foreign, name: str, value: Foreign, *args: Any, **kwargs: Any
    ) -> None:
        """Record what Lightning is told in an evaluation, and picks a checkpoint or the end by."""
        joins = (*args[6:7], kwargs.get("sync_dist"), kwargs.get("rank_zero_only"))
        is_picked = any(getattr(c, "monitor", None) == name for c in module.trainer.callbacks)
        is_own = not any(joins) and not hasattr(value, "compute")  # torchmetrics join themselves
        if is_picked and is_own and module.trainer.validating and self._num_metrics < MAX_RECORDS:
            self._num_metrics += 1
            text = f"{float(value):.6g}"
            self._recorder.emit("metric", line=user_line(), name=name, value=text)

    def _parameters(self) -> list[Foreign]:
        return [p for optimizer in list(self._optimizers) for p in parameters_of(optimizer)]

    def owner_of(self, tensor: Foreign) -> str:
        """Say whether a tensor is a weight or a gradient of an optimizer, by its place."""
        with suppress(RuntimeError):  # it has no storage
            place = tensor.data_ptr()
            for parameter in self._parameters():
                if parameter.data_ptr() == place:
                    return "weights"
                if parameter.grad is not None and parameter.grad.data_ptr() == place:
                    return "gradients"
        return ""

    def forget(self) -> None:
        self._optimizers.clear()


def horizon_of(schedule: Foreign) -> int:
    """Give the number of steps that a schedule of learning rates is planned for; 0: nobody knows.

    A function's plan is the largest number that it uses, as in lambda s: 1 - s / total_steps.
    """
    rises = getattr(schedule, "start_factor", 1) < getattr(schedule, "end_factor", 1)
    if rises or hasattr(schedule, "factor"):
        return 0  # a warm-up
    found = [getattr(schedule, name, 0) for name in ("T_max", "total_steps", "total_iters")]
    for function in getattr(schedule, "lr_lambdas", ()):
        found.append(getattr(function, "keywords", {}).get("num_training_steps"))  # transformers
        if code := getattr(function, "__code__", None):
            found += [function.__globals__.get(name) for name in code.co_names]
            found += [cell.cell_contents for cell in function.__closure__ or ()]
    return max((int(n) for n in found if type(n) in (int, float)), default=0)


def _planned_at(plan: dict[str, Foreign]) -> Foreign:
    """Give the line that chose a schedule's number of steps: the caller of a helper that got it."""
    line = plan["line"]
    for (_, numbers), (caller, _) in itertools.pairwise(plan["calls"]):
        if plan["horizon"] not in numbers:
            break
        line = caller
    return line


def drawn_since(states: list[Foreign]) -> str:
    """Hash the states from which random numbers were drawn; empty if none were, or only a few."""
    import torch

    now = generator_states() if states else []
    if all(map(torch.equal, states, now)):
        return ""
    generator = torch.Generator()
    generator.set_state(states[0])
    for _ in range(FEW_DRAWS):
        torch.rand((), generator=generator)
        if torch.equal(generator.get_state(), now[0]):
            return ""
    return "".join(f"{zlib.crc32(state.numpy()):08x}" for state in states)


def _matching_line(reduced: dict[Foreign, list[Foreign]]) -> str:
    """Give the line of an all-reduced loss: in the function that calls backward, if it is there."""
    functions = {(line.rpartition(":")[0], name) for line, name, _ in user_frames()}
    for frames in reduced.values():
        for line, name, _ in frames:
            if (line.rpartition(":")[0], name) in functions:
                return str(line)
    return ""


def _factor_of(
    node: Foreign, left: int, reduced: Collection[Foreign], world: int
) -> tuple[float, str]:
    """Give the factor of a loss, and what it scales: MEAN, SUM, REDUCED or UNKNOWN.

    REDUCED: a value that is all-reduced already. Its own backward adds up the ranks' gradients.
    The nodes between the loss and its reduction are multiplications and divisions by plain numbers;
    their product is the factor. Whatever else stands there makes the answer unknown.
    """
    if node is None or left <= 0:
        return 1.0, UNKNOWN
    name = node.name().split("::")[-1]
    if node in reduced:
        return 1.0, REDUCED
    if name == "_AllReduceBackward" or "functional_all_reduce" in name:
        return float(world), REDUCED
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    if name.startswith("MeanBackward"):
        return 1.0, MEAN
    if any(word in name for word in _REDUCES):
        reduction: Foreign = getattr(node, "_saved_reduction", None)
        return 1.0, {1: MEAN, 2: SUM}.get(reduction, UNKNOWN)
    if name.startswith("SumBackward"):
        return 1.0, SUM
    if name.startswith("AddBackward") and parents:
        # Of a sum of losses the part with the largest factor is the main one.
        read = (_factor_of(parent, left - 1, reduced, world) for parent in parents)
        return max(read, key=lambda found: abs(found[0]))
    if len(parents) != 1:
        return 1.0, UNKNOWN
    if name.startswith(_PASSES_ON) or "wait_tensor" in name:
        return _factor_of(parents[0], left - 1, reduced, world)
    if name.startswith(("MulBackward", "DivBackward")):
        number = _number_of(getattr(node, "_saved_other", None))
        if number:
            factor, kind = _factor_of(parents[0], left - 1, reduced, world)
            number = number if name.startswith("Mul") else 1 / number
            terms = _num_terms(parents[0], left)
            is_mean = terms > 1 and kind == MEAN and abs(number * terms - 1) < 1e-6
            return factor * number, UNKNOWN if is_mean else kind
    return 1.0, UNKNOWN


def _num_terms(node: Foreign, left: int) -> int:
    """Count the losses that are added up: a division by their number makes their mean."""
    if left <= 0 or "AddBackward" not in node.name():
        return 1
    return sum(_num_terms(parent, left - 1) for parent, _ in node.next_functions if parent)


def _number_of(value: Foreign) -> float | None:
    """Give a saved scalar as a float; None if it is no plain number."""
    if value is not None and hasattr(value, "numel"):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def parameters_of(optimizer: Foreign) -> list[Foreign]:
    """List the parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def probes_of(parameters: list[Foreign]) -> list[Foreign]:
    """Take a few parameters from all over the model."""
    every = max(1, len(parameters) // NUM_PROBES)
    return parameters[::every][:NUM_PROBES]


def probe_values(parameters: list[Foreign]) -> list[float]:
    """Give a few numbers of the gradients of the probes."""
    values: list[float] = []
    for parameter in probes_of(parameters):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and not is_sharded(parameter):
            values += gradient.detach().reshape(-1)[:NUM_VALUES].tolist()
    return values


def ratio(before: list[float] | None, after: list[float]) -> float | None:
    """Give the factor between two lists of numbers; None if there is none for all of them."""
    if not before or len(before) != len(after):
        return None
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if abs(b) > 1e-12]
    if not pairs:
        return None
    first = pairs[0][1] / pairs[0][0]
    is_same = all(abs(a / b - first) <= 1e-4 * abs(first) for b, a in pairs)
    return round(first, 7) if is_same else None


def is_sharded(parameter: Foreign) -> bool:
    """Whether each rank has another part of it: under FSDP, whose parameters look plain, too."""
    is_part = hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_is_flat_param")
    return is_part or "DTensor" in {base.__name__ for base in type(parameter).__mro__}


def makes_state() -> bool:
    """Whether torch.distributed.checkpoint steps: with rate 0, for a state that it can load."""
    module = "torch.distributed.checkpoint.state_dict"  # WHY it first: to walk the stack costs more
    return module in sys.modules and is_called_from(module.replace(".", "/") + ".py")


def sampling_interval(used_s: float, *, step_s: float) -> int:
    """Say that every n-th step is sampled, a power of two, if the fingerprints take used_s."""
    every = 1
    while every < MAX_EVERY and LOOKS_COST * used_s > every * SAMPLING_SHARE * step_s:
        every *= 2
    return every
