"""What prepares the inputs of an exported transformers model: its tokenizer or image processor.

It is found where the model or the dataset came from, in a folder or in the cache of the Hub,
without a network, and written beside the model, with the settings for generation. WHY not left to
the user: from a folder without one, AutoTokenizer makes an empty tokenizer, without an error.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.data.sources.hub_sets import PREFIX, find_place
from hardened_ddp.errors import CheckpointError, HardenedError, ModelError

log = logging.getLogger(__name__)

TOKENIZER, IMAGE_PROCESSOR = "tokenizer", "image processor"
_PROCESSOR_NAME, _GENERATION_NAME = "preprocessor_config.json", "generation_config.json"
_TRIED = "The naïve café costs 1,234.50: def f(x):\n\treturn [x]  漢字 🙂 0 1 2 a b c"


def write_preparation(folder: Path, meta: Mapping[str, Any], *, kind: str) -> bool:
    """Write what prepares the inputs of the model in folder; False: none was found."""
    sources = list(_sources(meta))
    settings = [path for s in sources if (path := s / _GENERATION_NAME).is_file()]
    if settings and (folder / _GENERATION_NAME).exists():  # from the model's configuration alone
        (folder / _GENERATION_NAME).write_bytes(settings[0].read_bytes())
    write = _write_tokenizer if kind == TOKENIZER else _write_processor
    return any(write(source, folder, meta) for source in sources)


def how_to_add(folder: Path, meta: Mapping[str, Any], *, kind: str) -> str:
    """Say in one line that an export has no tokenizer or image processor, and how it gets one."""
    files = "tokenizer.json and tokenizer_config.json" if kind == TOKENIZER else _PROCESSOR_NAME
    return (
        f"the export has no {kind}: none is at {meta['model']} on this machine; to add it, copy "
        f"{files} to {folder}"
    )


def _sources(meta: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders on this machine that the model and the dataset came from."""
    for key in ("model", "dataset"):
        name = str(meta.get(key) or "")
        if not name.startswith(PREFIX):
            continue
        try:
            place = find_place(name, error=ModelError)
            if Path(place).exists():
                yield Path(place)
            elif key == "model":
                hub = import_extra("huggingface_hub", what="--format huggingface")
                yield Path(hub.snapshot_download(place, local_files_only=True))
        except (HardenedError, OSError, ValueError) as error:  # it is no longer there
            log.debug("%s is not on this machine: %s", name, error)


def _write_tokenizer(source: Path, folder: Path, _: Mapping[str, Any]) -> bool:
    auto = import_extra("transformers", what="--format huggingface").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # WHY broad: the library raises many kinds of errors
        log.debug("%s has no tokenizer: %s", source, error)
        return False
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return False  # made from nothing
    tokenizer.save_pretrained(folder)
    again = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if again(_TRIED)["input_ids"] != tokenizer(_TRIED)["input_ids"]:
        raise CheckpointError(
            f"the tokenizer of {source}, written and read back, gives other ids",
            fix="export with --format safetensors, and save the tokenizer by its own class",
        )
    return True


def _write_processor(source: Path, folder: Path, meta: Mapping[str, Any]) -> bool:
    """Write the image processor of source, with the scaling of the training if that is known."""
    try:
        settings = json.loads((source / _PROCESSOR_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.debug("%s has no image processor: %s", source, error)
        return False
    if str(meta.get("dataset")).startswith(PREFIX):
        # WHY not as it was: these sets are scaled to [-1, 1] (data/sources/hub_sets.py)
        half = [0.5] * len(settings.get("image_mean") or (1, 1, 1))
        settings |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        settings |= {"image_mean": half, "image_std": half}
    text = json.dumps(settings, indent=2) + "\n"
    (folder / _PROCESSOR_NAME).write_text(text, encoding="utf-8")
    return True
