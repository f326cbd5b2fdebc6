"""Train SimpleCNN on MNIST files with the Trainer of the transformers library.

    python examples/hf_trainer/train.py
    torchrun --standalone --nproc_per_node=2 examples/hf_trainer/train.py

It shows a model that computes its own loss, a custom collate function, and evaluation with metrics.
The same script runs on one process or several: Trainer wraps the model in DDP if torchrun started
the script. Without a GPU the ranks communicate over gloo.

The data is MNIST in its original files, in DATA/MNIST/raw. If there are none, the handwritten
digits of the scikit-learn package are written there in the same format: nothing is downloaded.
Install first: pip install -r requirements-extras.txt
"""

import argparse
import gc
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # WHY: the project is not installed

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.data.sources.built_in import open_digits, open_downloadable
from hardened_ddp.errors import HardenedError
from hardened_ddp.model.zoo import SimpleCNN

FILES = {True: "train", False: "t10k"}


class WithLoss(nn.Module):
    """A classifier in the form that Trainer expects: given labels, it also returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch of samples; its keys are the parameters of WithLoss.forward."""
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def metrics(prediction: Any) -> Mapping[str, float]:  # Any: an EvalPrediction of transformers
    """Compute what evaluation reports, from all predictions of all ranks."""
    predicted = prediction.predictions.argmax(axis=1)
    labels = prediction.label_ids
    recalls = [(predicted == label)[labels == label].mean() for label in np.unique(labels)]
    return {
        "accuracy": float((predicted == labels).mean()),
        "mean_recall": float(np.mean(recalls)),
    }


def write_digits_as_mnist(folder: Path) -> None:
    """Write the digits of scikit-learn as MNIST files: 28x28 pixels of one byte each."""
    folder.mkdir(parents=True, exist_ok=True)
    for is_training, name in FILES.items():
        digits = open_digits(train=is_training)
        low, high = digits.images.min(), digits.images.max()
        pixels = (digits.images - low) / (high - low) * 255
        large = nn.functional.interpolate(pixels, (28, 28), mode="bilinear", align_corners=False)
        images = large.round().to(torch.uint8).squeeze(1).numpy()
        # The format: 0, 0, type (8: bytes), number of dimensions; each dimension; the bytes.
        head = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = digits.labels.to(torch.uint8).numpy()
        head = struct.pack(">4BI", 0, 0, 8, 1, len(labels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def read_mnist(data_dir: Path, *, train: bool) -> TensorDataset:
    """Read one part of MNIST: images (N, 1, 28, 28) float, labels (N,) int64."""
    images = open_downloadable("mnist", train=train, data_dir=str(data_dir), download=False)
    return TensorDataset(*images.fetch(torch.arange(len(images))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, default=Path("data"))
    parser.add_argument("--output_dir", type=Path, default=Path("runs/hf_trainer"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="per rank")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--cpu_only", action="store_true")
    return parser.parse_args()


def train_and_test(transformers: Any, training: Any, data_dir: Path) -> None:
    """Train with the Trainer, measure on the test set, and save. Collective: all ranks."""
    train, test = (read_mnist(data_dir, train=part) for part in (True, False))
    transformers.set_seed(training.seed)
    trainer = transformers.Trainer(
        model=WithLoss(SimpleCNN(num_classes=10, input_shape=(1, 28, 28))),
        args=training,
        train_dataset=train,
        eval_dataset=test,
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.save_model()
        trainer.save_metrics("eval", result)
        print(
            f"{training.world_size} ranks, {len(test)} test samples: "
            f"accuracy {result['eval_accuracy']:.2%}, loss {result['eval_loss']:.4f}"
        )


def main() -> int:
    arguments = parse()
    try:
        transformers = import_extra("transformers", what="this example")
        import_extra("accelerate", what="Trainer")
    except HardenedError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    uses_gpu = torch.cuda.is_available() and not arguments.cpu_only
    is_launched = torch.distributed.is_torchelastic_launched()
    training = transformers.TrainingArguments(
        output_dir=str(arguments.output_dir),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=256,
        learning_rate=arguments.learning_rate,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        remove_unused_columns=False,  # WHY: otherwise it looks for columns, which tuples lack
        label_names=["labels"],
        report_to="none",
        use_cpu=not uses_gpu,
        # WHY not always: with a backend it expects a process group, which one process lacks
        ddp_backend="gloo" if is_launched and not uses_gpu else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=uses_gpu,
        seed=0,
    )
    raw = arguments.data_dir / "MNIST" / "raw"
    # The first rank of each node writes the files, the others wait. From here on a process group
    # exists: TrainingArguments has made it.
    with training.main_process_first(desc="the data"):
        if not any(raw.glob("train-images-idx3-ubyte*")):
            write_digits_as_mnist(raw)
    train_and_test(transformers, training, arguments.data_dir)
    if torch.distributed.is_initialized():
        # WHY first: if DDP holds the last reference to the process group, destroying that waits for
        # gloo's thread, which waits for the GIL: the program would hang at its end.
        gc.collect()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
