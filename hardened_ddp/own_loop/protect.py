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

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hardened_ddp.checkpoint.tensors import plan_file
from hardened_ddp.errors import (
    CheckpointMismatchError,
    HardenedError,
    LaunchError,
    OwnLoopError,
    RankMismatchError,
)
from hardened_ddp.guard.divergence import compare_replicas
from hardened_ddp.guard.hang import HangWatch, Subject
from hardened_ddp.guard.stop import StopRequest
from hardened_ddp.own_loop.batches import Batch, Streams, ledger_start
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
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.process import stat_fields
from hardened_ddp.ranks.seeding import mix, seed_body
from hardened_ddp.ranks.store import ANSWER_LIMIT_S
from hardened_ddp.reporting.ending import leave_failed, settle, stop_status
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.log import start_logging, stop_logging
from hardened_ddp.reporting.status_writer import StatusWriter, Work
from hardened_ddp.reporting.summary import withdraw_summary, write_summary
from hardened_ddp.settings.config import RunConfig
from hardened_ddp.settings.typed_command import SCRIPT
from hardened_ddp.settings.wording import listed
from hardened_ddp.step.failure import errors_told
from hardened_ddp.training.run import Ending
from hardened_ddp.training.run_folder import RunFolder, open_folder, read_checkpoint
from hardened_ddp.training.state import Saved, Saver, receive
from hardened_ddp.training.survivor_save import (
    LOCK_LIMIT_S,
    Rescue,
    is_saved_after,
    refuse_crash_loop,
    save_once,
)

log = logging.getLogger(__name__)

_active: list[Path] = []


class Stopped(SystemExit):
    """A stop was asked for: the state is saved. WHY SystemExit: no line after the loop may run."""


class Failed(SystemExit):
    """An error that the log explains ended the loop: its status says what kind."""


@contextmanager
def protect(
    folder: str | Path,
    *,
    seed: int = 0,
    save_every: int | Literal["auto"] = "auto",
    keep_last: int = 3,
    exact_resume: bool = False,
    hang_after_s: float = 60.0,
    timeout_s: float = 1800.0,
    stop_grace_s: float = 30.0,
    **state: Any,  # Any: the user's objects, by name
) -> Iterator["OwnLoop"]:
    """Protect the loop inside, whose state is in folder and in these objects. Collective.

    Loads the newest valid checkpoint into the objects, in place. save_every: commits between two
    checkpoints. exact_resume: do the first body after a resume twice: DDP sums the first backward
    of three ranks and more in another order. timeout_s: how long commits wait for other ranks. The
    others: see ddp_training.py --help.
    Raises Stopped after a stop, and Failed, which the log explains, or the error of the body.
    """
    if _active:
        raise OwnLoopError(f"protect({str(_active[0])!r}) is not over: one at a time")
    launch, tracker, group, is_stopped = Launch(), Tracker(), None, False
    try:
        launch = _read_launch()
        _active.append(Path(folder))
        group = _join(launch, state, timeout_s=timeout_s, tracker=tracker)  # collective
        launch = group.launch
        with errors_told(group):
            last = LastCommit(Registry(state), group.device)
            with (
                StopRequest(group, digest=last.digest) as stop,
                open_folder(Path(folder), group, keep_last=keep_last) as run,  # collective
                Goodput(run.folder, tracker, launch, step=run.step) as goodput,
                HangWatch(group, run.folder, hang_after_s=hang_after_s) as watch,  # collective
                StatusWriter(run.folder, group) as status,
            ):
                parts = group, run, goodput, stop, status
                loop = OwnLoop(last, parts, seed=seed, save_every=save_every)  # collective
                loop.begin(exact_resume=exact_resume)  # collective
                watch.attach(loop.subject)
                stop.start_last_resort(loop.subject.save, grace_s=stop_grace_s)
                with _ended_well(loop, stop, watch, status):
                    yield loop
                is_stopped = loop.ending is Ending.STOPPED
    except HardenedError as error:
        if group is None:
            log_failure(error)
        raise Failed(settle(leave_failed(error, launch), environment())) from error
    except Exception as error:
        leave_failed(error, launch)
        raise
    finally:
        _active.clear()
        if group is not None:
            group.close()
        stop_logging()
    if is_stopped:
        raise Stopped(settle(stop_status(None, environment()), environment()))


