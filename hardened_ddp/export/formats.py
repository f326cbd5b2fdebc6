"""The formats of an export that hold a whole model: huggingface, torch_export, onnx, peft.

Each is written by its own library, read back by it, and compared by its logits with the
checkpoint's model, for two batch sizes. An export with other logits is an error, and is not kept.
What prepares the inputs of a transformers model, its tokenizer or image processor, is looked for
without a network where the model or the dataset came from, and written beside the model. WHY not
left to the user: from a folder without one, AutoTokenizer makes an empty one, without an error.
What goes wrong here: a package is not installed; a model can't be traced.
"""

import contextlib
import inspect
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardened_ddp.data.foreign_code import import_extra, told_as
from hardened_ddp.data.sources.hub_sets import PREFIX, find_place
from hardened_ddp.errors import CheckpointError, HardenedError, ModelError
from hardened_ddp.model.huggingface import HubModel as HubNet
from hardened_ddp.model.huggingface import ImageClassifier, TextModel, build_from_config
from hardened_ddp.model.zoo import DESCRIPTION
from hardened_ddp.training.weights import example_inputs, rebuild_model

log = logging.getLogger(__name__)

TOKENIZER, IMAGE_PROCESSOR = "tokenizer", "image processor"
HUGGINGFACE, PEFT, TORCH_EXPORT, ONNX = "huggingface", "peft", "torch_export", "onnx"
CARD_NAME, WEIGHTS_NAME = "README.md", "model.safetensors"
TORCH_EXPORT_NAME, ONNX_NAME = "model.pt2", "model.onnx"
# Traced programs sum in another order than the model. A wrong weight differs by far more.
_RTOL, _ATOL = 1e-3, 1e-4
_TRACED_SAMPLES, _TRIED_SAMPLES = 2, (2, 5)  # WHY also 5: it detects a fixed batch size

Forward = Callable[..., Tensor]

_HOW_TO_LOAD = {
    HUGGINGFACE: """\
from hardened_ddp.model.hub import HubModel

model = HubModel.from_pretrained("FOLDER")  # with this project on PYTHONPATH
logits = model(inputs)""",
    PEFT: """\
from peft import PeftModel

model = PeftModel.from_pretrained(base, "FOLDER")  # base: as from_pretrained() loads it""",
    TORCH_EXPORT: f"""\
import torch

model = torch.export.load("{TORCH_EXPORT_NAME}").module()
logits = model(inputs)  # of text: model(tokens["input_ids"], tokens["attention_mask"])""",
    ONNX: f"""\
import onnxruntime

session = onnxruntime.InferenceSession("{ONNX_NAME}")
inputs = {{"inputs": inputs}}  # float32 array; of text: dict(tokens), int64 arrays
[logits] = session.run(["logits"], inputs)""",
}
_PROCESSOR_NAME, _GENERATION_NAME = "preprocessor_config.json", "generation_config.json"
_PREPARES = {
    TOKENIZER: "tokenizer.json and tokenizer_config.json",
    IMAGE_PROCESSOR: _PROCESSOR_NAME,
}


class _Logits(nn.Module):
    """A model whose only output is the logits."""

    names: tuple[str, ...] = ("inputs",)  # the names of its inputs
    # Which of their dimensions may have any size. Any: torch's kind of one.
    sizes: Mapping[int, Any] = {0: torch.export.Dim.DYNAMIC}

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.model(inputs)
        logits: Tensor = output if isinstance(output, Tensor) else output["logits"]
        return logits


class _TextLogits(_Logits):
    """The same of a model for text: texts of any number and length, padded at their end."""

    sizes: Mapping[int, Any] = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}

    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        taken = inspect.signature(model.net.forward).parameters
        self.names = tuple(name for name in ("input_ids", "attention_mask") if name in taken)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        logits: Tensor = self.model(input_ids=input_ids, **given)["logits"]
        return logits


def _with_logits(model: nn.Module) -> _Logits:
    return (_TextLogits(model) if isinstance(model, TextModel) else _Logits(model)).eval()


