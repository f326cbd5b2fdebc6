#!/usr/bin/env python3
"""Train a PyTorch model with DistributedDataParallel (DDP): the whole run as one page.

    torchrun --nproc_per_node=2 ddp_training.py     one process (rank) per GPU; 2 on the CPU
    python ddp_training.py --single_gpu             one process, no DDP
    python ddp_training.py evaluate RUN             how good is each class? JSON and a table
    python ddp_training.py watch RUN                what is each rank doing, and how fast?
    python ddp_training.py report RUN ...           curves, faults and times as one HTML file
    python ddp_training.py replay RUN --step N      this step again: what was in it?
    python ddp_training.py bisect RUN --when C      the first step where it holds, and the sample
    python ddp_training.py diff RUN RUN             where do two runs part, and why?
    python ddp_training.py explain LOG              why did this job fail? of any DDP program
    python ddp_training.py doctor                   what is wrong with this machine?
    python ddp_training.py audit -- COMMAND         what is silently wrong in your own program?
    python ddp_training.py drill NAME               does a run survive this fault here?
    python ddp_training.py drill -- COMMAND         what does your own program lose in faults?

Read from main() down, in the order of the run: settings, launch, process group, run folder, data,
model, DDP, the loop, the end. Every rank runs this same page; rank 0 also writes files. A line
marked "# collective" is reached by all ranks, in the same order, or the run hangs.
The machinery is in hardened_ddp/; docs/READING_ORDER.md says what to read first.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# WHY so few imports here: these need no torch, so --help and wrong flags answer at once.
from hardened_ddp.errors import ConfigError, HardenedError, NonFiniteError, PeerLostError, StepError
from hardened_ddp.ranks.launch import (
    Launch,
    environment,
    keep_nccl_from_exiting,
    log_failure,
    prepare_environment,
    prepare_signals,
    read_launch,
)
from hardened_ddp.ranks.resources import collect_rarely, keep_imported
from hardened_ddp.reporting.ending import (
    is_told_by_another_rank,
    leave_failed,
    settle,
    write_error_file,
)
from hardened_ddp.reporting.sinks import printed
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import Resolved, resolve
from hardened_ddp.settings.manual import help_text
from hardened_ddp.settings.typed_command import (
    config_file,
    missing_package,
    own_command,
    program_name,
)

if TYPE_CHECKING:
    from hardened_ddp.ranks.group import Group
    from hardened_ddp.reporting.events import Events
    from hardened_ddp.step.parts import Parts
    from hardened_ddp.training.run import Ending, Run
    from hardened_ddp.training.state import Saved

log = logging.getLogger("hardened_ddp")

TRAINER = ("train", "evaluate", "export")  # the other commands need no trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A user's mistake gives one line, no traceback."""
    try:
        request = parse(sys.argv[1:] if argv is None else argv, edited_file=config_file())
        if request.command == "help":
            print(help_text(request.options["topic"]), flush=True)
            return 0
        if request.command == "drill" and not request.program:
            from ddp_drills.command import run_drills

            return run_drills(request, output=printed(sys.stdout), env=environment())
        if request.command not in TRAINER:  # none of them trains, or waits for torch to be imported
            from ddp_runs.tools import run_tool

            return run_tool(request)
        sys.path.append(str(Path.cwd()))  # for models and datasets named package.module:callable
        if request.command == "export":
            from hardened_ddp.export.export import run_export

            return run_export(request.options, output=printed(sys.stdout))
        # Who launched us? torchrun sets RANK, WORLD_SIZE and more for each process.
        launch = read_launch(environment())
        settings = resolve(request, world_size=launch.world_size)
        if request.command == "evaluate":
            how = request.options
            return run_ranks(settings, launch, lambda group: measure(settings, group, how))
        if settings.config.loop.hang_after_s > 0:
            keep_nccl_from_exiting(launch, environment())  # before surviving ranks have saved
        return run_ranks(settings, launch, lambda group: train(settings, group), trains=True)
    except HardenedError as error:
        if not (isinstance(error, ConfigError) and is_told_by_another_rank(environment())):
            print(f"{program_name()}: error {error}", file=printed(sys.stderr))
        write_error_file(error, environment())
        return error.exit_status
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        print(f"{program_name()}: error {missing}", file=printed(sys.stderr))
        return missing.exit_status
    except BrokenPipeError:  # whoever read the output has gone, as in: ... --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not sent yet
        return 141  # what a shell gives for SIGPIPE
    except KeyboardInterrupt:  # a command, or while torch is imported or the ranks meet
        print(f"{program_name()}: stopped by Ctrl-C; there was nothing to save", file=sys.stderr)
        return 130  # what a shell gives for Ctrl-C


