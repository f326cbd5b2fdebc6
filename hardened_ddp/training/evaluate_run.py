"""The command evaluate: a trained model on its whole test set, on any number of ranks.

Every sample counts once: the ranks' shares do not overlap, and at the end the count is compared
with the size of the set.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.checkpoint.folder import Found, open_checkpoint
from hardened_ddp.data.loader_setup import build_eval_loader
from hardened_ddp.data.sources.datasets import TaskData, build_data, prepare_data
from hardened_ddp.errors import DataError, StepError
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.resources import collect_as_usual
from hardened_ddp.reporting.summary import tell_report
from hardened_ddp.settings.commands import AVERAGED
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.step.gradient import Totals
from hardened_ddp.task.build import build_task
from hardened_ddp.task.details import report_lines
from hardened_ddp.task.task import Task, described, with_loss
from hardened_ddp.training.evaluation import EvaluationLoop
from hardened_ddp.training.run_folder import share_checkpoint
from hardened_ddp.training.state import receive
from hardened_ddp.training.weights import MODEL_PREFIX, model_tensors, rebuild_model


def evaluate_run(settings: Resolved, group: Group, options: Mapping[str, str]) -> None:
    """Evaluate the best or newest checkpoint of what --resume names; report it. Collective."""
    config, output, averaged = settings.config, options["output"], options["weights"] == AVERAGED
    saved: list[Found] = []  # on rank 0

    def choose() -> Found:
        saved.append(open_checkpoint(Path(config.run.resume), prefer_best=True))
        return saved[0]

    shared = share_checkpoint(group, choose)  # collective
    assert shared is not None  # choose raises if there is none
    prefixes = (MODEL_PREFIX, AVERAGE) if averaged else (MODEL_PREFIX,)
    names = [name for name in shared.specs if name.startswith(prefixes)]
    weights = receive(group, shared, names, torch.device("cpu"))  # collective
    group.run_on_local_main(lambda: prepare_data(config.data), what="preparing data")  # collective
    saved_task = shared.meta["task"]
    leaves_out = config.loop.continue_on_error
    data = build_data(config.data, leaves_out=leaves_out, task=saved_task["name"])
    model = rebuild_model(model_tensors(weights, shared.meta), shared.meta).to(group.device)
    if shared.meta["channels_last"]:  # WHY: the same order of additions as in training
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch
    task = build_task(saved_task["name"], model, data, config.task)
    task.take_over(saved_task["learned"])
    MovingAttributes(model, task).load(shared.meta.get("attributes", {}))
    task.in_detail = True
    report = measure(model, task, data, config, group)  # collective
    report |= {
        "dataset": config.data.dataset,
        "is_data_of_training": data.fingerprint == shared.meta["dataset_fingerprint"],
        "is_averaged": any(name.startswith(AVERAGE) for name in names),
        "step": shared.meta["step"],
        "epoch": shared.meta["epoch"],
        "world_size": group.world_size,
    }

    def tell() -> None:
        path = saved[0].path
        run, name = path.parent.parent, f"evaluation-{path.name}.json"
        # WHY: the run of a colleague may be read, and not written to
        place = run / name if os.access(run, os.W_OK) else Path(f"{run.name}-{name}")
        place = Path(output) if output else place
        report["checkpoint"] = str(path)
        metrics = with_loss(report["loss"], described(task.test_metrics, report))
        table = report_lines(report)
        tell_report(report, metrics=metrics, table=table, place=place, output=sys.stdout)

    group.run_on_main(tell, what="writing the report")  # collective


def measure(
    model: nn.Module, task: Task, data: TaskData, config: Config, group: Group
) -> dict[str, Any]:
    loader = build_eval_loader(data, config, group, measures_all=True)
    if loader is None:
        raise DataError(
            f"dataset {config.data.dataset} has no test set to evaluate on",
            fix="choose one that has: --dataset NAME, or a callable that takes train=False",
        )
    loop = EvaluationLoop(
        loader=loader,
        task=task,
        precision=Precision(config.optimizer.amp, group.device),
        group=group,
        leaves_out=config.loop.continue_on_error,
        checks=True,
    )

    # WHY float64: a sum over many batches would lose digits in float32.
    totals = Totals(task, group.device, loss_dtype=torch.float64)
    collect_as_usual()
    try:
        found = loop.run(model, totals)  # collective
    finally:
        loader.close()
    assert found is not None  # no should_stop is given
    figures, bad = found
    report = task.report(*totals.gather(group))  # collective
    num_samples, expected = int(figures.pop("samples")), len(data.test)  # type: ignore[arg-type]  # it has one
    if num_samples + len(bad) != expected:
        raise StepError(f"{num_samples} of {expected} test samples were counted: a bug, report it")
    return {
        "num_samples": num_samples,
        "left_out": [
            {"sample": sample.index, "file": sample.file, "error": sample.error}
            for sample in sorted(bad, key=lambda sample: sample.index)
        ],
        **figures,
        **report,
    }
