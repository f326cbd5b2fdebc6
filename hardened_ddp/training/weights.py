"""Weights from a file or a checkpoint: those that a new run starts from, and a model rebuilt.

Owns: what the path of --init_from means, which of its tensors fit which of the model's, and the
report of those that do not. And the nn.Module of a checkpoint, rebuilt in eval mode, on the CPU.
What goes wrong here: another model's weights. Those that fit by name and shape are loaded, the
others are named; if none fits, that is an error. Weights in a pickle are refused: reading one can
run code. Does not own: resuming a run (run_folder.py, state.py), which loads all or nothing.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardened_ddp.checkpoint.folder import MANIFEST_NAME, load_checkpoint, open_checkpoint
from hardened_ddp.checkpoint.tensors import differences, read_tensors, spec_of, specs_of
from hardened_ddp.errors import CheckpointError, CheckpointMismatchError, ModelError
from hardened_ddp.model.moving_attributes import TASK, MovingAttributes
from hardened_ddp.model.zoo import build_described
from hardened_ddp.preflight.first_forward import shape_by_weights
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME
from hardened_ddp.settings.typed_command import python_command

log = logging.getLogger(__name__)

MODEL_PREFIX = "model."
_MOST_NAMED = 40  # tensors of each kind that the log names
_FEW = 4
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_KINDS = (
    "a file of safetensors; or a folder: an export, a run or a checkpoint of this program, or what "
    "save_pretrained() of Hugging Face wrote"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Which tensors of a file fit a model."""

    loaded: Mapping[str, Tensor]
    """By the name in the model."""

    missing: Sequence[str]
    """Of the model, and not in the file."""

    unexpected: Sequence[str]
    """Of the file, and not in the model."""

    other_shape: Sequence[str]
    """As text, with both shapes."""

    renamed: str
    """How names of the file were changed to fit; empty if they were not."""


def load_initial_weights(model: nn.Module, path: str, group: Group) -> None:
    """Load weights from path into a new model, as far as they fit. Collective: all ranks.

    WHY on rank 0 only: DDP sends its weights to all ranks when it wraps the model.
    Raises the error on all ranks: CheckpointError, or CheckpointMismatchError if nothing fits.
    """
    if not path:
        return
    source = Path(path)

    def load() -> bool:
        fit = fit_weights(read_weights(source), model, source)
        live = model.state_dict()
        with torch.no_grad():
            for name, tensor in fit.loaded.items():
                live[name].copy_(tensor)
        for line in report_lines(fit, model, source):
            log.warning("%s", line) if line[0] == " " else log.info("%s", line)
        return True

    group.run_on_main(load, what=f"--init_from {path}")  # collective


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors that path means, by name. Rank-local. Raises CheckpointError."""
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise CheckpointError(f"--init_from {path}: there is no such file or folder", fix=_KINDS)
    is_ours = (path / MANIFEST_NAME).is_file() or (path / CHECKPOINTS_NAME).is_dir()
    if is_ours or path.name == CHECKPOINTS_NAME:
        return model_tensors(load_checkpoint(open_checkpoint(path, prefer_best=True))[0])
    if indices := sorted(path.glob("*.safetensors.index.json")):
        return _read_shards(indices[0])
    files = sorted(path.glob("*.safetensors"))
    pickles = [file for file in sorted(path.iterdir()) if file.suffix in _PICKLES]
    if len(files) == 1 or (pickles and not files):
        return _read_file((files or pickles)[0])
    names = ", ".join(file.name for file in files) or "no *.safetensors"
    raise CheckpointError(
        f"--init_from {path}: the folder has {names}, so it is not clear which weights are meant",
        fix=f"give {_KINDS}",
    )


def fit_weights(found: Mapping[str, Tensor], model: nn.Module, path: Path) -> Fit:
    """Choose which tensors go where. Pure. Raises CheckpointMismatchError if none fits.

    Names may differ in how they begin: a wrapper (module., _orig_mod., net.) or the name of a part.
    """
    live = model.state_dict()
    drop, add = _best_renaming(found, live)
    renamed = {add + name.removeprefix(drop): name for name in found if name.startswith(drop)}
    # WHY those too: a head stands beside the part that the other names begin with.
    renamed |= {name: name for name in found if not name.startswith(drop) and name in live}
    loaded, other_shape, used = {}, [], set()
    for name, tensor in live.items():
        if name not in renamed:
            continue
        used.add(renamed[name])
        given = found[renamed[name]]
        if given.shape == tensor.shape:
            loaded[name] = given
        else:
            here = "x".join(map(str, tensor.shape)) or "a scalar"
            other_shape.append(f"{name} is {spec_of(given)} in the file, {here} in the model")
    # WHY by address: of tied weights a file has one name, and the model has two.
    places = {live[name].data_ptr() for name in loaded if live[name].numel()}
    fit = Fit(
        loaded=loaded,
        missing=[
            name
            for name, tensor in live.items()
            if name not in renamed and tensor.data_ptr() not in places
        ],
        unexpected=[name for name in found if name not in used],
        other_shape=other_shape,
        renamed=_renaming_words(drop, add) if loaded else "",
    )
    if not loaded:
        reasons = f"; {_some(other_shape, _FEW)}" if other_shape else ""
        raise CheckpointMismatchError(
            f"--init_from {path}: none of its {len(found)} tensors fits the {len(live)} of the "
            f"model. It has {_some(found, _FEW)}; the model needs {_some(live, _FEW)}{reasons}",
            fix="give the weights of this model, or of one that shares some layers by name",
        )
    return fit


def report_lines(fit: Fit, model: nn.Module, path: Path) -> list[str]:
    """Say what was loaded and what was not; lines about what was not begin with a space."""
    live = model.state_dict()
    # WHY by address: tied weights are one tensor, which has two names in the model.
    places = {name: tensor.data_ptr() or name for name, tensor in live.items()}
    sizes = {places[name]: tensor.numel() for name, tensor in live.items()}
    given = {places[name] for name in fit.loaded}
    share = sum(sizes[place] for place in given) / max(1, sum(sizes.values()))
    lines = [f"--init_from {path}: {len(given)} of {len(sizes)} tensors, {share:.1%} of values"]
    lines[0] += f" ({fit.renamed})" if fit.renamed else ""
    parts = {
        "not in the file, and new": fit.missing,
        "of another shape, and new": fit.other_shape,
        "in the file, and not in the model": fit.unexpected,
        "of another dtype, and converted": [
            f"{name} ({spec_of(given).dtype} to {spec_of(live[name]).dtype})"
            for name, given in fit.loaded.items()
            if given.dtype != live[name].dtype
        ],
    }
    lines += [f" {what}: {_some(names, _MOST_NAMED)}" for what, names in parts.items() if names]
    return lines


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
    """Read the files that an index of Hugging Face names."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({Path(name).name for name in places.values()})  # all in the same folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
    found: dict[str, Tensor] = {}
    for name in names:
        found |= read_tensors(index.parent / name)
    if lost := [name for name in places if name not in found]:
        raise CheckpointError(
            f"{index} names {len(lost)} tensors that its files do not hold: {_some(lost, _FEW)}",
            fix="copy all files of the folder again",
        )
    return found


