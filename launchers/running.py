"""What all launchers share: their arguments, and running the script in this process.

Every launcher is used in the same way:

    LAUNCHER [its own options] [SCRIPT [the script's own arguments]]

The script is ddp_training.py if none is named. An option that the launcher does not know belongs to
ddp_training.py, as --epochs in `... run_with_python.py --nproc 2 --epochs 1`.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from hardened_ddp.ranks.launch import Launch, end_with_launcher, prepare_environment

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "ddp_training.py"


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Make the parser of a launcher; --help shows the text at the top of its file."""
    return argparse.ArgumentParser(
        prog=name,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # WHY: else --no would mean --nproc
    )


def read_arguments(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split argv into the launcher's own options and the script with its arguments."""
    # WHY by hand: everything after the script's name belongs to the script, whatever its name.
    first = next((i for i, word in enumerate(argv) if word.endswith(".py")), len(argv))
    own = [word for word in argv[:first] if word != "--"]  # it may stand before the script's own
    options, unknown = parser.parse_known_args(own)
    words = argv[first:]
    if words and unknown:
        parser.error(f"unknown option {unknown[0]} before {words[0]}")
    words = words or [SCRIPT, *unknown]
    script = Path(words[0])
    if not script.is_file():
        beside = ROOT / script
        if not beside.is_file():
            parser.error(f"there is no script {script}")  # exits with status 2
        script = beside
    return options, [str(script), *words[1:]]


def begin_rank(launch: Launch, words: list[str], *, with_lesson: bool) -> None:
    """Prepare this process as a rank of a launcher, and show what its ranks are."""
    prepare_environment(launch, os.environ)
    end_with_launcher(launch)
    if with_lesson:
        from launchers.lesson import give_lesson  # WHY here: it imports torch, which takes a second

        give_lesson(launch, cpu_only="--cpu_only" in words)


def run_script(words: list[str]) -> None:
    """Run a script in this process as Python would: words are its path and its arguments."""
    sys.argv = words
    # WHY: Python puts the folder of the script first, where its own modules are.
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