@torch.no_grad()
def write_model(
    folder: Path, form: str, weights: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write the model of a checkpoint to folder in this form, and check its logits. Rank-local.

    Warns if a model of transformers lacks its tokenizer or image processor.
    Raises MissingPackageError, ModelError if the model can't be built or traced, CheckpointError
    if the written model gives other logits.
    """
    write = {HUGGINGFACE: _write_huggingface, TORCH_EXPORT: _write_torch_export, ONNX: _write_onnx}
    write[PEFT] = _write_peft
    model = _with_logits(rebuild_model(weights, meta))
    inputs = [_examples(model, meta, num_samples=count) for count in _TRIED_SAMPLES]
    fix = "--format safetensors writes the weights without running the model"
    fix = fix if form != PEFT else "--format huggingface writes a head that was trained, too"
    # WHY: tracers raise any exception
    with told_as(ModelError, f"the model {meta['model']} can't be written as {form}", fix=fix):
        wanted = [model(*tensors) for tensors in inputs]
        run = write[form](folder, model, meta)
        got = [run(*tensors) for tensors in inputs]
    try:
        torch.testing.assert_close(
            got, wanted, rtol=_RTOL, atol=_ATOL, equal_nan=True, check_dtype=False
        )
    except AssertionError as error:
        told = " ".join(str(error).split())
        raise CheckpointError(
            f"the exported model, read back, gives other logits than the checkpoint: {told}",
            fix=fix,
        ) from error
    if form == HUGGINGFACE and isinstance(model.model, HubNet):
        kind = TOKENIZER if isinstance(model.model, TextModel) else IMAGE_PROCESSOR
        if not write_preparation(folder, meta, kind=kind):
            text = "the export has no %s: none is at %s on this machine; to add it, copy %s to it"
            log.warning(text, kind, meta["model"], _PREPARES[kind])


def _write_huggingface(folder: Path, model: _Logits, meta: Mapping[str, Any]) -> Forward:
    import_extra("huggingface_hub", what="--format huggingface")
    from hardened_ddp.model.hub import HubModel

    with contextlib.redirect_stdout(io.StringIO()):  # WHY: the library prints progress
        if isinstance(model.model, HubNet):
            return _write_transformers(folder, model.model, meta)
        hub_model: Any = HubModel(facts={name: meta.get(name) for name in DESCRIPTION})
        hub_model.net.load_state_dict(model.model.state_dict())
        hub_model.save_pretrained(folder)
        read_back: Forward = HubModel.from_pretrained(folder, local_files_only=True, strict=True)
        return read_back


def _write_transformers(folder: Path, model: HubNet, meta: Mapping[str, Any]) -> Forward:
    """Write the transformers model with save_pretrained, with the names of our classes."""
    transformers = import_extra("transformers", what="--format huggingface")
    names = dict(enumerate(meta.get("class_names") or ()))
    net = model.net
    if meta.get("adapter"):
        net = _with_peft(net, meta).merge_and_unload()
    if names and len(names) == getattr(net.config, "num_labels", 0):
        net.config.id2label = names
        net.config.label2id = {name: index for index, name in names.items()}
    net.save_pretrained(folder)
    loader = getattr(transformers, type(net).__name__)
    net = loader.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return _wrapped_as(model, net, meta)


def _write_peft(folder: Path, model: _Logits, meta: Mapping[str, Any]) -> Forward:
    if not (meta.get("adapter") and isinstance(model.model, HubNet)):
        raise ModelError(
            "the run has no adapters", fix="train with --adapter, or choose another --format"
        )
    peft = import_extra("peft", what="--format peft")
    net, place = model.model.net, meta["model"].removeprefix("hf:")
    whole = _with_peft(net, meta)
    whole.peft_config["default"].base_model_name_or_path = place
    with tempfile.TemporaryDirectory() as aside:  # its model card would replace ours
        whole.save_pretrained(aside)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(Path(aside, name), folder / name)
    base = type(net).from_pretrained(place, use_safetensors=True)
    again = peft.PeftModel.from_pretrained(base, folder).get_base_model()
    return _wrapped_as(model.model, again, meta)


def _wrapped_as(model: HubNet, net: Any, meta: Mapping[str, Any]) -> Forward:  # Any: transformers
    """Wrap a model that was read back as ours is."""
    is_text = isinstance(model, TextModel)
    again = TextModel(net) if is_text else ImageClassifier(net, input_shape=meta["input_shape"])
    return _with_logits(again)


def _with_peft(net: Any, meta: Mapping[str, Any]) -> Any:  # Any: models of transformers and peft
    """Return peft's own model with the weights of net, whose adapters are in place."""
    peft = import_extra("peft", what="a run with adapters")
    base = build_from_config(meta["hub_config"], input_shape=tuple(meta["input_shape"])).net
    settings = peft.get_peft_config({"peft_type": "LORA", **meta["adapter"]})
    whole = peft.get_peft_model(base, settings)
    whole.base_model.model.load_state_dict(net.state_dict())
    return whole


def _examples(model: _Logits, meta: Mapping[str, Any], *, num_samples: int) -> tuple[Tensor, ...]:
    """Create inputs to compare models with, the same every time. Of texts the first is padded."""
    if not isinstance(model, _TextLogits):
        return (example_inputs(meta, num_samples=num_samples),)
    size = (num_samples, num_samples + 4)  # WHY another length too: it detects a fixed one
    tokens = torch.arange(size[0] * size[1]) * 7 % int(meta["hub_config"]["vocab_size"])
    mask = torch.ones(size, dtype=torch.int64)
    mask[0, -2:] = 0
    return (tokens.view(size), mask)[: len(model.names)]


def _write_torch_export(folder: Path, model: _Logits, meta: Mapping[str, Any]) -> Forward:
    inputs = _examples(model, meta, num_samples=_TRACED_SAMPLES)
    program = torch.export.export(model, inputs, dynamic_shapes=(model.sizes,) * len(inputs))
    torch.export.save(program, folder / TORCH_EXPORT_NAME)
    loaded: Forward = torch.export.load(folder / TORCH_EXPORT_NAME).module()
    return loaded


def _write_onnx(folder: Path, model: _Logits, meta: Mapping[str, Any]) -> Forward:
    onnx = import_extra("onnx", what="--format onnx")
    import_extra("onnxscript", what="--format onnx")  # torch needs it
    reference = import_extra("onnx.reference", what="--format onnx")
    path = folder / ONNX_NAME
    inputs = _examples(model, meta, num_samples=_TRACED_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own code
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=True,
            dynamic_shapes=(model.sizes,) * len(inputs),
            input_names=model.names,
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )
    onnx.checker.check_model(str(path))
    evaluator = reference.ReferenceEvaluator(str(path))

    def run(*tensors: Tensor) -> Tensor:
        arrays = (tensor.numpy() for tensor in tensors)
        return torch.as_tensor(evaluator.run(None, dict(zip(model.names, arrays, strict=True)))[0])

    return run


def how_to_load(form: str, meta: Mapping[str, Any]) -> str:
    described = meta.get("hub_config")
    if form != HUGGINGFACE or not described:
        return _HOW_TO_LOAD[form]
    kind = described["architectures"][0]
    is_image = kind.endswith("ForImageClassification")
    kinds = ", ".join((kind, "AutoImageProcessor" if is_image else "AutoTokenizer"))
    inputs = "pixel_values=inputs" if is_image else '**tokenizer(text, return_tensors="pt")'
    return f"""\
from transformers import {kinds}  # of the folder, if the export has one

model = {kind}.from_pretrained("FOLDER")
logits = model({inputs}).logits"""


def write_preparation(folder: Path, meta: Mapping[str, Any], *, kind: str) -> bool:
    """Write what prepares the inputs of the model in folder; False: none was found."""
    sources = list(_sources(meta))
    settings = [path for s in sources if (path := s / _GENERATION_NAME).is_file()]
    if settings and (folder / _GENERATION_NAME).exists():  # from the model's configuration alone
        (folder / _GENERATION_NAME).write_bytes(settings[0].read_bytes())
    write = _write_tokenizer if kind == TOKENIZER else _write_processor
    return any(write(source, folder, meta) for source in sources)


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
    # WHY not copied: a folder with its settings alone looks like one, and is read as an empty one
    auto = import_extra("transformers", what="--format huggingface").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # WHY broad: the library raises many kinds of errors
        log.debug("%s has no tokenizer: %s", source, error)
        return False
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return False  # made from nothing
    tokenizer.save_pretrained(folder)
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