def _best_renaming(found: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return which beginning to drop and which to add, so that most names and shapes fit."""
    best, most = ("", ""), -1
    for drop in ("", *_beginnings(found)):
        for add in ("", *_beginnings(live)):
            fits = sum(
                (there := live.get(add + name.removeprefix(drop))) is not None
                and there.shape == tensor.shape
                for name, tensor in found.items()
                if name.startswith(drop)
            )
            if fits > most:
                best, most = (drop, add), fits
    return best


def _beginnings(names: Iterable[str]) -> list[str]:
    """Return the one or two first parts that at least half of the names begin with."""
    every = list(names)
    counts: dict[str, int] = {}
    for name in every:
        parts = name.split(".")
        for length in (1, 2):
            if len(parts) > length:
                start = ".".join(parts[:length]) + "."
                counts[start] = counts.get(start, 0) + 1
    return [start for start, count in counts.items() if 2 * count >= len(every)]


def _renaming_words(drop: str, add: str) -> str:
    words = [f"{drop!r} dropped from" if drop else "", f"{add!r} put before" if add else ""]
    told = " and ".join(filter(None, words))
    return f"{told} its names" if told else ""


def _some(names: Iterable[str], most: int) -> str:
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the model's tensors of a checkpoint, under their names in state_dict()."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


def rebuild_model(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> nn.Module:
    """Build the model that meta describes, and load weights. Rank-local; advances the RNG.

    Raises ModelError if it can't be built, CheckpointMismatchError if the weights do not fit.
    """
    model = build_described(meta)
    shape_by_weights(model, weights)
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
    """Create inputs of the trained shape to compare models with: the same every time.

    Raises ModelError if the model takes anything but one tensor.
    """
    shape = tuple(int(size) for size in meta.get("input_shape") or ())
    if not shape:
        raise ModelError(
            "the inputs of this model are not one tensor, so it can't be tried here",
            fix="--format safetensors writes the weights without running the model",
        )
    count = num_samples * int(torch.Size(shape).numel())
    # WHY a sine: values of both signs and usual size, without the random number generators
    return torch.sin(torch.arange(count, dtype=torch.float32)).view(num_samples, *shape)
