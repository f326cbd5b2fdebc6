"""Observes DistributedDataParallel: how it was made, and which backwards it averages.

DDP averages the gradients of a backward if its forward ran before it, with gradients on, outside
no_sync(). Whether a bare call of the inner module is a mistake, the gradients decide (the report
compares them); here only its line is found, and only after a backward that was not averaged: a
healthy program never gets a hook.
"""

import weakref
from functools import partial
from typing import Any

from ddp_doctor.audit.injected.fingerprints import fingerprints, leaves
from ddp_doctor.audit.injected.loaders import Loaders, generator_states
from ddp_doctor.audit.injected.recorder import Foreign, Recorder, user_line

MAX_BUFFER = 1_000_000
"""Elements: reading larger ones takes too long."""

MAX_BARE_CALLS = 3


class Replica:
    """What is known of one DDP object."""

    def __init__(self, ddp: Foreign) -> None:
        self.ddp = weakref.ref(ddp)
        self.is_ready = False
        """A forward has run that the next backward answers with an average."""

        self.is_inside = False
        """Its forward runs at this moment."""

        self.has_modes = False
        """It has layers that behave otherwise in train mode."""

        self.trainable = {id(p) for p in ddp.parameters() if p.requires_grad}
        """When it was made: it averages no other gradients, ever."""

        self.no_sync_line = ""
        self.bare_line = ""
        self.num_bare = 0
        self.has_bare_hook = False


