"""Weights from a file or a checkpoint: those that a new run starts from, and a model rebuilt.

Of another model's weights, those that fit by name and shape are loaded, the others are named; if
none fits, that is an error. Weights in a pickle are refused: reading one can run code.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardened_ddp.checkpoint.folder import MANIFEST_NAME, load_checkpoint, open_checkpoint
from hardened_ddp.checkpoint.tensors import differences, read_tensors, spec_of, specs_of
from hardened_ddp.errors import CheckpointError, CheckpointMismatchError, ModelError
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.base import check_base
from hardened_ddp.model.moving_attributes import TASK, MovingAttributes
from hardened_ddp.model.zoo import build_described, build_model
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import ModelConfig
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME
from hardened_ddp.settings.typed_command import python_command
from hardened_ddp.settings.wording import listed

log = logging.getLogger(__name__)

MODEL_PREFIX = "model."
_MOST_NAMED = 40  # tensors of each kind that the log names
_FEW = 4
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_KINDS = (
    "a file of safetensors; or a folder: an export, a run or a checkpoint of this program, or what "
    "save_pretrained() of Hugging Face wrote"
)


def load_initial_weights(model: nn.Module, path: str, group: Group) -> None:
    """Load weights into a new model on rank 0, as far as they fit; DDP sends them. Collective."""
    if not path:
        return
    source = Path(path)

    def load() -> None:
        for line in copy_weights(model, source):
            log.log(logging.WARNING if line[0] == " " else logging.INFO, "%s", line)

    group.run_on_main(load, what=f"--init_from {path}")  # collective


@torch.no_grad()
def copy_weights(model: nn.Module, source: Path) -> list[str]:
    """Copy the weights of source into model, as far as they fit; return lines as fit_weights."""
    fitting, lines = fit_weights(read_weights(source), model, source)
    live = model.state_dict()
    for name, tensor in fitting.items():
        live[name].copy_(tensor)
    return lines


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors that path means, by name. Rank-local. Raises CheckpointError."""
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise CheckpointError(f"--init_from {path}: there is no such file or folder", fix=_KINDS)
    is_ours = (path / MANIFEST_NAME).is_file() or (path / CHECKPOINTS_NAME).is_dir()
    if is_ours or path.name == CHECKPOINTS_NAME:
        return model_tensors(*load_checkpoint(open_checkpoint(path, prefer_best=True)))
    if indices := sorted(path.glob("*.safetensors.index.json")):
        return _read_shards(indices[0])
    files = sorted(path.glob("*.safetensors"))
    files = files or [file for file in sorted(path.iterdir()) if file.suffix in _PICKLES][:1]
    if len(files) == 1:
        return _read_file(files[0])
    names = ", ".join(file.name for file in files) or "no *.safetensors"
    raise CheckpointError(
        f"--init_from {path}: the folder has {names}, so it is not clear which weights are meant",
        fix=f"give {_KINDS}",
    )