@contextmanager
def _ended_well(
    loop: "OwnLoop", stop: StopRequest, watch: HangWatch, status: StatusWriter
) -> Iterator[None]:
    """Save at the end of the loop inside, however it ends. A stop ends here."""
    try:
        yield
        loop.finish()  # collective
        stop.finish()  # collective
        loop.ending = Ending.FINISHED
    except Stopped:
        loop.save_last()
        stop.finish()  # collective
        loop.ending = Ending.STOPPED
    except BaseException as error:
        watch.close()  # if a rank hung: this waits for the verdict, and the process ends
        stop.relieve_last_resort()
        loop.save_as_survivor(error)
        if isinstance(error, NameError) and loop.first_step:
            raise _unbound(error, loop.first_step) from error
        raise
    finally:
        status.close_as(loop.ending)
        loop.close()


class OwnLoop:
    """What the loop uses of protect."""

    def __init__(
        self,
        last: LastCommit,
        parts: tuple[Group, RunFolder, Goodput, StopRequest, StatusWriter],
        *,
        seed: int,
        save_every: int | Literal["auto"],
    ) -> None:
        """Collective: all ranks."""
        self._last, self._registry, self._seed = last, last.registry, seed
        self._group, self._run, self._goodput, self._stop, self._status = parts
        self.step = 0
        """Commits so far. Read it; commit() counts."""

        self.rng = np.random.default_rng(seed)
        """Of numpy, of this rank, new in each body, and after each commit."""

        self.first_step = 0
        """Of this start."""

        self.ending = Ending.FAILED
        self._num_epochs = self._num_steps = 0
        self._is_in_body = self._has_forward = False
        self._num_commits = 0
        self._strangers: set[str] = set()
        self._hooks: list[Any] = []  # Any: torch's handles
        start = self._group.run_on_main(  # collective
            lambda: ledger_start(self._run.folder), what="opening the ledger"
        )
        self._streams = Streams(self._group, self._run.folder, seed=seed, start=start)
        self._run.store.call_before_commit(self._streams.sync)
        plan_file(self._registry.pack()[1])  # raises for what no checkpoint holds
        self._save_every = None if save_every == "auto" else save_every
        self._saver: Saver  # from begin on
        self._main_thread, self._ending = threading.get_ident(), threading.Lock()
        self.subject = Subject(save=self._save_while_stuck, phase=self._phase_of)
        """For the watch for hangs."""

        self._stop.watch(self._run.folder)

    # ---- what the user calls

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, from 0; the first one may be half done."""
        self._num_epochs = count
        self._tell_work()
        while self.epoch < count:
            yield self.epoch
            self._streams.place.end_epoch()
            if not self.step:
                self._refuse_written()
            elif self.epoch == count:
                # WHY of all: one rank alone would wait in a commit until the timeout
                wrote = self._group.gather_json(bool(self._last.written()))  # collective
                if any(wrote) and not all(wrote):
                    raise RankMismatchError(
                        "some ranks alone wrote a registered object after the last batch: rank "
                        f"{listed(rank for rank, has in enumerate(wrote) if has)}",
                        fix="write it on all ranks, or do not register it",
                    )
                if wrote[0]:  # such as an average
                    self.commit()  # collective

    def batches(
        self, loader: DataLoader[Any], *, name: str = "data", repeat: bool = False
    ) -> Iterator[Batch]:
        """Yield this rank's share of each window of an epoch, from the committed place on.

        Of the loader all but its sampler counts: the order is shuffled by the seed. repeat: begin
        again, in another order, whenever it is over.
        """
        found = self._streams.batches(loader, name=name, repeat=repeat, begin=self._begin_body)
        self._tell_work()
        return found

    def steps(self, count: int) -> Iterator[int]:
        """Yield the steps that are left of count, for a loop that makes its data by itself."""
        self._num_steps = count
        self._tell_work()
        while self.step < count:
            before = self._num_commits
            yield self._begin_body()
            if self._num_commits == before:
                raise OwnLoopError("a body of run.steps ended without run.commit()")

    def commit(self) -> None:
        """Count what was done since the last commit as one step. Collective: all ranks.

        Raises Stopped if any rank was asked to stop; its state is that of this commit.
        """
        if self._strangers:
            raise OwnLoopError(
                f"{', '.join(self._strangers)} updates a registered model and is not registered "
                "itself: its state would be lost",
                fix="give it to protect by a name, also if it is inside of another optimizer",
            )
        if self.epoch < self._num_epochs and self._last.place == self._streams.place.as_json():
            raise OwnLoopError(
                f"commit {self.step + 1} has no batch of run.batches since the one before it: a "
                "start that continues there would do this part of the epoch twice",
                fix="leave it out: what follows a batch belongs to the next commit; a loop without "
                "loaders counts by run.steps(n)",
            )
        self._sync_buffers()  # collective
        self._streams.write(is_commit=True)
        self._num_commits += 1
        if self._streams.is_rehearsal:
            self._end_rehearsal()
            return
        self.step += 1
        # WHY before the vote: a rank that comes this far has the whole step, whoever dies now
        self._note()
        tracker = self._group.tracker
        tracker.end_step(self.step)
        tracker.enter(Phase.EVALUATION)  # until the next body
        reason = self._stop.poll()  # collective
        if not self._stop.is_alike:
            raise RankMismatchError(
                f"the ranks differ at commit {self.step}, in {self._differing()}",
                fix="register only what is the same on all ranks (a generator must not be seeded "
                "by the rank), and call run.batches and run.commit on all of them equally often",
            )
        if self.step <= self.first_step + NUM_FIRST:
            self._check_alike()  # collective
        if reason:
            self._leave_for(reason)
        self._goodput.note(self.step)
        self._saver.tell_errors()
        if self.step in self._saver.due_steps or self._saver.is_time():
            self._saver.save(self._last)

    def poll(self) -> None:
        """Stop if any rank was asked to, in a long evaluation after a commit. Collective.

        Raises Stopped; the next start evaluates again.
        """
        if written := self._last.written():
            raise OwnLoopError(
                f"run.poll() between an update and its run.commit(): {min(written)} was written"
            )
        tracker = self._group.tracker
        tracker.enter(tracker.phase)  # a sign of life
        if reason := self._stop.poll():  # collective
            self._leave_for(reason)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0."""
        return self._streams.place.epoch

    @property
    def batch(self) -> int:
        """The number of the last batch in its epoch, from 0."""
        return self._streams.batch_index

    # ---- what protect calls

    def begin(self, *, exact_resume: bool) -> None:
        """Load the newest checkpoint, if there is one. Collective: all ranks."""
        group, folder = self._group, self._run.folder
        group.tracker.begin("loading the checkpoint")
        saved = read_checkpoint(self._run, group)  # collective
        if saved is not None:
            self._load(saved)  # collective
            log.info("resuming %s from step %d", folder, self.step)
            self._streams.is_rehearsal = exact_resume
        refuse_crash_loop(group, self.step, folder)
        self._check_alike()  # collective
        self.first_step = self.step
        group.tracker.start_at(self.step)
        self._goodput.begin(self.step)
        if group.is_main:
            withdraw_summary(folder)
        self._note()
        config = RunConfig(checkpoint_every_steps=self._save_every)
        # WHY not before: it asks how large the state is
        self._saver = Saver(self._last, self._run.store, group=group, config=config)
        for thing in self._registry.given.values():
            if isinstance(thing, nn.Module):
                self._hooks.append(thing.register_forward_pre_hook(self._before_forward))
        # WHY of all optimizers: one that wraps another, or was not registered, shows too
        self._hooks.append(register_optimizer_step_pre_hook(self._before_update))

    def finish(self) -> None:
        """Save the last commit at the end of the loop. Collective: all ranks."""
        self._refuse_written()
        self._group.check_equal({"the number of commits": str(self.step)})  # collective
        self.save_last()

    def _refuse_written(self) -> None:
        if written := self._last.written():
            raise OwnLoopError(
                f"{min(written)} was written after the last commit, and would be lost",
                fix="end each body with run.commit()",
            )

    def save_last(self) -> None:
        """Write the last commit and wait until it is on the disk. Rank-local."""
        if self.step:
            self._saver.save_last(self._last)

    def save_as_survivor(self, error: BaseException) -> None:
        """Write the last commit if this rank is the one to do it. Rank-local; never raises."""
        if isinstance(error, Exception) and not is_saved_after(error):
            return
        self._group.leave()
        self._rescue(error, is_beside=False)

    def close(self) -> None:
        """Finish the last write; say how the loop ended. Rank-local."""
        for hook in self._hooks:
            hook.remove()
        self._saver.close()
        self._streams.close()
        is_over, ending = self.ending is not Ending.FAILED, str(self.ending)
        self._goodput.note(self.step, is_last=True, ended=ending if is_over else "")
        if self._group.is_main:
            write_summary(self._run.folder, {"status": ending, "step": self.step})
            if is_over:
                log.info("%s at step %d: %s", ending, self.step, self._run.folder)

    # ---- within a body

    def _begin_body(self) -> int:
        """Seed the generators if a body begins; return its step."""
        if not self._is_in_body:
            self._is_in_body = True
            self._group.tracker.enter(Phase.FORWARD)
            self._seed_all(self._seed)
        return self.step

    def _note(self) -> None:
        self._last.note(self.step, self._streams.place.as_json())
        self._is_in_body = False
        # WHY here, too: a start may begin with the evaluation that follows
        self._seed_all(mix(self._seed, 1))

    def _seed_all(self, seed: int) -> None:
        rank, device_type = self._group.launch.rank, self._group.device.type
        self.rng = seed_body(seed, step=self.step, rank=rank, device_type=device_type)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        self._streams.write()
        self._has_forward |= module.training
        if torch.is_grad_enabled():
            self._last.before_forward()

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self._sync_buffers()  # collective; WHY here: after the last update none is, but commit's
        named = (name for name, own in self._registry.optimizers.items() if own is optimizer)
        name = next(named, "")
        found = self._last.before_update(optimizer, name)
        if found and not name:
            self._strangers.add(type(optimizer).__name__)

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, which forward changes by each rank's own samples."""
        if not self._has_forward:
            return
        self._has_forward = False
        kinds: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
        for module in self._registry.modules.values():  # in one order on all ranks
            for buffer in module.buffers():
                kinds.setdefault((buffer.dtype, buffer.device), {})[id(buffer)] = buffer
        for same in kinds.values() if self._group.world_size > 1 else ():
            buffers = list(same.values())
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._group.broadcast_(flat)  # collective
            sizes = [buffer.numel() for buffer in buffers]
            for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
                # WHY data: a forward of before may have its backward still to come, which refuses a
                # buffer of another version
                buffer.data.copy_(part.view_as(buffer))

    def _end_rehearsal(self) -> None:
        """Put back the state before the first body, which the loop now does again."""
        self._streams.is_rehearsal = False
        tensors = self._last.take(is_beside=False)  # all are copied in the first bodies
        assert tensors is not None
        for name, tree in self._last.tree.items():
            self._registry.load(name, tree, tensors)
        for module in self._registry.modules.values():
            module.zero_grad()
        self._streams.begin(self.step, dict(self._last.place))
        self._note()

    def _leave_for(self, reason: str) -> None:
        log.warning("%s: stopping at step %d, saving first", reason, self.step)
        raise Stopped(0)

    def _tell_work(self) -> None:
        windows = [stream["window"] for stream in self._streams.place.streams.values()]
        work = Work(
            global_batch=max(windows, default=0),
            epochs=self._num_epochs,
            epoch=lambda: self.epoch,
            steps=lambda: self._num_steps or None,
        )
        self._status.attach(work)

    # ---- the state

    def _load(self, saved: Saved) -> None:
        """Put a checkpoint into the objects. Collective. Raises CheckpointMismatchError."""
        tree: dict[str, Any] = saved.meta.get("tree") or {}  # Any: JSON
        names, known = list(tree), list(self._registry.things)
        lacking = [name for name in known if name not in names]
        unknown = [name for name in names if name not in known]
        if lacking or unknown:
            what = f"the checkpoint has no {', '.join(lacking)}; it has {', '.join(names)}"
            if not lacking:
                what = f"the checkpoint has {', '.join(unknown)}, which protect is not given"
            raise CheckpointMismatchError(
                what if tree else f"{self._run.folder} is a run of ddp_training.py",
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
                "model, draw no initial values by the rank, and gather what is a rank's own",
            )

    def _differing(self) -> str:
        """Name what differs between ranks. Rank-local. WHY no collective: one may not be here."""
        store, tree = self._group.store, self._last.tree
        facts = {name: crc32(str(part).encode()) for name, part in tree.items()}
        facts["the place in the data"] = crc32(str(self._last.place).encode())
        keys = [f"commit/{self.step}/{rank}" for rank in range(self._group.world_size)]
        store.set(keys[self._group.launch.rank], json.dumps(facts))
        store.wait(keys, ANSWER_LIMIT_S)
        everyone = [json.loads(text) for text in store.read(keys).values()]
        names = [name for name in facts if any(facts[name] != one.get(name) for one in everyone)]
        return ", ".join(names) or "their number of commits, or in names of tensors"

    def _rescue(
        self, error: BaseException | None, *, is_beside: bool, gone: Sequence[int] = ()
    ) -> None:
        last, saver = self._last, self._saver

        def find() -> Rescue:
            tensors = last.take(is_beside=is_beside)
            if tensors is None:
                return Rescue(last.step, None)
            return Rescue(last.step, partial(saver.save_in_need, last, tensors=tensors))

        reason = error if isinstance(error, Exception) else None
        where = Rescue(last.step, None)
        save_once(self._group, self._run.folder, find, where=where, error=reason, gone=gone)

    def _save_while_stuck(
        self, error: HardenedError | None = None, gone: Sequence[int] = ()
    ) -> None:
        """Save beside a main thread that waits for another rank; the process ends after it."""
        # WHY no release: whoever saves first ends the process, and the state must not change
        self._ending.acquire()
        if not self._last.lock.acquire(timeout=LOCK_LIMIT_S):
            log.warning("a commit is under way: nothing is saved, the last checkpoint stays")
            return
        self._rescue(error, is_beside=True, gone=gone)
        self._goodput.note(self._last.step, is_last=True)

    def _phase_of(self, host: int) -> int:
        """Return the phase of this rank: a body that waits for others does so. Any thread.

        By the stack of the main thread. WHY its state: backward of DDP ends with such a wait, and
        a backward that computes runs.
        """
        frame = sys._current_frames().get(self._main_thread)
        if frame is None or host not in (Phase.FORWARD, Phase.EVALUATION):
            return host
        path = frame.f_code.co_filename
        if "/torch/distributed/" in path or "/torch/nn/parallel/" in path:
            return Phase.ALL_REDUCE
        if not path.endswith("/torch/autograd/graph.py"):
            return host
        return Phase.ALL_REDUCE if stat_fields(os.getpid())[:1] == ["S"] else Phase.BACKWARD


