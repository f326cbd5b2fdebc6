#!/usr/bin/env python3
"""Download datasets and pretrained weights once, before the job, on a machine with network.

    python download.py --dataset mnist --model resnet18 --data_dir data

Each file is verified by its hash. The same command continues an interrupted download, and skips
files that are complete. Two downloads may run at once.
Training on nodes without network then uses the files: --data_dir data, and weights in ./models.
"""

import argparse
import sys
from pathlib import Path

from hardened_ddp.errors import HardenedError
from hardened_ddp.settings.typed_command import shell_command
from hardened_ddp.settings.wording import url_problem


def place(text: str) -> Path:
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = "mnist, fashion_mnist, cifar10, cifar100"
    parser.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help=names)
    parser.add_argument(
        "--model", nargs="+", default=[], metavar="NAME", help="of torchvision, such as resnet18"
    )
    parser.add_argument("--data_dir", type=place, default=Path("data"))
    parser.add_argument("--models_dir", type=place, default=Path("models"))
    arguments = parser.parse_args()
    if not arguments.dataset and not arguments.model:
        parser.error("name what to download: --dataset NAME ..., --model NAME ...")
    return arguments


def main() -> int:
    arguments = parse()
    from hardened_ddp.data.sources.downloads import WEIGHTS_FOLDER, fetch, fetch_dataset, weights_of

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        for name in arguments.dataset:
            fetch_dataset(name.replace("-", "_"), arguments.data_dir, say=say)
        for name in arguments.model:
            fetch(weights_of(name, arguments.models_dir / WEIGHTS_FOLDER), say=say)
    except HardenedError as error:
        print(f"download.py: error {error}", file=sys.stderr)
        print(
            "By hand: give this command on a machine with network, then copy "
            f"{arguments.data_dir} and {arguments.models_dir} here, to the same places. What is "
            "already downloaded is kept: the same command continues from there.",
            file=sys.stderr,
        )
        return error.exit_status
    except KeyboardInterrupt:
        print("download.py: stopped; the same command continues from here", file=sys.stderr)
        return 130
    models = arguments.models_dir.absolute()
    if arguments.model and models.resolve() != Path("models").resolve():
        print(f"so that training finds them: export {shell_command(f'TORCH_HOME={models}')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
