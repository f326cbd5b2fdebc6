"""torch.compile: switched on after the trials of the model, and how often it compiled.

Owns both. WHY after the trials (probe, task, memory): their batches have other sizes and run
without DDP, so each would be compiled, and then compiled again for training.
What goes wrong here: inputs of many shapes, for which torch compiles again and again.
"""

import contextlib
import logging
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

MOST_VERSIONS = 4
"""Of one part of a model: for training and for evaluation, each with a smaller last batch."""


class Compilations:
    """Counts what torch compiles in this process from now on."""

    def __init__(self) -> None:
        self._versions: Counter[str] = Counter()  # by part of the model, as torch numbers them
        self._has_told = False
        # WHY a private module: torch.compiler has no function that tells of a compilation.
        self._is_known = hasattr(torch, "_dynamo") and hasattr(torch._dynamo, "callback")
        if self._is_known:
            torch._dynamo.callback.on_compile_end(self._note)

    def _note(self, what: Any) -> None:  # Any: of torch's private module
        trigger, number = getattr(what, "callback_trigger", None), getattr(what, "compile_id", "")
        if getattr(trigger, "name", "") == "DYNAMO":  # else the backward of a part that is counted
            self._versions[str(number).partition("/")[0]] += 1

    @property
    def num_parts(self) -> int:
        """Parts of the model that were compiled: one more for each break of its graph."""
        return len(self._versions)

    @property
    def num_again(self) -> int:
        """How often a part was compiled again, for other sizes or for evaluation."""
        return self._versions.total() - len(self._versions)

    def tell(self) -> None:
        """Report the count of the first epoch; later calls do nothing. Rank-local."""
        if self._has_told or not self._is_known:
            return
        self._has_told = True
        if not self._versions:
            log.warning("compile: torch compiled no part of this model; it runs uncompiled")
            return
        log.info(
            "compile: %d part%s of the model compiled, and %d times again in the first epoch",
            self.num_parts,
            "" if self.num_parts == 1 else "s",
            self.num_again,
        )
        most = max(self._versions.values())
        if most > MOST_VERSIONS:
            log.warning(
                "compile: one part was compiled %d times, and training and evaluation need %d at "
                "most; inputs of many shapes? TORCH_LOGS=recompiles tells why",
                most,
                MOST_VERSIONS,
            )


def compile_model(model: nn.Module, *, backend: str = "inductor") -> Compilations:
    """Compile the model from its next forward on, in place. Rank-local."""
    compilations = Compilations()
    if type(model).forward.__module__.startswith("torch.nn."):
        # WHY: torch does not compile what calls a class of its own, such as nn.Sequential
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        # WHY not torch.compile(model): that would rename all parameters
        model.compile(backend=backend)
    return compilations


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models without compiling them inside: for a trial with other sizes."""
    if hasattr(torch.compiler, "set_stance"):
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()