def fit_weights(
    found: Mapping[str, Tensor], model: nn.Module, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Choose which tensors go where, by the name in the model. Pure.

    Also returns lines that say what fits and what does not; those of the latter begin with a space.
    Raises CheckpointMismatchError if none fits. Names may differ in how they begin: a wrapper
    (module., _orig_mod., net.) or the name of a part.
    """
    live = model.state_dict()
    drop, add = _best_renaming(found, live)
    renamed = {add + name.removeprefix(drop): name for name in found if name.startswith(drop)}
    # WHY those too: a head stands beside the part that the other names begin with.
    renamed |= {name: name for name in found if not name.startswith(drop) and name in live}
    given = {name: found[renamed[name]] for name in live if name in renamed}
    fitting = {name: tensor for name, tensor in given.items() if tensor.shape == live[name].shape}
    other_shape = [
        f"{name} is {spec_of(tensor)} in the file, {spec_of(live[name])} in the model"
        for name, tensor in given.items()
        if name not in fitting
    ]
    if not fitting:
        reasons = f"; {listed(other_shape, _FEW)}" if other_shape else ""
        raise CheckpointMismatchError(
            f"--init_from {path}: none of its {len(found)} tensors fits the {len(live)} of the "
            f"model. It has {listed(found, _FEW)}; the model needs {listed(live, _FEW)}{reasons}",
            fix="give the weights of this model, or of one that shares some layers by name",
        )
    # WHY by address: of tied weights a file has one name, and the model has two.
    places = {name: tensor.data_ptr() or name for name, tensor in live.items()}
    sizes = {places[name]: tensor.numel() for name, tensor in live.items()}
    filled = {places[name] for name in fitting}
    share = sum(sizes[place] for place in filled) / max(1, sum(sizes.values()))
    how = f" (its names: {drop!r} dropped, {add!r} put before)" if drop or add else ""
    told = f"--init_from {path}: {len(filled)} of {len(sizes)} tensors, {share:.1%} of values{how}"
    used = {renamed[name] for name in given}
    parts = {
        "not in the file, and new": [
            name for name in live if name not in given and places[name] not in filled
        ],
        "of another shape, and new": other_shape,
        "in the file, and not in the model": [name for name in found if name not in used],
    }
    lines = [f" {what}: {listed(names, _MOST_NAMED)}" for what, names in parts.items() if names]
    return fitting, [told, *lines]


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix in _PICKLES:
        convert = "import torch; from safetensors.torch import save_file; "
        convert += f"save_file(torch.load({str(path)!r}, weights_only=True), 'weights.safetensors')"
        raise CheckpointError(
            f"--init_from {path} is a pickle: reading one can run code that is hidden in it",
            fix=f"if you trust it, convert it: {python_command('-c', convert)}",
        )
    return read_tensors(path)


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({Path(name).name for name in places.values()})  # all in the same folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
    found: dict[str, Tensor] = {}
    for name in names:
        found |= read_tensors(index.parent / name)
    return found


def _best_renaming(found: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return which beginning to drop and which to add, so that most names and shapes fit."""

    def count_fits(renaming: tuple[str, str]) -> int:
        drop, add = renaming
        there = {n: live.get(add + n.removeprefix(drop)) for n in found if n.startswith(drop)}
        return sum(t is not None and t.shape == found[name].shape for name, t in there.items())

    return max(product(_beginnings(found), _beginnings(live)), key=count_fits)


def _beginnings(names: Collection[str]) -> list[str]:
    """Return "", and the one or two first parts that at least half of the names begin with."""
    parts = [name.split(".") for name in names]
    counts = Counter(".".join(p[:n]) + "." for p in parts for n in (1, 2) if len(p) > n)
    return ["", *(start for start, count in counts.items() if 2 * count >= len(names))]


def model_tensors(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, averaged: bool = True
) -> dict[str, Tensor]:
    """Select the model's tensors of a checkpoint, under their names in state_dict().

    averaged: those of --ema, where the checkpoint has them. A frozen base is read from its source.
    Raises CheckpointMismatchError if that has changed.
    """
    found = _base_tensors(meta)
    for prefix in (MODEL_PREFIX, AVERAGE) if averaged else (MODEL_PREFIX,):
        found |= {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return found


def _base_tensors(meta: Mapping[str, Any]) -> dict[str, Tensor]:
    if not (base := meta.get("base")):
        return {}
    config = ModelConfig(
        **{name: meta[name] for name in ("model", "model_args", "pretrained", "adapter")}
    )
    shape, task = tuple(meta["input_shape"]), meta["task"]["name"]
    model = build_from_source(config, meta["num_classes"], shape, task, base["init_from"])
    check_base(model, base)
    state = model.state_dict()
    return {name: state[name] for name in base["sha256"]}


def build_from_source(
    config: ModelConfig, num_classes: int, input_shape: tuple[int, ...], task: str, init_from: str
) -> nn.Module:
    """Build a model with the weights that a run with these settings starts from. Rank-local."""
    model = build_model(config, num_classes=num_classes, input_shape=input_shape, task=task)
    if init_from:
        copy_weights(model, Path(init_from))
    return model


def rebuild_model(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> nn.Module:
    """Build the model that meta describes, and load weights. Rank-local; advances the RNG."""
    model = build_described(meta)
    problems = differences(specs_of(weights), specs_of(model.state_dict()))
    if problems:
        raise CheckpointMismatchError(
            f"the model {meta['model']}, built again, differs from the one saved: "
            + "; ".join(problems),
            fix="has its code changed since the training? Use the code of that time",
        )
    model.load_state_dict(dict(weights))
    found = meta.get("attributes", {})
    MovingAttributes(model).load({n: v for n, v in found.items() if not n.startswith(TASK)})
    return model.eval()


def example_inputs(meta: Mapping[str, Any], *, num_samples: int) -> Tensor:
    """Create inputs of the trained shape to compare models with: the same every time."""
    shape = tuple(int(size) for size in meta.get("input_shape") or ())
    if not shape:
        raise ModelError(
            "the inputs of this model are not one tensor, so it can't be tried here",
            fix="--format safetensors writes the weights without running the model",
        )
    count = num_samples * int(torch.Size(shape).numel())
    # WHY a sine: values of both signs and usual size, without the random number generators
    return torch.sin(torch.arange(count, dtype=torch.float32)).view(num_samples, *shape)
