"""Models by name or by import path, with their head fitted to the classes.

Owns building a plain nn.Module, also from its description in a checkpoint or an export: those that
are built in, torchvision's classifiers with their published weights, and the user's. Does not own:
models of the Hub (huggingface.py), DDP (gradients/), the weights of a checkpoint.
What goes wrong here: a misspelled name, arguments that the model does not take, weights that can't
be downloaded. Each is a ModelError before training.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from hardened_ddp.data.foreign_code import import_callable, import_torchvision, told_as
from hardened_ddp.data.sources.downloads import fetch, weights_of
from hardened_ddp.data.sources.hub_sets import PREFIX
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.model.huggingface import build_from_config, load_hub_model
from hardened_ddp.settings.config import ModelConfig
from hardened_ddp.settings.typed_command import download_command
from hardened_ddp.settings.wording import nearest

log = logging.getLogger(__name__)

# The keys that describe a model.
DESCRIPTION = (
    *("model", "model_args", "pretrained", "hub_config", "adapter"),
    *("num_classes", "input_shape", "class_names"),
)
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # they have an error of their own
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


# They have outputs besides their logits; with published weights they scale their input anew.
_WITH_AUXILIARY = ("googlenet", "inception_v3")


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers: (N, C, H, W) float -> (N, num_classes) logits."""

    def __init__(self, *, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ModelError(
                f"simple_cnn needs images, and a sample of the dataset has the shape {input_shape}",
                fix="--model mlp, or one of your own: --model package.module:callable",
            )
        channels, height, width = input_shape
        if min(height, width) < 4:
            raise ModelError(
                f"simple_cnn halves the image twice and needs at least 4x4, not {height}x{width}",
                fix="choose --model mlp for images this small",
            )
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(64 * (height // 4) * (width // 4), 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.conv1(images).relu())
        features = self.pool(self.conv2(features).relu())
        logits: torch.Tensor = self.head(self.hidden(features.flatten(1)).relu())
        return logits


class MLP(nn.Module):
    """Linear layers with ReLU between: any (N, ...) float -> (N, num_classes) logits."""

    def __init__(
        self, *, num_classes: int, input_shape: tuple[int, ...], hidden: int = 128, depth: int = 1
    ) -> None:
        super().__init__()
        widths = [int(torch.Size(input_shape).numel()), *[hidden] * depth]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs)
        return logits


BUILT_IN: Mapping[str, Callable[..., nn.Module]] = {"simple_cnn": SimpleCNN, "mlp": MLP}


def build_model(
    config: ModelConfig, *, num_classes: int, input_shape: tuple[int, ...], task: str = "auto"
) -> nn.Module:
    """Build the model that config names, on the CPU. Rank-local.

    task: as --task names it; one body of transformers may have several heads.

    Raises ModelError for an unknown name, arguments that it does not take, missing weights.
    """
    check_model(config.model)
    facts = {"num_classes": num_classes, "input_shape": input_shape}
    if config.model.startswith(PREFIX):
        model: nn.Module = load_hub_model(
            config, num_classes=num_classes, input_shape=input_shape, task=task
        )
    elif ":" in config.model:
        build = import_callable(config.model, setting="model", error=ModelError)
        model = _call(build, facts, config)
    elif config.model in BUILT_IN:
        if config.pretrained:
            raise ModelError(
                f"there are no pretrained weights for {config.model}",
                fix="leave --pretrained out, or choose a torchvision model such as resnet18",
            )
        model = _call(BUILT_IN[config.model], facts, config)
    else:
        if not num_classes and "num_classes" not in config.model_args:
            raise _no_classes(config.model)
        if len(input_shape) != 3:
            raise ModelError(
                f"{config.model} needs images, and a sample of this dataset has the shape "
                f"{input_shape or 'of no tensor'}",
                fix="choose a model for this data: --model package.module:callable",
            )
        model = _build_classifier(config, num_classes=num_classes, channels=input_shape[0])
    if type(model).__name__ in _WRAPPERS:
        raise ModelError(
            f"{config.model} is wrapped in {type(model).__name__} already, and is to be wrapped in "
            "DistributedDataParallel here",
            fix="return the model itself, without the wrapper",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{config.model} has no parameter to train", fix="unfreeze some of it")
    if empty := [n for n, part in model.named_parameters() if is_lazy(part) or part.is_meta]:
        raise ModelError(
            f"{config.model} has parameters without values: {', '.join(empty[:8])}",
            fix="build it on the CPU, not on the meta device; and with sizes, or run one batch "
            "through it before it is returned: model(torch.zeros(1, *input_shape))",
        )
    if config.gradient_checkpointing:
        _checkpoint_blocks(model)
    return model


def build_described(facts: Mapping[str, Any]) -> nn.Module:
    """Build the model that facts describe. Rank-local; advances the random number generators.

    Nothing is downloaded: published weights would be overwritten anyway. Raises ModelError.
    """
    if not isinstance(facts.get("model"), str):
        raise ModelError("the checkpoint does not say which model it belongs to")
    input_shape = tuple(facts.get("input_shape") or ())
    if facts.get("hub_config"):
        adapter = facts.get("adapter") or {}
        return build_from_config(facts["hub_config"], input_shape=input_shape, adapter=adapter)
    arguments = dict(facts.get("model_args") or {})
    if facts.get("pretrained") and facts["model"] in _WITH_AUXILIARY:
        arguments["transform_input"] = True
    return build_model(
        ModelConfig(model=facts["model"], model_args=arguments),
        num_classes=int(facts.get("num_classes") or 0),
        input_shape=input_shape,
    )


def check_model(name: str) -> None:
    """Raise ModelError if no model is called so, or its code can't be imported. Rank-local."""
    if name in BUILT_IN or name.startswith(PREFIX):
        return
    if ":" in name:
        import_callable(name, setting="model", error=ModelError)
        return
    models = import_torchvision().models
    names = [*BUILT_IN, *models.list_models(module=models)]
    if name not in names:
        meant = nearest(name, names)
        raise ModelError(
            f"no model is called {name!r}" + (f" (did you mean {meant}?)" if meant else ""),
            fix=f"--model {' | '.join(BUILT_IN)} | a torchvision classifier | hf:FOLDER | "
            "package.module:name",
        )


def place_model(
    model: nn.Module, config: ModelConfig, *, device: torch.device, world_size: int
) -> nn.Module:
    """Move the model to its device; convert it as config says. Rank-local."""
    if config.sync_batchnorm and world_size > 1:
        if device.type == "cpu":
            raise ModelError(
                "sync_batchnorm needs a GPU on every rank: torch has no CPU version of it",
                fix="leave --sync_batchnorm out",
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch
    if found := [n for n, part in model.named_parameters() if _is_expanded(part)]:
        raise ModelError(
            f"{config.model} has parameters whose values share memory, as expand() makes them: "
            f"{', '.join(found[:8])}. No optimizer can update them",
            fix="make the parameter small, and expand it in forward; or .clone() what expand() "
            "returned, for values that are trained each for itself",
        )
    return model.to(device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(not step and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


def _no_classes(model: str) -> DataError:
    return DataError(
        f"the dataset does not say how many classes it has, and {model} needs to know",
        fix="give the dataset an attribute num_classes (a number) or classes (their names), or say "
        "--model_args '{num_classes: NUMBER}'",
    )


def _call(build: Callable[..., Any], facts: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Call build with model_args, and with those facts of the data that it asks for."""
    what = f"{config.model} can't be built with model_args {dict(config.model_args)}"
    fix = "check --model_args against the model's constructor; the traceback is in this rank's log"
    with told_as(ModelError, what, fix=fix, passes=_OUT_OF_MEMORY):
        wanted = inspect.signature(build).parameters
        known = {name: value for name, value in facts.items() if name in wanted}
        if known.get("num_classes") == 0 and "num_classes" not in config.model_args:
            if wanted["num_classes"].default is inspect.Parameter.empty:
                raise _no_classes(config.model)
            del known["num_classes"]
        model = build(**{**known, **config.model_args})
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{config.model} returned a {type(model).__name__}, not a torch.nn.Module",
            fix="name a class or function that returns an nn.Module",
        )
    return model


def _checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block's activations in backward instead of keeping them."""
    for owner in (model, getattr(model, "net", None)):  # of transformers: they know their blocks
        enable = getattr(owner, "gradient_checkpointing_enable", None)
        if callable(enable):
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
    parents = [m for m in model.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
    blocks = [block for parent in parents for block in parent if [*block.children()]]
    blocks = [b for b in blocks or model.children() if any(True for _ in b.parameters())]
    inner = {part for block in blocks for part in [*block.modules()][1:]}
    for block in (block for block in blocks if block not in inner):  # the outermost ones
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _build_classifier(config: ModelConfig, *, num_classes: int, channels: int) -> nn.Module:
    """Build a torchvision classifier with num_classes outputs and the data's channels. Rank-local.

    Raises ModelError for arguments that it does not take, and missing weights.
    """
    models = import_torchvision().models
    arguments: dict[str, Any] = {"weights": "DEFAULT" if config.pretrained else None}
    if config.pretrained:
        _download_weights(config.model)
    else:
        arguments["num_classes"] = num_classes
        if config.model in _WITH_AUXILIARY:
            # WHY: auxiliary outputs are neither logits nor a loss
            arguments |= {"init_weights": True, "aux_logits": False}
    model = _call(partial(models.get_model, config.model, **arguments), {}, config)
    if config.pretrained:
        _fit_head(model, num_classes, config.model)
    _fit_channels(model, channels)
    return model


def _download_weights(name: str) -> None:
    """Download published weights to torchvision's cache, once for all ranks of a node.

    WHY no check of an existing file: its hash was checked at the download, and takes seconds.
    """
    try:
        wanted = weights_of(name, Path(torch.hub.get_dir()) / "checkpoints")
        if not wanted.path.is_file():
            fetch(wanted, say=log.info)
    except (OSError, DataError) as error:
        reason = error.message if isinstance(error, DataError) else error
        raise ModelError(
            f"the pretrained weights of {name} can't be downloaded: {reason}",
            fix="leave --pretrained out, or copy the folder models here from a machine with "
            "internet, where this writes it: " + download_command("--model", name),
        ) from error


def _fit_head(model: nn.Module, num_classes: int, name: str) -> None:
    """Replace the last layer, which gives ImageNet's 1000 classes, by one for num_classes."""
    for path, layer in reversed(list(model.named_modules())):
        if isinstance(layer, nn.Linear) and layer.out_features == 1000:
            head: nn.Module = nn.Linear(layer.in_features, num_classes)
        elif isinstance(layer, nn.Conv2d) and layer.out_channels == 1000:
            head = nn.Conv2d(layer.in_channels, num_classes, layer.kernel_size)  # type: ignore[arg-type]  # a pair, typed as any tuple
        else:
            continue
        model.set_submodule(path, head)
        return
    raise ModelError(f"{name} has no layer with 1000 outputs to replace by {num_classes}")


def _fit_channels(model: nn.Module, channels: int) -> None:
    """Let the first convolution take the data's channels; RGB weights are summed over colour."""
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is not None and first.in_channels != channels:
        # WHY: the result is that of a grey image in three equal channels.
        mean_weight = first.weight.sum(dim=1, keepdim=True) / channels
        first.weight = nn.Parameter(mean_weight.detach().repeat(1, channels, 1, 1))
        first.in_channels = channels
