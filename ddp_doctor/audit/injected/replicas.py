"""Observes DistributedDataParallel: how it was made, and which backwards it averages.

DDP averages the gradients of a backward if its forward ran before it, with gradients on, outside
no_sync(). Whether a bare call of the inner module is a mistake, the gradients decide (the report
compares them); here only its line is found, and only after a backward that was not averaged: a
healthy program never gets a hook.
"""

import sys
import weakref
from typing import Any

from ddp_doctor.audit.injected.fingerprints import fingerprints, leaves
from ddp_doctor.audit.injected.loaders import Loaders, generator_states
from ddp_doctor.audit.injected.recorder import Foreign, Hook, Recorder, user_line

MAX_BUFFER = 1_000_000
"""Elements: reading larger ones takes too long."""

MAX_QUIET = 3


class Replica:
    """What is known of one DDP object."""

    def __init__(self, ddp: Foreign) -> None:
        self.is_ready = False
        """A forward has run that the next backward answers with an average."""

        self.is_inside = False
        """Its forward runs at this moment."""

        self.has_modes = any(map(_has_modes, ddp.module.modules()))
        """It has layers that behave otherwise in train mode."""

        self.trainable = {id(p) for p in ddp.parameters() if p.requires_grad}
        """When it was made: it averages no other gradients, ever."""

        self.no_sync_line = self.bare_line = ""
        self.has_bare_hook = False


