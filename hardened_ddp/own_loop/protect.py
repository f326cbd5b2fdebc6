"""Protection for a training loop of the user's own: of a GAN, SAM, PPO, or several data sets.

    with protect("runs/gan", G=G, D=D, opt_G=opt_G, opt_D=opt_D) as run:
        for epoch in run.epochs(10):
            for real in run.batches(loader):
                ...
                run.commit()

What is done between two commits is a body: all of it counts, or nothing. The parts are those of the
script's runs: sampler, ledger, checkpoints, agreed stop, survivor save, hang watch, run folder.
Read protect() first, then OwnLoop.commit. What a survivor may save: last_commit.py.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hardened_ddp.checkpoint.tensors import plan_file
from hardened_ddp.errors import (
    CheckpointMismatchError,
    HardenedError,
    LaunchError,
    NonFiniteError,
    OwnLoopError,
    RankMismatchError,
)
from hardened_ddp.guard.divergence import compare_replicas
from hardened_ddp.guard.hang import HangWatch, Subject
from hardened_ddp.guard.stop import LastResort, StopRequest
from hardened_ddp.own_loop.batches import Streams
from hardened_ddp.own_loop.last_commit import NUM_FIRST, LastCommit
from hardened_ddp.own_loop.registry import Registry
from hardened_ddp.ranks.group import Group, adopt_group, open_group, place_in_group
from hardened_ddp.ranks.launch import (
    Launch,
    end_with_launcher,
    environment,
    keep_nccl_from_exiting,
    log_failure,
    prepare_environment,
    read_launch,
)
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.process import stat_fields
from hardened_ddp.ranks.seeding import mix, seed_all
from hardened_ddp.reporting.ending import leave_failed, settle, stop_status
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.log import start_logging, stop_logging
from hardened_ddp.reporting.status_writer import StatusWriter, Work
from hardened_ddp.reporting.summary import withdraw_summary, write_summary
from hardened_ddp.settings.config import RunConfig
from hardened_ddp.settings.document import Misfit
from hardened_ddp.settings.schema import SETTINGS, fit
from hardened_ddp.settings.typed_command import SCRIPT
from hardened_ddp.step.failure import errors_told
from hardened_ddp.training.run import Ending
from hardened_ddp.training.run_folder import RunFolder, open_folder, read_checkpoint
from hardened_ddp.training.state import Contents, Saved, Saver, receive
from hardened_ddp.training.survivor_save import Rescue, is_saved_after, refuse_crash_loop, save_once

log = logging.getLogger(__name__)

_active: list[Path] = []
# Arguments whose settings have other names.
_ALIASES = {"save_every": "checkpoint_every_steps"}
_ALIASES |= dict.fromkeys(("run.epochs", "run.steps"), "max_steps")


class Stopped(SystemExit):
    """A stop was asked for: the state is saved. WHY SystemExit: no line after the loop may run."""


@contextmanager
def protect(
    folder: str | Path,
    *,
    seed: int = 0,
    save_every: int | Literal["auto"] = "auto",
    keep_last: int = 3,
    hang_after_s: float = 60.0,
    timeout_s: float = 1800.0,
    stop_grace_s: float = 30.0,
    **state: Any,  # Any: the user's objects, by name
) -> Iterator["OwnLoop"]:
    """Protect the loop inside, whose state is in folder and in these objects. Collective.

    Loads the newest valid checkpoint into the objects, in place. save_every: commits between two
    checkpoints. timeout_s: how long commits wait for other ranks. The others: ddp_training.py
    --help. Raises Stopped after a stop, the body's error, or SystemExit if the log explains it.
    """
    if _active:
        raise OwnLoopError(f"protect({str(_active[0])!r}) is not over: one at a time")
    group = None
    _active.append(Path(folder))
    try:
        group = _meet(state, timeout_s=timeout_s)  # collective
        with errors_told(group):
            _check(seed=seed, save_every=save_every, keep_last=keep_last)
            _check(hang_after_s=hang_after_s, timeout_s=timeout_s, stop_grace_s=stop_grace_s)
            seed, keep_last = int(seed), int(keep_last)  # they are written as JSON
            last = LastCommit(Registry(state), group.device)
            every = None if save_every == "auto" else int(save_every)
            config = RunConfig(checkpoint_every_steps=every, keep_last=keep_last)
            with (
                StopRequest(group, digest=last.digest) as stop,
                open_folder(Path(folder), group, keep_last=keep_last) as run,  # collective
                Goodput(run.folder, group.tracker, group.launch, step=run.step) as goodput,
                HangWatch(group, run.folder, hang_after_s=hang_after_s) as watch,  # collective
                StatusWriter(run.folder, group) as status,
            ):
                parts = group, run, goodput, stop, status
                loop = OwnLoop(last, parts, config, seed=seed)  # collective
                loop.watch_forwards(state)
                watch.attach(Subject(save=loop.save_in_need, phase=loop.phase_of))
                stop.last_resort = LastResort(loop.save_in_need, grace_s=stop_grace_s)
                with loop.ended_well(watch):
                    yield loop
    except Exception as error:
        code = leave_failed(error, Launch() if group is None else group.launch)
        if not isinstance(error, HardenedError):
            raise
        if group is None:
            log_failure(error)
        raise SystemExit(settle(code, environment())) from error
    finally:
        _active.clear()
        if group is not None:
            group.close()
        stop_logging()
    if loop.ending is Ending.STOPPED:
        raise Stopped(settle(stop_status(None, environment()), environment()))


class OwnLoop:
    """What the loop uses of protect."""

    def __init__(
        self,
        last: LastCommit,
        parts: tuple[Group, RunFolder, Goodput, StopRequest, StatusWriter],
        config: RunConfig,
        *,
        seed: int,
    ) -> None:
        """Load the newest checkpoint, if there is one. Collective: all ranks."""
        self._last, self._registry, self._seed = last, last.registry, seed
        self._group, self._run, self._goodput, self._stop, self._status = parts
        self.step = 0  # commits so far. Read it; commit() counts
        self.rng = np.random.default_rng(seed)  # of this rank, new in each body and after it
        self.ending = Ending.FAILED
        self._num_epochs = self._num_steps = 0
        self._is_in_body = self._has_forward = False
        self._main_thread, self._ending = threading.get_ident(), threading.Lock()
        group, folder, store = self._group, self._run.folder, self._run.store
        self._streams = Streams(group, folder, seed=seed)  # collective
        store.before_commit.insert(0, self._streams.sync)
        self._stop.watch(folder)
        plan_file(self._registry.pack()[1])  # raises for what no checkpoint holds
        group.tracker.begin("loading the checkpoint")
        if (saved := read_checkpoint(self._run, group)) is not None:  # collective
            self._load(saved)  # collective
            log.info("resuming %s from step %d", folder, self.step)
        refuse_crash_loop(group, self.step, folder)
        self._check_alike()  # collective
        self._first_step = self.step  # of this start
        group.tracker.start_at(self.step)
        self._goodput.begin(self.step)
        if group.is_main:
            withdraw_summary(folder)
        self._note()
        # WHY set, so all are volatile: nobody says when a loop writes to which
        contents = Contents(last.tensors, last.meta, volatile=set)
        self._saver = Saver(contents, store, group=group, config=config)

    # ---- what the user calls

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, from 0; the first one may be half done."""
        _check(**{"run.epochs": count})
        self._num_epochs = count
        while self.epoch < count:
            yield self.epoch
            self._streams.end_epoch()
            if not self.step:
                self._refuse_written()
            # WHY of all: one rank alone would wait in a commit until the timeout
            elif self.epoch == count and any(
                self._group.gather_json(bool(self._last.changed()))  # collective
            ):
                self._sync_buffers()  # collective
                self._check_alike()  # collective
                self.commit()  # collective: of an average, for instance

    def batches(
        self, loader: DataLoader[Any], *, name: str = "data", repeat: bool = False
    ) -> Iterator[Any]:  # Any: what its collate_fn returns
        """Yield this rank's share of each window of an epoch, from the committed place on.

        Of the loader all but its sampler counts: the order is shuffled by the seed. repeat: begin
        again, in another order, whenever it is over.
        """
        return self._streams.batches(loader, name, repeat, self._begin_body)

    def steps(self, count: int) -> Iterator[int]:
        """Yield the steps that are left of count, for a loop that makes its data by itself."""
        _check(**{"run.steps": count})
        self._num_steps = count
        first = self.step
        while self.step < count:
            before = self.step
            yield self._begin_body(before != first)
            if self.step == before:
                raise OwnLoopError("a body of run.steps ended without run.commit()")

    def commit(self) -> None:
        """Count what was done since the last commit as one step. Collective: all ranks.

        Raises Stopped if any rank was asked to stop; its state is that of this commit.
        """
        self._streams.use()
        if self.epoch < self._num_epochs and self._last.place == self._streams.place():
            raise OwnLoopError(
                f"commit {self.step + 1} has no batch of run.batches since the one before it: a "
                "start that continues there would do this part of the epoch twice",
                fix="one commit at the end of each body; a loop without loaders has run.steps(n)",
            )
        self._sync_buffers()  # collective
        self.step += 1
        # WHY before the vote: a rank that comes this far has the whole step, whoever dies now
        self._note()
        tracker = self._group.tracker
        tracker.end_step(self.step)
        tracker.enter(Phase.EVALUATION)  # until the next body
        if self.step <= self._first_step + NUM_FIRST:
            self._check_alike()  # collective
        self._vote()  # collective
        self._goodput.note(self.step)
        self._saver.tell_errors()
        is_due = self.step in self._saver.due_steps
        if is_due or self._last.is_inspected:
            self._refuse_nan()  # WHY then: it is the same on all ranks
        if is_due or (self._saver.is_time() and not self._last.spoiled()):
            self._saver.save(self._last)

    def poll(self) -> None:
        """Stop if any rank was asked to, in a long evaluation after a commit. Collective.

        Raises Stopped; the next start evaluates again.
        """
        self._refuse_written()
        self._group.tracker.enter(self._group.tracker.phase)  # a sign of life
        self._vote()  # collective

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0."""
        return self._streams.epoch

    @property
    def batch(self) -> int:
        """The number of the last batch in its epoch, from 0."""
        return self._streams.batch_index

    # ---- how it ends

    @contextmanager
    def ended_well(self, watch: HangWatch) -> Iterator[None]:
        """Save at the end of the loop inside, however it ends. A stop ends here."""
        group, ending = self._group, Ending.STOPPED
        try:
            with suppress(Stopped):
                yield
                self._refuse_written()
                group.check_equal({"the number of commits": str(self.step)})  # collective
                ending = Ending.FINISHED
            self._refuse_nan()
            if self.step:
                self._saver.save_last(self._last)
            self._stop.finish()  # collective
            self.ending = ending
        except BaseException as error:
            watch.close()  # if a rank hung: this waits for the verdict, and the process ends
            self._stop.relieve_last_resort()
            reason = error if isinstance(error, Exception) else None
            if reason is None or is_saved_after(reason):
                group.leave()
                self._save(reason)
            raise
        finally:
            self._status.close_as(self.ending)
            for hook in self._hooks:
                hook.remove()
            self._saver.close()
            self._streams.close()
            ended = "" if self.ending is Ending.FAILED else str(self.ending)
            self._goodput.note(self.step, is_last=True, ended=ended)
            if group.is_main:
                write_summary(self._run.folder, {"status": str(self.ending), "step": self.step})
                if ended:
                    log.info("%s at step %d: %s", ended, self.step, self._run.folder)

    def _refuse_written(self) -> None:
        if written := self._last.changed():
            raise OwnLoopError(
                f"{min(written)} was written after the last commit, and would be lost",
                fix="end each body with run.commit(), before a run.poll()",
            )

    def _refuse_nan(self) -> None:
        if name := self._last.spoiled():
            raise NonFiniteError(
                f"{name} is NaN after commit {self.step}: it is not saved",
                fix="lower the learning rate, clip gradients, look for NaN in the data; the same "
                "command continues from the last checkpoint, if there is one",
            )

    def _refuse_altered(self) -> None:
        if name := self._last.altered():
            raise OwnLoopError(
                f"{name} was written between commit {self.step} and the next body: a start that "
                "continues there would not do it",
                fix="write all that is registered before run.commit(), such as schedule.step()",
            )

    def save_in_need(self, error: Exception | None = None, gone: Sequence[int] = ()) -> None:
        """Save beside a main thread that waits for another rank; the process ends after it."""
        # WHY no release: whoever saves first ends the process
        self._ending.acquire()
        self._save(error, gone, is_beside=True)
        self._goodput.note(self._last.step, is_last=True)

    def _save(
        self, error: Exception | None, gone: Sequence[int] = (), *, is_beside: bool = False
    ) -> None:
        """Write the last commit if this rank is the one to do it. Rank-local; never raises."""
        last, where = self._last, Rescue(self._last.step, None)

        def find() -> Rescue:
            tensors = last.take(is_beside=is_beside)
            if tensors is None or last.spoiled(tensors):
                return where
            return Rescue(last.step, partial(self._saver.save_in_need, last, tensors=tensors))

        save_once(self._group, self._run.folder, find, where=where, error=error, gone=gone)

    def phase_of(self, host: int) -> int:
        """Return the phase of this rank: a body that waits for others does so. Any thread.

        By the stack of the main thread. WHY its state: backward of DDP ends with such a wait, and
        a backward that computes runs.
        """
        frame = sys._current_frames().get(self._main_thread)
        if frame is None or host not in (Phase.FORWARD, Phase.EVALUATION):
            return host
        path = frame.f_code.co_filename
        waits = "/torch/distributed/" in path or "/torch/nn/parallel/" in path
        if path.endswith("/torch/autograd/graph.py"):
            host, waits = Phase.BACKWARD, stat_fields(os.getpid())[:1] == ["S"]
        return Phase.ALL_REDUCE if waits else host

    # ---- within a body

    def watch_forwards(self, state: dict[str, Any]) -> None:
        """See each forward and update from now on."""
        modules = (thing for thing in state.values() if isinstance(thing, nn.Module))
        # WHY: torch.compile of a registered module would compile the hook, too
        self._on_forward = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
        self._hooks = [m.register_forward_pre_hook(self._on_forward) for m in modules]
        # WHY: once layers are unfrozen, a loop wraps its model in DDP again
        self._hooks.append(register_module_module_registration_hook(self._watch_wrapped))
        # WHY of all optimizers: one that wraps another, or was not registered, shows too
        self._hooks.append(register_optimizer_step_pre_hook(self._before_update))

    def _watch_wrapped(self, by: nn.Module, name: str, module: nn.Module | None) -> None:
        if self._registry.is_wrapped(module, by):
            self._hooks.append(by.register_forward_pre_hook(self._on_forward))

    def _begin_body(self, again: bool) -> int:
        """Seed the generators if a body begins; return its step. again: in the same for loop."""
        if not self._is_in_body:
            self._is_in_body = True
            if again and self._last.place["epoch"] == self.epoch:
                self._refuse_altered()
            self._status.attach(
                Work(
                    global_batch=self._streams.global_batch,
                    epochs=self._num_epochs,
                    epoch=lambda: self.epoch,
                    steps=lambda: self._num_steps or None,
                )
            )
            self._group.tracker.enter(Phase.FORWARD)
            self._seed_all(self._seed)
        return self.step

    def _note(self) -> None:
        self._last.note(self.step, self._streams.place())
        self._is_in_body = False
        # WHY here, too: a start may begin with the evaluation that follows
        self._seed_all(mix(self._seed, 1))

    def _seed_all(self, seed: int) -> None:
        own = mix(seed, self.step, self._group.launch.rank)
        seed_all(own, self._group.device.type)
        self.rng = np.random.default_rng(own)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        self._streams.use()
        self._has_forward |= module.training
        if torch.is_grad_enabled():
            self._last.before_forward()

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self._sync_buffers()  # collective; WHY here: after the last update none is, but commit's
        self._last.before_update(optimizer)

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, which forward changes by each rank's own samples."""
        buffers = list(self._registry.buffers().values()) if self._has_forward else []
        self._has_forward = False
        if not buffers or self._group.world_size == 1:
            return
        # WHY data: a backward that is still to come refuses a buffer of another version
        raw = [buffer.data.reshape(-1).view(torch.uint8) for buffer in buffers]
        flat = torch.cat([part.to(self._group.device) for part in raw])
        parts = torch.split(self._group.broadcast_(flat), [len(each) for each in raw])  # collective
        for buffer, part in zip(buffers, parts, strict=True):
            # WHY a clone: 8 bytes may begin at any place in flat
            buffer.data.copy_(part.clone().view(buffer.dtype).view_as(buffer))

    # ---- the state

    def _vote(self) -> None:
        """Raise Stopped on all ranks if one was asked to stop. Collective: all ranks."""
        reason = self._stop.poll()  # collective
        if not self._stop.is_alike:
            raise RankMismatchError(
                f"the ranks differ at commit {self.step}: in their place in the data, or in the "
                "numbers or generators that are registered",
                fix="register only what is the same on all ranks (a generator must not be seeded "
                "by the rank), and call run.batches and run.commit on all of them equally often",
            )
        if reason:
            log.warning("%s: stopping at step %d, saving first", reason, self.step)
            raise Stopped(0)

    def _load(self, saved: Saved) -> None:
        """Put a checkpoint into the objects. Collective. Raises CheckpointMismatchError."""
        tree: dict[str, Any] = saved.meta.get("tree") or {}  # Any: JSON
        known = self._registry.things
        if tree.keys() != known.keys():
            raise CheckpointMismatchError(
                f"the checkpoint has {', '.join(tree) or 'no objects: the script wrote it'}, and "
                f"protect is given {', '.join(known)}",
                fix="give protect the same names as before, or another folder",
            )
        for name in known:
            parts = [part for part in saved.specs if f"{part}.".startswith(f"{name}.")]
            own = receive(self._group, saved, parts, torch.device("cpu"))  # collective
            self._registry.load(name, tree[name], own)  # the same on all ranks
        self.step = saved.meta["step"]
        self._streams.begin(self.step, saved.meta["place"])

    def _check_alike(self) -> None:
        """Raise RankMismatchError if a registered tensor differs between ranks. Collective."""
        found = compare_replicas(self._group, self._registry.pack()[1])  # collective
        if found is not None:
            raise RankMismatchError(
                f"registered tensors are not the same after step {self.step}: {found.text}",
                fix="wrap each model in DistributedDataParallel, copy an average from the wrapped "
                "model, draw no initial values by the rank, gather what is a rank's own, and call "
                "a model on one rank alone after its eval() only",
            )