def run_ranks(
    settings: Resolved, launch: Launch, work: Callable[[Group], int], *, trains: bool = False
) -> int:
    """Choose the device, meet the other ranks, do the work, and leave nothing behind."""
    config, debug = settings.config.device, settings.config.loop.debug
    prepare_environment(launch, environment(), debug=debug, deterministic=config.deterministic)
    prepare_signals(launch)
    from hardened_ddp.ranks.phase import Tracker
    from hardened_ddp.reporting.log import start_logging, stop_logging, watch_start

    tracker = Tracker()  # knows what this rank is doing, and for how long
    start_logging(rank=launch.rank, world_size=launch.world_size, debug=debug)
    is_over = watch_start(tracker)  # tells what takes long until the first step
    tracker.begin("importing torch")
    # WHY here: it imports torch, which takes a second, and everything above answers without it.
    from hardened_ddp.checkpoint.disk import refuse_links
    from hardened_ddp.ranks.device import name_lines_of_failures, pick_device
    from hardened_ddp.ranks.group import open_group
    from hardened_ddp.ranks.seeding import seed_run
    from hardened_ddp.step.failure import errors_told
    from hardened_ddp.training.building import check_names

    keep_imported()  # nothing of torch is garbage
    if debug:
        name_lines_of_failures()
    is_shared = False  # what went wrong does so on all ranks: one of each node tells it
    try:
        if trains:
            is_shared = is_told_by_another_rank(environment())
            check_names(settings.config)  # the user's code: a wrong name ends here
            refuse_links(settings.run_folder)  # nothing is written through one
            is_shared = False
        seed_run(config.seed, deterministic=config.deterministic)
        device = pick_device(launch, cpu_only=config.cpu_only, backend=config.backend)
        if config.single_gpu and device.type == "cpu":
            log.warning("--single_gpu: torch sees no GPU on this machine; training on the CPU")
        # The process group: NCCL between GPUs, gloo between CPUs. None with a single rank.
        tracker.begin("rendezvous with the other ranks")
        group = open_group(  # collective: all ranks meet here
            launch,
            device=device,
            backend=config.backend,
            timeout_s=config.timeout_s,
            shared_memory=settings.config.ddp.shared_memory,
            tracker=tracker,
        )
        try:
            with errors_told(group):  # also to the other ranks: they only see a closed connection
                return work(group)
        except Exception as error:
            return leave_failed(error, launch)
        finally:
            group.close()
    except Exception as error:
        if not (is_shared and isinstance(error, HardenedError)):
            log_failure(error)
        return leave_failed(error, launch)
    finally:
        is_over.set()
        stop_logging()


def measure(settings: Resolved, group: Group, options: Mapping[str, str]) -> int:
    """Measure a trained model on its test set, every sample once. Collective: all ranks."""
    from hardened_ddp.training.evaluation import evaluate_run

    evaluate_run(settings, group, options)  # collective
    return 0


