"""Runs in each process of a drilled program: records what went into the weights; causes one fault.

Started by the audit's sitecustomize.py, with its recorder. Each record is written at once, so that
a kill loses none. Errors stay in here, but for those of the fault, and for those that a handler of
a signal raised while a hook ran: torch's does, when a DataLoader worker has died.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import sys
import time
import weakref
import zlib
from typing import Any

from ddp_doctor.audit.injected.fingerprints import UNREADABLE, fingerprints, leaves, sample_hashes
from ddp_doctor.audit.injected.loaders import Loaders
from ddp_doctor.audit.injected.observer import PatchingFinder
from ddp_doctor.audit.injected.recorder import Foreign, Recorder
from ddp_doctor.audit.injected.training import makes_state, parameters_of

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar", ".pkl", ".pickle", ".distcp")
OF_OUTPUT = ("nan", "oom")  # given by what forward returns
SAVE_FAULTS, CUT_BYTES = ("full-disk", "kill-in-save"), 521  # a size that no program chooses
CACHES, KEPT_BATCHES = {".cache", ".config", ".triton", "__pycache__"}, 64


class Drilled:
    """The observer of one process, and the fault that it is to cause."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.kind = plan, str(plan["fault"])
        self.roots = tuple(f"{folder.rstrip('/')}/" for folder in plan["folders"])
        self.recorder = Recorder(plan["records"])
        self.rank, self.num_steps, self._num_optimizers = -1, 0, 0
        self._optimizers = weakref.WeakKeyDictionary[Foreign, int]()
        self._iterators = weakref.WeakSet[Foreign]()
        self._hooks: list[Foreign] = []
        self._inside: Foreign = None
        self._before: dict[str, Foreign] = {}
        self._has_forward = self._is_armed = self._is_saving = False
        self._batches: list[dict[str, Foreign]] = []
        """What loaders gave out: content, names of its samples, the step that used it."""

    def patches(self) -> dict[str, list[Any]]:
        """Say which modules are patched, right after their import, and how."""
        guarded = self.recorder.guarded
        loaders = Loaders(self.recorder, listener=guarded(self._deliver))
        table: dict[str, Any] = {
            "torch.optim.optimizer": self._patch_optimizer,
            "torch.utils.data.dataloader": loaders.patch,
            "torch.nn.modules.module": self._patch_module,
            "torch.nn.parallel.distributed": self._patch_ddp,
            "torch.distributed.distributed_c10d": self._patch_group,
            "torch.serialization": lambda module: self._patch_save(module, "save"),
            "safetensors.torch": lambda module: self._patch_save(module, "save_file"),
        }
        return {name: [guarded(patch)] for name, patch in table.items()}

    def emit(self, kind: str, **fields: Foreign) -> None:
        """Write a record, also while the size of the program's files is limited."""
        was_armed = self._is_armed
        self._limit(False)
        self.recorder.emit(kind, **fields)
        self._limit(was_armed)

    def _patch_group(self, module: Foreign) -> None:
        def note(*args: Any, **kwargs: Any) -> None:
            self.rank = module.get_rank()
            while self._hooks:
                self._hooks.pop().remove()
            self.emit("group", rank=self.rank, world=module.get_world_size())

        self.recorder.wrap(module, "init_process_group", after=note)

    # What each step starts from, and what it ends with.

    def _patch_optimizer(self, module: Foreign) -> None:
        def strike(optimizer: Foreign, *args: Any) -> None:
            if self.plan["point"] == "step" and self._inside is optimizer:
                self._strike()  # not guarded: here an exception is wanted

        guarded = self.recorder.guarded
        module.register_optimizer_step_pre_hook(guarded(self._before_step))
        module.register_optimizer_step_pre_hook(strike)
        module.register_optimizer_step_post_hook(guarded(self._after_step))

    def _before_step(self, optimizer: Foreign, *args: Any) -> None:
        import torch

        if makes_state() or self._inside not in (None, optimizer):
            return  # a step inside a step: only the outer one counts
        self._inside, parameters = optimizer, parameters_of(optimizer)
        self._limit(self._is_armed and self._is_saving)  # in another thread
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = self._num_optimizers
            self._num_optimizers += 1
        states = [sorted(optimizer.state.get(p, {}).items(), key=str) for p in parameters]
        self._before = {
            "the weights": _digest(parameters),
            "the optimizer's state": _digest([v for state in states for _, v in state]),
            "the learning rate": [float(group.get("lr", 0)) for group in optimizer.param_groups],
            "the random numbers": zlib.crc32(bytes(torch.get_rng_state().tolist())),
        }

    def _after_step(self, optimizer: Foreign, *args: Any) -> None:
        import torch

        if self._inside is not optimizer:
            return
        self._inside, parameters = None, parameters_of(optimizer)
        self.num_steps += 1
        finite = all(bool(torch.isfinite(p.detach()).all()) for p in parameters)
        facts = {"w": _digest(parameters), "finite": finite, "before": self._before}
        facts |= {"o": self._optimizers[optimizer], "has_forward": self._has_forward}
        self.emit("update", n=self.num_steps, **facts)

    # Samples: fetched is not used. A batch counts when a forward of DDP that it reached has ended.

    def _deliver(self, iterator: Foreign, indices: Foreign, data: Foreign) -> None:
        self._iterators.add(iterator)
        if not (tensors := _tensors(data)):
            return
        dataset: Foreign = getattr(iterator, "_dataset", None)
        names = None
        rows = next((t for t in tensors if t.ndim > 0 and t.device.type == "cpu"), None)
        if indices and all(type(index) is int for index in indices):
            while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a Subset
                indices = [int(dataset.indices[index]) for index in indices]
                dataset = dataset.dataset
            names = list(indices)
        elif rows is not None:
            digits = sample_hashes(rows, len(rows))
            names = [digits[place : place + 8] for place in range(0, len(digits), 8)]
        names = names if getattr(iterator, "_in_order", True) else None
        # WHY the largest: labels are often alike
        content = _content(max(tensors, key=lambda tensor: tensor.numel()))
        batch = {"content": content, "names": names, "step": 0}
        self._batches = [*self._batches[1 - KEPT_BATCHES :], batch]

    def _find(self, inputs: Foreign) -> dict[str, Foreign] | None:
        """Find the batch that a forward gets: by content, as it may be a copy; the oldest."""
        contents = {_content(tensor) for tensor in _tensors(inputs)}
        alike = [batch for batch in self._batches if batch["content"] in contents]
        again = [batch for batch in alike if batch["step"] == self.num_steps + 1]
        return next(iter([*again, *(batch for batch in alike if not batch["step"])]), None)

    def _use(self, batch: dict[str, Foreign] | None) -> None:
        if batch is not None and not batch["step"]:  # a retry of a step uses it only once
            batch["step"] = self.num_steps + 1
            self.emit("use", n=batch["step"], names=batch["names"])

    def _patch_module(self, module: Foreign) -> None:
        """Observe every module of a program on one rank, up to its process group, if it has one.

        WHY: it may do without DDP. What is inside of a model gets no batch as it was delivered.
        """

        def note(model: Foreign, args: Foreign, kwargs: Foreign, output: Foreign) -> None:
            import torch

            if torch.is_grad_enabled():
                self._use(self._find([args, kwargs]))

        if os.environ.get("WORLD_SIZE", "1") == "1":
            hook = self.recorder.guarded(note)
            self._hooks.append(module.register_module_forward_hook(hook, with_kwargs=True))

    def _patch_ddp(self, module: Foreign) -> None:
        original, find = module.DistributedDataParallel.forward, self.recorder.guarded(self._find)

        @functools.wraps(original)
        def forward(model: Foreign, *args: Foreign, **kwargs: Foreign) -> Foreign:
            import torch

            # WHY no global name: the compiler would import this module for it
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return original(model, *args, **kwargs)
            self._has_forward, batch = True, find([args, kwargs])
            kind = self._strike() if self.plan["point"] == "forward" else ""
            output = original(model, *args, **kwargs)
            # WHY now: others may end this step, with this rank's gradient, without this rank
            self._use(batch)
            if kind in OF_OUTPUT and not any(t.requires_grad for t in _tensors(output)):
                self.emit("missed", what="the output of forward has no tensor that is known")
            return _broken(output, kind)

        module.DistributedDataParallel.forward = forward

    # Files: checkpoints, and what lies outside of the folders that the program may write to.

    def _patch_save(self, module: Foreign, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def save(data: Foreign, *args: Foreign, **kwargs: Foreign) -> Foreign:
            file = args[0] if args else kwargs.get("f", kwargs.get("filename"))
            path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else None
            if path is not None:  # WHY: it writes from C++ or Rust, which Python does not see
                self._refuse_outside(path)
            self._begin_save(path)
            self._is_saving = path is not None
            try:
                return original(data, *args, **kwargs)
            finally:
                if path is not None:  # a buffer goes to its file later, before the next step
                    self._is_saving = False
                    self._limit(False)

        setattr(module, name, save)
        if hasattr(module, "load_file"):
            self.recorder.wrap(module, "load_file", before=lambda f, *a, **k: self._note_read(f))

    def _begin_save(self, path: str | None) -> None:
        self.emit("save", path=path, n=self.num_steps)
        is_due = self.kind in SAVE_FAULTS and self.num_steps >= self.plan["step"] - 1
        if is_due and self.rank == self.plan["rank"] and self._fire():
            # A limit on the size of files hits every writer in the middle of its write. Its error,
            # EFBIG, stands for ENOSPC. Where SIGXFSZ has its default action (Python ignores it),
            # the kernel ends the process right there.
            if self.kind == "kill-in-save":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                ctypes.CDLL(None).signal(signal.SIGXFSZ, ctypes.c_void_p(0))  # from any thread
            self._limit(True)

    def _limit(self, wanted: bool) -> None:
        if wanted is not self._is_armed:
            self._is_armed, hard = wanted, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (CUT_BYTES if wanted else hard, hard))

    def hear(self, event: str, args: Foreign) -> None:
        """Listen to Python's audit events of files."""
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            mode, is_written = args[1], args[2] & (os.O_WRONLY | os.O_RDWR)
            if isinstance(mode, str):
                is_written = any(letter in mode for letter in "wax+")
            if not is_written:
                self._note_read(args[0])
                return
            self._refuse_outside(args[0])
            path = os.path.realpath(os.fsdecode(args[0]))
            if path.endswith(CHECKPOINTS) and not self._is_armed:
                self._begin_save(path)
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._refuse_outside(args[1])
            old, new = (os.path.realpath(os.fsdecode(name)) for name in args[:2])
            self.emit("moved", old=old, new=new)
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            is_there = event == "os.mkdir" and os.path.isdir(args[0])
            if args[-1] in (-1, None) and not is_there:
                self._refuse_outside(args[0])

    def _note_read(self, name: Foreign) -> None:
        """Tell that the file that was cut is read, also by a link or without a known suffix."""
        with contextlib.suppress(OSError):
            if self.plan["torn"] and os.path.samefile(name, self.plan["torn"]):
                self.emit("read")

    def _refuse_outside(self, name: Foreign) -> None:
        """Refuse a write: nothing of the user's changes, and no run sees files of another one."""
        given, path = os.path.abspath(os.fsdecode(name)), os.path.realpath(os.fsdecode(name))
        is_device = given.startswith(("/dev/", "/proc/", "/sys/"))  # /proc/self/fd: open already
        is_own = is_device or f"{path}/".startswith(self.roots)
        if not is_own and not CACHES & set(path.split("/")):
            self.emit("outside", path=path)
            raise PermissionError(f"drill: {path} is outside of the program's folder")

    # The fault.

    def _fire(self) -> bool:
        """Whether the fault is still to come: once, however many ranks and starts there are."""
        try:
            os.close(os.open(self.plan["mark"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self.emit("fault", n=self.num_steps + 1, rank=self.rank)
        return True

    def _strike(self) -> str:
        """Cause the fault if this is its place; name it if the output of forward is to have it."""
        kind, step = self.kind, self.plan["step"]
        is_late = kind == "dead-worker" and self.num_steps >= step
        is_due = self.rank == self.plan["rank"] and (self.num_steps == step - 1 or is_late)
        is_other = kind in SAVE_FAULTS or (kind in OF_OUTPUT and self.plan["point"] == "step")
        if not kind or is_other or not is_due:
            return ""
        # A worker that has nothing left to fetch would die without harm.
        busy = [i for i in list(self._iterators) if getattr(i, "_tasks_outstanding", 0)]
        workers = [w.pid for i in busy for w in getattr(i, "_workers", ()) if w.is_alive()]
        if (kind == "dead-worker" and not workers) or not self._fire():
            return ""
        if kind == "exception":
            raise RuntimeError("drill: an exception in a rank")
        if kind in ("kill-rank", "hang", "dead-worker"):
            number = signal.SIGSTOP if kind == "hang" else signal.SIGKILL
            os.kill(workers[0] if kind == "dead-worker" else os.getpid(), number)
        elif kind not in OF_OUTPUT:
            time.sleep(0.5 if kind == "term" else 60)  # until the drill, which sees the mark, acts
        return kind

    def begin_child(self) -> None:
        self.recorder.forget()
        self.num_steps, self._is_armed = 0, False


def _tensors(data: Foreign) -> list[Foreign]:
    return [t for t in leaves(data, []) if hasattr(t, "untyped_storage") and t.numel()]


def _digest(values: list[Foreign]) -> str:
    """Give a text that differs where any bit differs. Raises ValueError if it can't be read."""
    tensors = [getattr(v, "to_local", lambda v=v: v)() for v in values if hasattr(v, "is_meta")]
    tensors = [t for t in tensors if t.numel() and not t.is_meta]
    found = fingerprints(tensors)
    if UNREADABLE in found:
        raise ValueError("a tensor that can't be read")
    plain = [v for v in values if isinstance(v, int | float)]
    return f"{hash((*found, *(tuple(t.shape) for t in tensors), *plain)) % 2**64:016x}"


def _content(tensor: Foreign) -> tuple[int, str, str]:
    """Describe values so that a copy on another device or of a wider type is the same."""
    values = tensor.detach().double().reshape(-1)
    return values.numel(), f"{float(values.sum()):.6e}", f"{float(values.square().sum()):.6e}"


def _broken(output: Foreign, kind: str) -> Foreign:
    """Give the output of forward as NaN, or so that its backward runs out of memory."""
    import torch

    def fail(gradient: Foreign) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (drill)")

    if kind not in OF_OUTPUT:
        return output
    if isinstance(output, torch.Tensor):
        if output.requires_grad and kind == "oom":
            torch.Tensor.register_hook(output, fail)  # type: ignore[no-untyped-call]  # torch's
        return output * float("nan") if output.requires_grad and kind == "nan" else output
    if type(output) in (list, tuple):
        return type(output)(_broken(part, kind) for part in output)
    for name in list(output.keys()) if hasattr(output, "keys") else ():
        output[name] = _broken(output[name], kind)
    return output


def start(plan: str) -> None:
    """Observe this process from now on. Called by sitecustomize.py."""
    drilled = Drilled(json.loads(plan))
    sys.meta_path.insert(0, PatchingFinder(drilled.patches()))
    os.register_at_fork(after_in_child=drilled.begin_child)
    sys.addaudithook(drilled.hear)
