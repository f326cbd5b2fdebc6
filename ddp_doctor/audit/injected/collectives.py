"""Observes collectives by the user's line, and a main thread that makes no progress.

The collectives that the program calls are recorded in order; those inside DDP's backward are not.
Twice a second a thread looks whether the program has done anything more: a batch, a backward, a
step or a collective. If not for long, it records where the main thread is. What that means is
decided by the report, which sees all ranks.
"""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from ddp_doctor.audit.injected.recorder import Foreign, Recorder, is_called_from, user_frames

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "reduce_scatter", "barrier"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "monitored_barrier"),
    *("all_to_all", "all_to_all_single", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list", "all_gather_single", "reduce_scatter_single"),
)
MAX_RECORDS = 5000
MAX_OWNED = 200  # calls: later ones are of the same kinds
POLL_S = 0.5
IDLE_SHARE = 0.3
"""Of the time that a process waits for others: it uses less CPU than that."""


class Collectives:
    """The process group of one process, and the watch for hangs."""

    def __init__(self, recorder: Recorder, patience_s: float) -> None:
        self._recorder, self._patience_s = recorder, patience_s
        self._note = recorder.guarded(self._note_call)
        self._depth = self._num_records = 0
        self._is_watching = False
        self._module: Foreign = None
        self.world_size = 1
        self.owner_of: Callable[[Foreign], str] = lambda tensor: ""
        """Says whose a tensor is; set by the part that knows the optimizers."""

    def patch(self, module: Foreign) -> None:
        self._module = module
        self._recorder.wrap(module, "init_process_group", after=self._note_init)
        for name in OPERATIONS:
            if hasattr(module, name):
                begin = partial(self._begin, name)
                self._recorder.wrap(module, name, before=begin, always=self._end)

    def _begin(self, name: str, *args: Foreign, **kwargs: Foreign) -> float:
        if self._depth == 0:
            self._note(name, args, kwargs)
        self._depth += 1
        return self._recorder.clock()

    def _end(self, began: float) -> None:
        self._depth -= 1
        if not self._depth:
            self._recorder.window.times["collective_s"] += self._recorder.clock() - began
        self._recorder.progress += 1

    def _note_call(self, name: str, args: Foreign, kwargs: Foreign) -> None:
        if self._num_records >= MAX_RECORDS:
            return
        self._num_records += 1
        group = kwargs.get("group")
        if group is None:
            group = next((a for a in args if isinstance(a, self._module.ProcessGroup)), None)
        ranks = [] if group is None else self._module.get_process_group_ranks(group)
        key = "world" if group is None else "-".join(map(str, ranks))
        first = args[0] if args else kwargs.get("tensor")
        # WHY only these: of the others each rank may have other sizes
        has_shape = name in ("all_reduce", "broadcast") and hasattr(first, "shape")
        frames = list(user_frames())
        if name == "all_reduce" and (node := getattr(first, "grad_fn", None)) is not None:
            self._recorder.window.reduced[node] = frames
        self._recorder.emit(
            "collective",
            group=key,
            ranks=ranks,
            op=name,
            what=f"{str(first.dtype).rpartition('.')[2]}{list(first.shape)}" if has_shape else "",
            of=self.owner_of(first) if has_shape and self._num_records <= MAX_OWNED else "",
            line=frames[0][0],
            via=frames[0][2],
            # WHY the thread: autograd has one for each GPU, which Python did not start
            in_backward=is_called_from("torch/autograd/__init__.py")
            or "Dummy" in threading.current_thread().name,
            # WHY via: in that forward a layer of a library may call them, such as FSDP's
            in_own_forward=frames[0][2] in OPERATIONS
            and any(n in ("_wrapped_call_impl", "apply") for *_, n in frames[1:]),
        )

    def _note_init(self, *args: Foreign) -> None:
        self._recorder.is_rank = True
        self.world_size = self._module.get_world_size()
        self._recorder.emit("init", rank=self._module.get_rank(), world=self.world_size)
        if not self._is_watching:
            self._is_watching = True
            ident = threading.main_thread().ident
            watch = self._recorder.guarded(self._watch)
            threading.Thread(target=watch, args=(ident,), daemon=True, name="audit").start()

    def _watch(self, ident: int) -> None:
        recorder = self._recorder
        last, since, cpu_s = recorder.progress, recorder.clock(), time.process_time()
        while not recorder.is_over:
            time.sleep(POLL_S)
            recorder.flush()
            if recorder.progress == last:
                passed_s = recorder.clock() - since
                if passed_s < self._patience_s:
                    continue
                used_s = time.process_time() - cpu_s
                self._emit_stall(ident, is_idle=used_s < IDLE_SHARE * passed_s)
            last, since, cpu_s = recorder.progress, recorder.clock(), time.process_time()

    def _emit_stall(self, ident: int, *, is_idle: bool) -> None:
        frame = sys._current_frames().get(ident)
        if frame is None:
            return
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        is_torch = "torch/distributed/" in name or "parallel/distributed.py" in name
        self._recorder.emit(
            "stall",
            line=next(user_frames(frame))[0],
            function=function,
            # Python's threads of this process use CPU too: only an idle one surely waits
            is_idle=is_idle,
            waits=is_idle and (is_torch or function == "_engine_run_backward"),
            in_backward=function == "_engine_run_backward",
        )

    def forget(self) -> None:
        """Begin anew in a forked child, where no other thread lives."""
        self._is_watching, self._depth = False, 0