def train(settings: Resolved, group: Group) -> int:
    """Open the run folder, build every part, train from where the run stands, say how it ended."""
    from hardened_ddp.guard.hang import HangWatch
    from hardened_ddp.guard.stop import StopRequest
    from hardened_ddp.preflight.probe import check_evaluation
    from hardened_ddp.reporting.goodput import Goodput
    from hardened_ddp.reporting.status_writer import StatusWriter
    from hardened_ddp.training.evaluation import check_stop_when, is_over
    from hardened_ddp.training.run import Ending, Run
    from hardened_ddp.training.run_folder import open_run, read_checkpoint
    from hardened_ddp.training.run_report import tell_start
    from hardened_ddp.training.state import begin
    from hardened_ddp.training.survivor_save import refuse_crash_loop, save_as_survivor

    loop = settings.config.loop
    group.tracker.begin("opening the run folder")
    # From here on a signal means: save, then leave.
    with (
        StopRequest(group, time_limit=loop.time_limit) as stop,
        open_run(settings, group) as folder,  # collective
        Goodput(folder.folder, group.tracker, group.launch, step=folder.step) as goodput,
        HangWatch(group, folder.folder, hang_after_s=loop.hang_after_s) as watch,  # collective
        StatusWriter(folder.folder, group) as rank_status,  # for the commands watch and report
    ):
        saved = read_checkpoint(folder, group)  # collective: rank 0 reads, all get it
        folder.begin(settings, saved)
        parts = build(settings, group, saved, folder.events)  # collective
        check_stop_when(parts)
        check_evaluation(parts)  # collective
        progress = begin(parts, saved)  # collective
        folder.write_settings(settings)  # WHY not before: they may not fit the run to be continued
        tell_start(settings, parts, progress)  # and the command of on_event
        if is_over(parts, progress) and folder.is_finished(group, progress.step):  # collective
            goodput.note(progress.step, is_last=True, ended="finished")
            return 0
        run = Run(parts, progress, folder, goodput, stop)  # collective
        watch.attach(run.subject)
        rank_status.attach(run.work())
        status = Ending.FAILED
        try:
            samples = partial(parts.sampler.next_ids, progress.epoch, progress.cursor)
            refuse_crash_loop(group, progress.step, run.folder, next_samples=samples)
            ending = fit(run)  # collective
            run.saver.save_last(progress)
            stop.finish()  # collective
            status = ending
        except Exception as error:
            watch.close()  # if a rank hung: this waits for the verdict, and the process ends
            stop.relieve_last_resort()  # it would end the process amid the save of this thread
            # This rank failed, or another one: a surviving rank saves the last completed step.
            save_as_survivor(error, run.stepper, run.saver, run.folder)
            if group.launch.is_main or not isinstance(error, PeerLostError):
                error.add_note(f"why: {own_command('explain', folder.folder)}")
            raise
        finally:
            rank_status.close_as(status)
            run.close(status)  # on every path: what is on its way to the disk gets there
        return run.report.say_what_next(status)


def build(settings: Resolved, group: Group, saved: Saved | None, events: Events) -> Parts:
    """Put together data, model, DDP and optimizer. Collective: all ranks."""
    from hardened_ddp.data.loader_setup import build_eval_loader, build_sampler, build_train_loader
    from hardened_ddp.data.sources.datasets import build_data, prepare_data
    from hardened_ddp.model.precision import Precision
    from hardened_ddp.preflight.optimizer_trial import build_optimizer_and_schedule
    from hardened_ddp.preflight.trial import Trial
    from hardened_ddp.step.parts import Parts
    from hardened_ddp.training import building
    from hardened_ddp.training.building import build_replica, model_and_task

    config = settings.config
    group.tracker.begin("downloading and opening the dataset")
    # Data. Each node downloads once; then every rank opens the same files.
    group.run_on_local_main(lambda: prepare_data(config.data), what="preparing data")  # collective
    leaves_out, tests = config.loop.continue_on_error, config.loop.evaluates
    data = build_data(config.data, leaves_out=leaves_out, task=config.task.task, evaluates=tests)
    precision = Precision(config.optimizer.amp, group.device)  # autocast; a GradScaler for fp16
    # Do all ranks mean the same run?
    group.check_equal(building.facts_of_rank(config, data.told, precision.name))  # collective
    # A DistributedSampler: each rank gets its share of every window of global_batch samples.
    meta = None if saved is None else saved.meta  # the numbers of the checkpoint to resume from
    global_batch = building.choose_global_batch(
        config, world_size=group.world_size, saved=meta, sources=settings.sources
    )
    sampler = build_sampler(  # collective
        data, config, group=group, global_batch=global_batch, saved=meta
    )
    length = building.count_steps(config, sampler, meta)
    loader = build_train_loader(data, sampler, config, group=group, length=length)
    group.tracker.begin("building the model")
    # The model, the task that scores its output, and the DDP wrapper.
    model, task, samples = model_and_task(config, group, data, loader, saved=meta)  # collective
    group.tracker.begin("trying the model and wrapping it in DDP")
    trial = Trial(model, task, precision, group)
    replica, sums = build_replica(config, trial, samples, saved=meta)  # collective
    # The optimizer, and its learning rate in each step.
    schedule = build_optimizer_and_schedule(  # collective
        trial, config.optimizer, total_steps=length.schedule
    )
    return Parts(
        config=config,
        group=group,
        device=group.device,
        data=data,
        sampler=sampler,
        train_loader=loader,
        eval_loader=build_eval_loader(data, config, group),
        replica=replica,
        gradients=sums,
        task=task,
        precision=precision,
        optimizer=schedule.optimizer,
        schedule=schedule,
        global_batch=global_batch,
        length=length,
        events=events,
        average=building.build_average(config.optimizer, replica, sums),
        base=building.describe_base(config, model, data, group, meta),  # collective
    )