class Replicas:
    """The DDP objects of one process."""

    def __init__(self, recorder: Recorder, loaders: Loaders) -> None:
        self._recorder, self._loaders = recorder, loaders
        self._all = weakref.WeakKeyDictionary[Foreign, Replica]()
        self._eval_at = weakref.WeakKeyDictionary[Foreign, str]()
        self._is_watching = False
        self.forward_line = self.eval_line = ""
        self.made_at: dict[int, str] = {}
        """Lines of the parameters that are made after the first DDP object, by id."""

        self._num_quiet_modes = 0

    def hooks(self) -> list[Hook]:
        """Say what is observed. DDP's join() uses Join, too."""
        record, ddp = self._recorder.line_as, "DistributedDataParallel"
        wraps, join = "torch.nn.parallel.distributed", "torch.distributed.algorithms.join"
        modules = "torch.nn.modules.module"
        return [
            Hook(wraps, f"{ddp}.__init__", after=self._note_made),
            Hook(wraps, f"{ddp}.forward", self._begin_forward, self._end_forward),
            Hook(wraps, f"{ddp}.no_sync", self._note_no_sync),
            Hook(wraps, f"{ddp}.register_comm_hook", record("comm_hook")),
            Hook(join, "Join.__enter__", record("join")),
            Hook(join, "Join.__exit__", record("joined")),
            Hook(modules, "Module.load_state_dict", record("load")),
            Hook(modules, "Module.eval", self._trained, self._note_eval),
        ]

    def _trained(self, module: Foreign) -> list[Foreign]:
        self._eval_at[module] = user_line()
        return [ddp for ddp in self.living() if ddp.module.training]

    def _note_eval(self, trained: list[Foreign], *args: Any) -> None:
        if any(not ddp.module.training for ddp in trained):
            self.eval_line = user_line()

    def _note_parameter(self, module: Foreign, name: str, parameter: Foreign) -> None:
        self.made_at[id(parameter)] = user_line()

    def living(self) -> list[Foreign]:
        return list(self._all)

    def names(self) -> dict[int, str]:
        """Name the parameters inside DDP objects, by id."""
        return {
            id(parameter): name.replace("_orig_mod.", "")
            for ddp in self.living()
            for name, parameter in ddp.module.named_parameters()
        }

    def averaged(self) -> set[int]:
        """Give the ids of the parameters that DDP knows: those of the time when it was made."""
        known: set[int] = set()
        for ddp, replica in list(self._all.items()):
            parameters = getattr(ddp, "_module_parameters", None) or ddp.parameters()
            known |= {id(p) for p in parameters} & replica.trainable
        return known

    def leave_out_some(self) -> bool:
        """Whether DDP was told to leave parameters to the program: each rank may have its own."""
        return any(
            parameter.requires_grad and name in getattr(ddp, "parameters_to_ignore", ())
            for ddp in self.living()
            for name, parameter in ddp.module.named_parameters()
        )

    def count_backward(self) -> dict[str, int]:
        """Say what the DDP objects will do in the backward that begins."""
        counts = {"sync": 0, "bypass": 0, "no_sync": 0, "late": 0}
        for ddp, replica in list(self._all.items()):
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
        known = list(self._all.values())
        bare, quiet = [r.bare_line for r in known], [r.no_sync_line for r in known]
        return {"bare": next(filter(None, bare), ""), "no_sync": next(filter(None, quiet), "")}

    def buffers(self) -> dict[str, Foreign]:
        """Give fingerprints of the buffers that DDP does not send to all ranks, by name."""
        found = {
            name: buffer
            for ddp in self.living()
            if not ddp.broadcast_buffers
            for name, buffer in ddp.module.named_buffers()
            if buffer.is_floating_point() and buffer.numel() <= MAX_BUFFER
        }
        return dict(zip(found, fingerprints(list(found.values())), strict=True))

    def _look_for_bare_call(self, replica: Replica, ddp: Foreign) -> None:
        if replica.has_bare_hook:
            return

        def note(module: Foreign, *args: Foreign) -> None:
            import torch

            if not replica.is_inside and torch.is_grad_enabled():
                replica.bare_line = user_line()
                handle.remove()

        handle = ddp.module.register_forward_pre_hook(self._recorder.guarded(note))
        replica.has_bare_hook = True

    def _note_made(self, token: Foreign, result: Foreign, ddp: Foreign) -> None:
        import torch

        self._recorder.is_rank = True
        if not self._is_watching:
            self._is_watching = True
            register = torch.nn.modules.module.register_module_parameter_registration_hook
            register(self._recorder.guarded(self._note_parameter))
        self._all[ddp] = Replica(ddp)
        if not ddp.module.training:
            self.eval_line = self._eval_at.get(ddp.module) or user_line()
        norms = [type(module).__name__ for module in ddp.module.modules()]
        self._recorder.emit(
            "ddp",
            line=user_line(),
            ranks=sys.modules["torch.distributed"].get_process_group_ranks(ddp.process_group),
            find_unused=ddp.find_unused_parameters,
            static_graph=bool(getattr(ddp, "static_graph", False)),
            broadcasts=ddp.broadcast_buffers,
            num_norms=sum("BatchNorm" in n and "Sync" not in n for n in norms),
        )

    def _begin_forward(self, ddp: Foreign, *inputs: Foreign, **kwargs: Foreign) -> float:
        import torch

        began, has_grad = self._recorder.clock(), torch.is_grad_enabled()
        window = self._recorder.window
        if replica := self._all.get(ddp):
            replica.is_inside = True
            replica.is_ready |= has_grad and ddp.require_backward_grad_sync
            if has_grad and replica.has_modes:
                layers = filter(_has_modes, ddp.module.modules())
                window.trains = ddp.module.training or any(layer.training for layer in layers)
            if not has_grad and replica.has_modes and ddp.module.training:
                self._note_quiet_mode()
        if window.is_sampled and has_grad and len(window.inputs) < 16:
            if not window.inputs and not self._loaders.states:
                self._loaders.states = generator_states()
            tensors = [t for t in leaves([inputs, kwargs], []) if hasattr(t, "element_size")]
            window.inputs += fingerprints(tensors[:1])
            self.forward_line = user_line()
        return began

    def _note_quiet_mode(self) -> None:
        """Record a forward without gradients in train mode: an evaluation, as a rule."""
        self._num_quiet_modes += 1
        if self._num_quiet_modes <= MAX_QUIET:
            self._recorder.emit("quiet", of=self._loaders.current, line=user_line())

    def _end_forward(self, began: float, result: Foreign, ddp: Foreign) -> None:
        self._recorder.window.times["forward_s"] += self._recorder.clock() - began
        if replica := self._all.get(ddp):
            replica.is_inside = False

    def _note_no_sync(self, ddp: Foreign) -> None:
        if (replica := self._all.get(ddp)) and not replica.no_sync_line:
            replica.no_sync_line = user_line()

    def forget(self) -> None:
        self._all.clear()


def _has_modes(layer: Foreign) -> bool:
    name = type(layer).__name__
    return "BatchNorm" in name or ("Dropout" in name and bool(getattr(layer, "p", 1)))
