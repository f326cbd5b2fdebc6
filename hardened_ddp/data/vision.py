"""torchvision, also where its binary does not match torch's.

Owns the import of torchvision. Its wheel from the package index is built for CUDA; beside a CPU
build of torch its compiled operators don't load, and then its import fails on registering their
shapes. Datasets, transforms and classifiers need none of those operators: it is enough to declare
the two that the import asks for.
"""

import importlib
import logging
from functools import cache
from types import ModuleType

import torch

from hardened_ddp.errors import DataError

log = logging.getLogger(__name__)

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("torchvision::nms", "torchvision::qnms")


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision with its models, datasets and transforms. Raises DataError if absent."""
    try:
        return _import()
    except ModuleNotFoundError as error:
        raise DataError(
            f"torchvision is not installed ({error})", fix="pip install -r requirements.txt"
        ) from error
    except (RuntimeError, ImportError, AttributeError) as first_error:
        for name in _OPERATORS:
            torch.library.define(name, _SCHEMA)
        try:
            module = _import()
        except (RuntimeError, ImportError) as error:
            raise DataError(
                f"torchvision does not fit torch {torch.__version__}: {error}",
                fix="pip install -r requirements.txt (it pins versions that fit together)",
            ) from first_error
        log.warning(
            "torchvision %s is built for another torch than %s: its compiled operators (nms, roi "
            "pooling) are missing; datasets, transforms and classifiers work",
            module.__version__,
            torch.__version__,
        )
        return module


def _import() -> ModuleType:
    importlib.invalidate_caches()
    module = importlib.import_module("torchvision")
    for part in ("models", "datasets", "transforms.v2"):
        importlib.import_module(f"torchvision.{part}")
    return module
