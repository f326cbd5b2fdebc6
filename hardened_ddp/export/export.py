"""Export the trained model to its own folder, for use without the training.

The folder holds the model in one format, config.json and a model card. It is
written under a temporary name, read back, compared, and renamed into place.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, aside_path
from hardened_ddp.checkpoint.folder import JSON, Found, load_checkpoint, open_checkpoint
from hardened_ddp.checkpoint.tensors import live_content
from hardened_ddp.errors import CheckpointError
from hardened_ddp.export.formats import (
    CARD_NAME,
    HUGGINGFACE,
    WEIGHTS_NAME,
    how_to_load,
    write_model,
)
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.zoo import DESCRIPTION
from hardened_ddp.settings.commands import AVERAGED
from hardened_ddp.settings.typed_command import shell_command
from hardened_ddp.training.weights import MODEL_PREFIX, model_tensors

SAFETENSORS = "safetensors"
# What config.json takes from the checkpoint's meta; null if missing there.
CONFIG_KEYS = (*DESCRIPTION, "dataset")
_HOW_TO_LOAD_WEIGHTS = f"""\
from safetensors.torch import load_file

weights = load_file("{WEIGHTS_NAME}")  # names and shapes as in the model's state_dict()
model.load_state_dict(weights)
model.eval()"""


def run_export(options: Mapping[str, str], *, output: TextIO) -> int:
    source, form = Path(options["run"]), options["format"]
    name = source.name if form == SAFETENSORS else f"{source.name}-{form}"
    output_folder = Path(options["output"] or f"exports/{name}")
    averaged = options["weights"] == AVERAGED
    folder = export_model(source, output=output_folder, form=form, averaged=averaged)
    output.write(f"exported to {folder}\n")
    return 0


def export_model(
    source: Path, *, output: Path, form: str = SAFETENSORS, averaged: bool = True
) -> Path:
    """Write the model of a run or a checkpoint to the new folder output, and return that path.

    Of a run, its best checkpoint is used, or else its newest valid one. form: settings/commands.py.
    averaged: the weights that --ema has averaged, where there are any; the model card says so.
    Raises CheckpointError; forms that run the model also ModelError and MissingPackageError.
    """
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists, and an export would mix with its content",
            fix=f"give another --output, or remove it first: {shell_command('rm', '-r', output)}",
        )
    found = open_checkpoint(source, prefer_best=True)
    tensors, meta = load_checkpoint(found)
    weights = model_tensors(tensors, meta, averaged=averaged)
    is_averaged = averaged and any(name.startswith(AVERAGE) for name in tensors)
    if not weights:
        raise CheckpointError(f"{found.path} holds no tensor named {MODEL_PREFIX}*: no model")
    disk = Disk()
    aside = aside_path(output.absolute(), what="partial")
    try:
        disk.make_folders(aside.parent)
        if os.path.lexists(aside):
            disk.remove(aside)
        disk.make_folder(aside)
        meta["weights"] = "the averages of --ema" if is_averaged else "as trained"
        card = _model_card(found, weights=weights, meta=meta, form=form)
        disk.write_file(aside / CARD_NAME, card.encode())
        config: dict[str, JSON] = {key: meta.get(key) for key in CONFIG_KEYS}
        config |= {"step": found.step, "epoch": meta.get("epoch"), "is_averaged": is_averaged}
        if form == SAFETENSORS:
            config["sha256"] = _write_weights(aside / WEIGHTS_NAME, weights, disk)
        else:
            write_model(aside, form, weights, meta)
        if form != HUGGINGFACE:  # that format has its own config.json
            text = json.dumps(config, indent=2) + "\n"
            disk.write_file(aside / "config.json", text.encode())
        # WHY: libraries make files readable for their owner only; others may need the export
        for path in filter(Path.is_file, aside.iterdir()):
            path.chmod((aside / CARD_NAME).stat().st_mode)
        disk.sync_files(aside, list(aside.iterdir()))  # libraries wrote some of them
        disk.rename(aside, output)
    except OSError as error:
        raise CheckpointError(
            f"the export to {output} failed: {error}", fix=f"check the disk: df {output.parent}"
        ) from error
    finally:
        if os.path.lexists(aside):
            disk.remove(aside)
    return output


def _write_weights(path: Path, weights: Mapping[str, Tensor], disk: Disk) -> str:
    """Write weights, and read them back; return the sha256 of the file."""
    written = disk.write_parts(path, live_content(weights).parts())
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != written:
            raise CheckpointError(
                "the exported weights, read back, differ from the checkpoint",
                fix="check the disk and the memory of this machine, then export again",
            )
    return written


def _model_card(
    found: Found, *, weights: Mapping[str, Tensor], meta: Mapping[str, JSON], form: str
) -> str:
    num_values = sum(tensor.numel() for tensor in weights.values())
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    keys = (*CONFIG_KEYS, "weights", "best_metric", "best_value", "epoch", "world_size", "torch")
    told = {key: meta[key] for key in keys if key != "hub_config" and meta.get(key) is not None}
    rows = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in told.items())
    shape = " and have the shape (samples, *input_shape)" if meta.get("input_shape") else ""
    return f"""---
library_name: pytorch
---

# {meta.get("model") or "Model"}

Exported from `{found.path.parent.parent.name}/{found.path.name}` (optimizer step {found.step}).
{num_values:,} values in {len(weights)} tensors, {size_bytes:,} bytes.

| setting | value |
| --- | --- |
{rows}

## Load it

```python
{_HOW_TO_LOAD_WEIGHTS if form == SAFETENSORS else how_to_load(form, meta)}
```

Inputs are prepared as the dataset above prepares them{shape}. The
export was read back and compared with the checkpoint before it was put in place.
"""
