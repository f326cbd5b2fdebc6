"""Whether padded micro-batches are run in two parts, their shorter and their longer samples.

Only on the CPU, and where a trial shows that padding changes neither loss nor gradient. WHY no
measurement of time: two runs of one seed should agree bit for bit; a resumed run keeps its choice.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from hardened_ddp.data.batches.batch import Batch, cut_by_length
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial, try_on_all_ranks
from hardened_ddp.settings.config import Config
from hardened_ddp.task.tokens import Tokens

log = logging.getLogger(__name__)

# Values that a module's output must lose on average to pay for calling it a second time. Measured
# with 45 models and batches: 1.0 to 1.9 times as fast from there on, down to 0.6 times below.
_LEAST_OUTPUT = 30_000
_TOLERANCE = 1e-4  # of fp32 sums; padding that matters changes them by 1e-2 and more


def choose_least_padding(
    trial: Trial,
    samples: Sequence[Batch],
    findings: Findings,
    *,
    config: Config,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
) -> int:
    """Return how many places of padding a cut must leave out; 0: no cuts. Collective: all ranks.

    samples: small batches as the loader makes them. saved: of the run that is resumed.
    """
    if saved is not None:
        return int(saved.get("least_padding", 0))
    task, model, calls = trial.task, trial.model, findings.collectives
    # WHY nothing that moves: the samples' lengths would say how often it does.
    moves = findings.moving_buffers or findings.own_tensors or trial.attributes.watched
    is_fixed = config.model.compile or trial.group.device.type != "cpu"
    # WHY no recurrent ones: they go through time step by step, or know the lengths already.
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    has_reason = moves or calls or calls.in_evaluation or is_fixed or is_recurrent
    if has_reason or not isinstance(task, Tokens):
        return 0

    run = partial(_run, task, model)

    def needed(batch: Batch, effects: Effects) -> int:
        """Return the least padding; -1: padding matters; 0: there is none."""
        parts = cut_by_length(batch, task.ignore_index, 0)
        if len(parts) == 1:
            return 0
        # WHY: in a batch of another length, such an input could be taken for one of its length
        others = [part for part in tensors_of(batch.inputs) if part.shape != batch.targets.shape]
        if any(part.dim() == 2 and len(part) == batch.num_samples for part in others):
            return -1
        outputs: list[int] = []
        state = torch.get_rng_state()
        one = run([batch], outputs=outputs)
        # WHY then as in an evaluation: dropout would differ between two forwards
        if not torch.equal(state, torch.get_rng_state()):
            model.eval()
            outputs.clear()
            one = run([batch], outputs=outputs)
        other = run(parts, outputs=[])
        if not torch.allclose(one, other, _TOLERANCE, 0.01 * _TOLERANCE * float(one[2:].max())):
            return -1
        size: int = batch.targets.numel()
        return math.ceil(_LEAST_OUTPUT * len(outputs) * size / sum(outputs))

    everyone = try_on_all_ranks(trial, samples, needed)  # collective
    found: list[int] = [least for rank in everyone for least in rank or [-1]]
    least = max(found) if min(found) >= 0 else 0
    if least:
        log.info("padding: micro-batches are run in two parts that leave out %d places", least)
    return least


def _run(
    task: Tokens, model: nn.Module, batches: Sequence[Batch], *, outputs: list[int]
) -> torch.Tensor:
    """Go forward and backward; return loss, count and the norm of each gradient.

    outputs: takes how many values each module gives.
    """

    def note(module: nn.Module, inputs: Any, output: Any) -> None:  # Any: the model's own
        if not any(module.children()):
            outputs.append(sum(tensor.numel() for tensor in tensors_of(output)))

    model.zero_grad(set_to_none=True)
    sums = torch.zeros(2)
    for batch in batches:
        with register_module_forward_hook(note):
            score = task.score(task.forward(model, batch.copied()), batch)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
        sums += torch.tensor([score.loss_sum.item(), float(score.count)])
    norms = [p.grad.norm().float() for p in model.parameters() if p.grad is not None]
    return torch.stack([*sums, *norms])