class Replicas:
    """The DDP objects of one process."""

    def __init__(self, recorder: Recorder, loaders: Loaders) -> None:
        self._recorder, self._loaders = recorder, loaders
        self._all: list[Replica] = []
        self.forward_s = 0.0
        self.inputs: list[Foreign] = []
        """Fingerprints of what the forwards of a sampled step got."""

        self.forward_line = ""
        self.is_sampled = True
        self.trains: bool | None = None
        """The mode of the model in the newest forward with gradients; None: it has no modes."""

        self.eval_line = ""
        self.made_at: dict[int, str] = {}
        """Lines of the parameters that are made after the first DDP object, by id."""

        self._num_quiet_modes = 0
        self._distributed: Foreign = None

    def patch(self, module: Foreign) -> None:
        self._distributed = module.dist
        wrap, ddp = self._recorder.wrap, module.DistributedDataParallel
        wrap(ddp, "__init__", after=self._note_made)
        wrap(ddp, "forward", before=self._begin_forward, after=self._end_forward)
        wrap(ddp, "no_sync", before=self._note_no_sync)

    def patch_join(self, module: Foreign) -> None:
        """Patch torch.distributed.algorithms.join: DDP's join() uses it, too."""
        for name, kind in (("__enter__", "join"), ("__exit__", "joined")):
            self._recorder.wrap(module.Join, name, before=partial(self._note_join, kind))

    def _note_join(self, kind: str, *args: Any, **kwargs: Any) -> None:
        self._recorder.emit(kind, line=user_line())

    def patch_module(self, module: Foreign) -> None:
        """Patch torch.nn.modules.module: eval() of a model that trains, and weights loaded."""
        wrap = self._recorder.wrap
        wrap(module.Module, "load_state_dict", before=self._note_load)
        wrap(module.Module, "eval", before=self._trained, after=self._note_eval)

    def _note_load(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.emit("load", line=user_line())

    def _trained(self, *args: Any) -> list[Foreign]:
        return [ddp for _, ddp in self.living() if ddp.module.training]

    def _note_eval(self, trained: list[Foreign], *args: Any) -> None:
        if any(not ddp.module.training for ddp in trained):
            self.eval_line = user_line()

    def _note_parameter(self, module: Foreign, name: str, parameter: Foreign) -> None:
        self.made_at[id(parameter)] = user_line()

    def living(self) -> list[tuple[Replica, Foreign]]:
        """List the DDP objects that still exist."""
        return [(replica, ddp) for replica in self._all if (ddp := replica.ddp()) is not None]

    def names(self) -> dict[int, str]:
        """Name the parameters inside DDP objects, by id."""
        return {
            id(parameter): name.replace("_orig_mod.", "")
            for _, ddp in self.living()
            for name, parameter in ddp.module.named_parameters()
        }

    def averaged(self) -> set[int]:
        """Give the ids of the parameters that DDP knows: those of the time when it was made."""
        known: set[int] = set()
        for replica, ddp in self.living():
            parameters = getattr(ddp, "_module_parameters", None) or ddp.parameters()
            known |= {id(p) for p in parameters} & replica.trainable
        return known

    def count_backward(self) -> dict[str, int]:
        """Say what the DDP objects will do in the backward that begins."""
        counts = {"sync": 0, "bypass": 0, "no_sync": 0, "late": 0}
        for replica, ddp in self.living():
            is_ready, wants = replica.is_ready, ddp.require_backward_grad_sync
            replica.is_ready = False
            # no_sync() around backward alone has no effect
            counts["late"] += is_ready and not wants
            kind = "sync" if is_ready else "bypass" if wants else "no_sync"
            counts[kind] += 1
            if kind == "bypass":
                self._look_for_bare_call(replica, ddp)
        return counts

    def lines(self) -> dict[str, str]:
        """Give the lines that explain gradients that were not averaged."""
        bare = [r.bare_line for r, _ in self.living() if r.bare_line]
        quiet = [r.no_sync_line for r, _ in self.living() if r.no_sync_line]
        return {"bare": bare[0] if bare else "", "no_sync": quiet[0] if quiet else ""}

    def buffers(self) -> dict[str, Foreign]:
        """Give fingerprints of the buffers that DDP does not send to all ranks, by name."""
        found = {
            name: buffer
            for _, ddp in self.living()
            if not ddp.broadcast_buffers
            for name, buffer in ddp.module.named_buffers()
            if buffer.is_floating_point() and buffer.numel() <= MAX_BUFFER
        }
        return dict(zip(found, fingerprints(list(found.values())), strict=True))

    def _look_for_bare_call(self, replica: Replica, ddp: Foreign) -> None:
        if replica.has_bare_hook or replica.bare_line or replica.num_bare >= MAX_BARE_CALLS:
            return

        def note(module: Foreign, *args: Foreign) -> None:
            import torch

            if replica.is_inside or not torch.is_grad_enabled():
                return
            replica.bare_line = user_line()
            handle.remove()
            replica.has_bare_hook = False

        handle = ddp.module.register_forward_pre_hook(self._recorder.guarded(note))
        replica.has_bare_hook = True
        replica.num_bare += 1

    def _note_made(
        self, token: Foreign, result: Foreign, ddp: Foreign, *args: Any, **kwargs: Any
    ) -> None:
        import torch

        self._recorder.is_rank = True
        if not self._all:
            register = torch.nn.modules.module.register_module_parameter_registration_hook
            register(self._recorder.guarded(self._note_parameter))
        replica = Replica(ddp)
        self._all.append(replica)
        layers = [(type(m).__name__, getattr(m, "p", 1)) for m in ddp.module.modules()]
        norms = [name for name, _ in layers]
        replica.has_modes = any("BatchNorm" in n or ("Dropout" in n and p) for n, p in layers)
        self._recorder.emit(
            "ddp",
            line=user_line(),
            ranks=self._distributed.get_process_group_ranks(ddp.process_group),
            find_unused=ddp.find_unused_parameters,
            static_graph=bool(getattr(ddp, "static_graph", False)),
            broadcasts=ddp.broadcast_buffers,
            num_norms=sum("BatchNorm" in n and "Sync" not in n for n in norms),
        )

    def _begin_forward(self, ddp: Foreign, *inputs: Foreign, **kwargs: Foreign) -> float:
        import torch

        began = self._recorder.clock()
        for replica, other in self.living():
            if other is ddp:
                replica.is_inside = True
                if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                    replica.is_ready = True
                if torch.is_grad_enabled() and replica.has_modes:
                    self.trains = bool(ddp.module.training)
                if not torch.is_grad_enabled() and replica.has_modes and ddp.module.training:
                    self._note_quiet_mode()
        if self.is_sampled and torch.is_grad_enabled() and len(self.inputs) < 16:
            if not self.inputs and not self._loaders.states:
                self._loaders.states = generator_states()
            tensors = [t for t in leaves([inputs, kwargs], []) if hasattr(t, "element_size")]
            self.inputs += fingerprints(tensors[:1])
            self.forward_line = user_line()
        return began

    def _note_quiet_mode(self) -> None:
        """Record a forward without gradients in train mode: an evaluation, as a rule."""
        self._num_quiet_modes += 1
        if self._num_quiet_modes <= MAX_BARE_CALLS:
            self._recorder.emit("quiet", of=self._loaders.current, line=user_line())

    def _end_forward(self, began: float, result: Foreign, ddp: Foreign, *a: Any, **k: Any) -> None:
        self.forward_s += self._recorder.clock() - began
        for replica, other in self.living():
            if other is ddp:
                replica.is_inside = False

    def _note_no_sync(self, ddp: Foreign) -> None:
        for replica, other in self.living():
            if other is ddp and not replica.no_sync_line:
                replica.no_sync_line = user_line()

    def after_step(self) -> None:
        """Begin to count for the next optimizer step."""
        self.forward_s, self.inputs, self.trains = 0.0, [], None

    def forget(self) -> None:
        self._all = []