def _unbound(error: NameError, step: int) -> OwnLoopError:
    return OwnLoopError(
        f"{error}: this start continues at step {step}, and did not run the bodies before it",
        fix="give it a value before the loop; if its value counts, keep it in a registered dict",
    )


def _read_launch() -> Launch:
    """Read who launched this process, and log from here on. A group of the program counts first."""
    try:
        launch = read_launch(environment())
    except LaunchError:
        if not dist.is_initialized():
            start_logging(rank=0, world_size=1, is_guest=True)
            raise
        launch = Launch()
    script, given = str(Path(sys.argv[0]).absolute()), sys.argv[1:]
    words = [script if word == str(SCRIPT) else word for word in launch.start.words]
    start = replace(launch.start, words=(*words, *given), is_whole=True)
    launch = place_in_group(replace(launch, start=start))
    start_logging(rank=launch.rank, world_size=launch.world_size, is_guest=True)
    return launch


def _join(launch: Launch, state: dict[str, Any], *, timeout_s: float, tracker: Tracker) -> Group:
    """Take part in the group of the program, or make one. Collective: all ranks."""
    end_with_launcher(launch)
    modules = (thing for thing in state.values() if isinstance(thing, nn.Module))
    devices = {p.device for module in modules for p in module.parameters()}
    device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    if dist.is_initialized():
        return adopt_group(launch, device=device, timeout_s=timeout_s, tracker=tracker)
    prepare_environment(launch, environment())
    keep_nccl_from_exiting(launch, environment())
    return open_group(  # collective
        launch,
        device=device,
        backend="auto",
        timeout_s=timeout_s,
        shared_memory=False,
        tracker=tracker,
    )
