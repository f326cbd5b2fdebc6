"""The commands beside training, and the options of each.

Settings are options of training, and of those commands that take them; they are not listed here.
Does not own: reading the command line (cli.py), what a command does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

TRAIN = "train"
HELP = "help"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A flag with a value, or a bare word, of a command other than training."""

    name: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()
    is_word: bool = False
    """Given by its place, without a flag; such an option must be given, unless it is_optional."""

    is_optional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command other than training."""

    text: str
    options: tuple[Option, ...] = ()
    takes_settings: bool = False
    """It trains, or goes on from the RUN that it names: settings may stand behind it."""


COMMANDS: Mapping[str, Command] = {
    "doctor": Command(text="Check this machine: Python, torch, GPUs, network, disk, memory."),
    "verify-ledger": Command(
        text="Prove from a run's ledger that each epoch took every sample exactly once.",
        options=(Option(name="run", text="Run folder.", is_word=True),),
    ),
    "evaluate": Command(
        text="Measure a trained model on its whole test set; torchrun shares the work.",
        options=(
            Option(name="run", text="Run folder or checkpoint folder.", is_word=True),
            Option(
                name="output",
                text="JSON file to write. Left out: in the run folder, named for the step.",
            ),
        ),
        takes_settings=True,
    ),
    "drill": Command(
        text="Try a fault: it strikes a run on this machine, which has to end as if nothing was.",
        options=(
            Option(
                name="name",
                text="Which fault; all: one after the other. Left out: they are listed.",
                is_word=True,
                is_optional=True,
            ),
            Option(name="ranks", text="How many processes train.", default="2"),
            Option(name="table", text="File to write the verdicts to, as a Markdown table."),
        ),
        takes_settings=True,
    ),
    "export": Command(
        text="Write the model of a run for other programs; it is read back and compared.",
        options=(
            Option(name="run", text="Run folder or checkpoint folder.", is_word=True),
            Option(
                name="format",
                text="safetensors: the weights; huggingface: for from_pretrained(); torch_export, "
                "onnx: a program that needs none of this code.",
                default="safetensors",
                choices=("safetensors", "huggingface", "torch_export", "onnx"),
            ),
            Option(
                name="output",
                text="New folder to write to. Left out: exports/ and the run's name (and format).",
            ),
        ),
    ),
}
