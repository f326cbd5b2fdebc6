"""The trained model in a folder of its own, for those who use it and not its training.

Owns: export_safetensors and what that folder holds: the weights, config.json and a model card.
Does not own: the checkpoint it is made from (listing.py, files.py).
What goes wrong here: an export that is half written, or that differs from the checkpoint. So it is
written aside, read back, compared byte for byte, and renamed into place.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, make_folders, write_file
from hardened_ddp.checkpoint.files import load_checkpoint
from hardened_ddp.checkpoint.listing import open_checkpoint
from hardened_ddp.checkpoint.manifest import JSON
from hardened_ddp.checkpoint.retention import aside_path, remove_aside
from hardened_ddp.checkpoint.stream import TensorStream, flat_bytes, write_stream_to
from hardened_ddp.checkpoint.tensors import plan_file, read_tensors, specs_of
from hardened_ddp.checkpoint.verify import Found
from hardened_ddp.errors import CheckpointError

MODEL_PREFIX = "model."
WEIGHTS_NAME = "model.safetensors"
# What config.json takes from the checkpoint's meta; null where it has none.
CONFIG_KEYS = ("model", "model_args", "num_classes", "input_shape", "class_names", "dataset")


def export_safetensors(source: Path, *, output: Path) -> Path:
    """Write the model of a run or a checkpoint to the new folder output, and return that.

    A run gives its best checkpoint, or else its newest valid one. Raises CheckpointError.
    """
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists: an export would mix with what is there",
            fix=f"give another --output, or remove it first: rm -r {output}",
        )
    found = open_checkpoint(source, prefer_best=True)
    tensors, meta = load_checkpoint(found)
    weights = {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }
    if not weights:
        raise CheckpointError(
            f"{found.path} holds no tensor named {MODEL_PREFIX}*: it has no model to export"
        )
    disk = Disk()
    aside = aside_path(output.absolute(), what="partial")
    try:
        make_folders(aside.parent, disk=disk)
        if os.path.lexists(aside):
            remove_aside(aside, disk=disk)
        disk.make_folder(aside)
        try:
            _fill(aside, found=found, weights=weights, meta=meta)
            disk.rename(aside, output)
        finally:
            if os.path.lexists(aside):
                remove_aside(aside, disk=disk)
    except OSError as error:
        raise CheckpointError(
            f"the export to {output} failed: {error}", fix=f"look at the disk: df {output.parent}"
        ) from error
    return output


def _fill(
    folder: Path, *, found: Found, weights: Mapping[str, Tensor], meta: Mapping[str, JSON]
) -> None:
    disk = Disk()
    stream = TensorStream(weights, plan=plan_file(weights))
    sha256 = write_stream_to(folder / WEIGHTS_NAME, stream, disk=disk)
    _compare(read_tensors(folder / WEIGHTS_NAME), weights)
    config: dict[str, JSON] = {key: meta.get(key) for key in CONFIG_KEYS}
    config |= {"step": found.step, "epoch": meta.get("epoch"), "sha256": sha256}
    text = json.dumps(config, indent=2) + "\n"
    write_file(folder / "config.json", text.encode(), disk=disk)
    card = _model_card(found, weights=weights, config=config)
    write_file(folder / "README.md", card.encode(), disk=disk)
    disk.sync_folder(folder)


def _compare(written: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless what was written is what was to be written, byte for byte."""
    same = specs_of(written) == specs_of(weights) and all(
        # WHY bytes and not values: NaN does not equal itself
        np.array_equal(flat_bytes(written[name]), flat_bytes(weights[name]))
        for name in weights
    )
    if not same:
        raise CheckpointError(
            "the exported weights, read back, differ from the checkpoint",
            fix="check the disk and the memory of this machine, then export again",
        )


def _model_card(found: Found, *, weights: Mapping[str, Tensor], config: Mapping[str, JSON]) -> str:
    num_values = sum(tensor.numel() for tensor in weights.values())
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    rows = "\n".join(
        f"| {key} | {json.dumps(config[key])} |" for key in CONFIG_KEYS if config[key] is not None
    )
    return f"""---
library_name: pytorch
---

# {config["model"] or "Model"}

Exported from `{found.path.parent.parent.name}/{found.path.name}` (optimizer step {found.step}).
{num_values:,} values in {len(weights)} tensors, {size_bytes:,} bytes.

| setting | value |
| --- | --- |
{rows}

## Load it

```python
from safetensors.torch import load_file

weights = load_file("{WEIGHTS_NAME}")  # names and shapes as in the model's state_dict()
model.load_state_dict(weights)
model.eval()
```

`config.json` holds the model's name and arguments, with which to build `model`, and the sha256 of
`{WEIGHTS_NAME}`.
"""