def _check(**given: Any) -> None:  # Any: the user's
    """Raise OwnLoopError for what the setting that this argument stands for would not take."""
    for name, value in given.items():
        try:
            plain = value.item() if isinstance(value, np.generic) else value
            fit(SETTINGS[_ALIASES.get(name, name)], plain)
        except Misfit as misfit:
            raise OwnLoopError(f"{name}: {misfit}") from None


def _meet(state: dict[str, Any], *, timeout_s: float) -> Group:
    """Take part in the group of the program, or make one; log from here on. Collective."""
    start_logging(rank=0, world_size=1, is_guest=True)
    launch = Launch()
    try:
        launch = read_launch(environment())
    except LaunchError:
        if not dist.is_initialized():  # else the program knows who is who
            raise
    script = str(Path(sys.argv[0]).absolute())
    words = [script if word == str(SCRIPT) else word for word in launch.start.words]
    start = replace(launch.start, words=(*words, *sys.argv[1:]), is_whole=True)
    launch = place_in_group(replace(launch, start=start))
    start_logging(rank=launch.rank, world_size=launch.world_size, is_guest=True)
    end_with_launcher(launch)
    modules = (thing for thing in state.values() if isinstance(thing, nn.Module))
    devices = {p.device for module in modules for p in module.parameters()}
    device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    if dist.is_initialized():
        return adopt_group(launch, device=device, timeout_s=timeout_s)
    prepare_environment(launch, environment())
    keep_nccl_from_exiting(launch, environment())
    return open_group(  # collective
        launch, device=device, backend="auto", timeout_s=timeout_s, shared_memory=False
    )
