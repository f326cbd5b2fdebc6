"""The command evaluate: a trained model against its whole test set, on any number of ranks.

Owns the confusion matrix, and from it the figures of each class. Every sample counts once: the
ranks' shares do not overlap, and at the end the number is compared with the size of the set. The
counts are whole numbers, so they are the same on any number of ranks.
Does not own: how the report looks (reporting/confusion.py), evaluation between epochs
(evaluation.py).
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.checkpoint.files import load_checkpoint
from hardened_ddp.checkpoint.listing import open_checkpoint
from hardened_ddp.data.datasets import TaskData, build_data, prepare_data
from hardened_ddp.data.loader import EvalLoader
from hardened_ddp.data.loader_setup import build_eval_loader
from hardened_ddp.errors import DataError, HardenedError, SampleError, StepError
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.reporting.confusion import class_figures, print_report, write_report
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.step.failure import explain_evaluation
from hardened_ddp.task.build import build_task
from hardened_ddp.training.rebuild import MODEL_PREFIX, model_tensors, rebuild_model
from hardened_ddp.training.state import Saved, share_state


def evaluate_run(settings: Resolved, group: Group, *, output: str) -> int:
    """Evaluate the run or checkpoint that --resume names; print and write the report. Collective.

    A run means its best checkpoint, or else its newest valid one. Raises DataError without a test
    set, CheckpointError, SampleError.
    """
    config = settings.config
    found: list[Path] = []
    saved: list[Saved] = []

    def read() -> bool:
        checkpoint = open_checkpoint(Path(config.run.resume), prefer_best=True)
        tensors, meta = load_checkpoint(checkpoint)
        found.append(checkpoint.path)
        weights = {name: t for name, t in tensors.items() if name.startswith(MODEL_PREFIX)}
        saved.append(Saved(weights, meta))
        return True

    group.run_on_main(read, what="reading the checkpoint")  # collective
    shared = share_state(group, saved[0] if saved else Saved({}, {}))  # collective
    group.run_on_local_main(lambda: prepare_data(config.data), what="the download")  # collective
    data = build_data(config.data, leaves_out=config.loop.continue_on_error)
    model = rebuild_model(model_tensors(shared.tensors), shared.meta).to(group.device)
    report = measure(model, data, config, group)  # collective
    report |= {
        "dataset": config.data.dataset,
        "is_data_of_training": data.fingerprint == shared.meta.get("dataset_fingerprint"),
        "step": shared.meta.get("step"),
        "epoch": shared.meta.get("epoch"),
        "world_size": group.world_size,
    }

    def tell() -> bool:
        [path] = found
        place = Path(output) if output else path.parent.parent / f"evaluation-{path.name}.json"
        report["checkpoint"] = str(path)
        write_report(place, report)
        print_report(report, place=place, output=sys.stdout)
        return True

    group.run_on_main(tell, what="writing the report")  # collective
    return 0


@torch.no_grad()
def measure(model: nn.Module, data: TaskData, config: Config, group: Group) -> dict[str, Any]:
    """Measure loss, accuracy and the confusion matrix on the test set. Collective: all ranks."""
    loader = build_eval_loader(data, config.data, launch=group.launch, device=group.device)
    if loader is None:
        raise DataError(
            f"dataset {config.data.dataset} has no test set to evaluate on",
            fix="give one that has: --dataset NAME, or a callable that takes train=False",
        )
    try:
        counts, loss_sum, left_out = _count(model, loader, data, config, group)
        group.sum_(counts)  # collective
        group.sum_(loss_sum)  # collective
    except HardenedError:
        raise
    except Exception as error:  # WHY broad: the model and the test set are the user's code
        raise explain_evaluation(error, group) from error
    finally:
        loader.close()
    everyone = group.gather_json(left_out)  # collective
    bad = sorted((entry for part in everyone for entry in part), key=lambda entry: entry["sample"])
    num_samples, expected = int(counts.sum()), len(data.test)  # type: ignore[arg-type]  # it has one
    if num_samples + len(bad) != expected:
        raise StepError(f"{num_samples} of {expected} test samples were counted: a bug, report it")
    return {
        "num_samples": num_samples,
        "left_out": bad,
        "loss": float(loss_sum) / max(1, num_samples),
        "accuracy": int(counts.diagonal().sum()) / max(1, num_samples),
        "classes": class_figures(counts.tolist(), names=data.class_names),
        "confusion": counts[:, :-1].tolist(),
        "predicted_no_class": int(counts[:, -1].sum()),
    }


def _count(
    model: nn.Module, loader: EvalLoader, data: TaskData, config: Config, group: Group
) -> tuple[torch.Tensor, torch.Tensor, list[Mapping[str, Any]]]:
    """Go through this rank's share. Rows of the matrix are labels, columns predictions.

    The last column is for predictions of no class: a model may have more outputs than classes.
    """
    device, size = group.device, data.num_classes
    task = build_task(model, data, config.optimizer)
    precision = Precision(config.optimizer.amp, device)
    counts = torch.zeros(size * (size + 1), dtype=torch.int64, device=device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    left_out: list[Mapping[str, Any]] = []
    for batch in loader:
        if batch.bad and not config.loop.continue_on_error:
            raise SampleError(
                f"test sample {batch.bad[0].name} can't be read: {batch.bad[0].error}",
                fix="mend it, or leave such samples out with --continue_on_error",
            )
        left_out += [{"sample": b.index, "file": b.file, "error": b.error} for b in batch.bad]
        if not batch.num_samples:
            continue
        batch = batch.to(device)
        with precision.autocast():
            score = task.score(model, batch.inputs, batch.targets, checks=True)
        predictions = score.predictions.clamp(max=size)
        places = batch.targets * (size + 1) + predictions
        counts += torch.bincount(places, minlength=len(counts))
        loss_sum += score.loss_sum
    return counts.view(size, size + 1), loss_sum, left_out