def fit(run: Run) -> Ending:
    """Train from where the run stands to its end, or to an agreed stop; say which. Collective."""
    from hardened_ddp.step.gradient import Outcome
    from hardened_ddp.step.step import is_due
    from hardened_ddp.training.evaluation import is_due_for_evaluation, stops_early
    from hardened_ddp.training.run import Ending

    if plan := environment().get("HARDENED_DDP_REPLAY"):  # set by the command replay
        from ddp_runs.replay_rank import replay_steps

        return replay_steps(run, Path(plan))  # collective
    config, progress, stop = run.parts.config, run.progress, run.stop
    # A window: the samples of one optimizer step over all ranks. batches: this rank's share of it,
    # in micro-batches. After those of an epoch comes a None; after a rollback they begin again.
    windows = run.windows()
    while found := next(windows, None):
        window, batches = found
        if window is None:
            finish_epoch(run)  # collective
            continue
        if stop.poll():  # collective: all ranks stop here, or none
            run.stepper.confirm_last_step()  # collective
            log.warning("%s: stopping at step %d, saving first", stop.reason, progress.step)
            break
        if config.loop.eval_every_steps and is_due_for_evaluation(run.parts, progress):
            run.measure()  # collective
            if stops_early(run.parts, progress):
                run.rollback.compare_or_roll_back()  # collective: the comparison at the end
            if stop.reason or stops_early(run.parts, progress):
                break
        if stop.has_looked:  # some times a second
            run.do_periodic_work()  # signs of life, checkpoints by time
        try:
            # Forward, backward, all-reduce, update: see step/step.py.
            outcome = run.stepper.train_step(window, batches)  # collective
        except (NonFiniteError, StepError) as error:
            run.rollback.repair_or_raise(error)  # collective
            is_replaced = True
        else:
            # Now and then, and at the end, the ranks compare their weights. If they differ, or one
            # step after the other gives NaN, the run goes back to a checkpoint.
            is_last = progress.step >= run.parts.length.total
            is_compared = is_last or is_due(progress.step, run.compares_every)
            asks = is_compared or outcome is Outcome.LEFT_OUT
            is_replaced = asks and run.rollback.compare_or_roll_back()  # collective
        if is_replaced:
            windows = run.windows()  # from the step that the run went back to
            continue
        if is_due(progress.step, config.loop.log_interval):
            run.report_losses()  # collective
        if progress.step in run.saver.due_steps:
            run.save()
    return Ending.STOPPED if stop.reason else Ending.FINISHED


def finish_epoch(run: Run) -> None:
    """Evaluate and save if that is due; a stop meanwhile leaves the epoch open. Collective."""
    from hardened_ddp.training.evaluation import is_due_for_evaluation, stops_early

    parts, progress = run.parts, run.progress
    if run.stepper.gradient.totals.num_steps:
        run.report_losses()  # collective
    run.stepper.end_epoch()
    is_saved = is_due_for_evaluation(parts, progress, ends_epoch=True) and run.measure()
    if run.stop.reason:
        progress.reopen_epoch(parts.sampler.end)  # the next start evaluates again
        return
    if progress.epoch in run.saver.due_epochs and not is_saved:
        run.save()
    if stops_early(parts, progress) and progress.step < parts.length.total:
        run.rollback.compare_or_roll_back()  # collective: the comparison at the end


def run_as_program() -> NoReturn:
    """Be the program: of this script, and of the installed command hardened-ddp."""
    if isinstance(sys.stdout, TextIOWrapper):  # a name that the terminal can't show is no error
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # from the first lines
        signal.signal(signal.SIGINT, signal.default_int_handler)  # main() answers Ctrl-C
    collect_rarely()  # while torch is imported: it saves a third of that time
    status = main()
    if status and "torch" in sys.modules:
        from hardened_ddp.guard.stop import leave_at_once

        leave_at_once(status)
    sys.exit(settle(status, environment()))


if __name__ == "__main__":
    run_as_program()
