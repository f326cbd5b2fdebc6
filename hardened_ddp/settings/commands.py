"""The commands beside training, and the options of each.

Settings are options of training, and of those commands that take them; they are not listed here.
Does not own: reading the command line (cli.py), what a command does.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

TRAIN = "train"
HELP = "help"
VERSION = "version"  # asked for by --version
WITH_PROGRAM = "-- COMMAND"


@dataclass(frozen=True, slots=True)
class Option:
    """A flag with a value, a switch, or a bare word, of a command other than training."""

    # As help shows it. A word that is given by its place: RUN, [RUN] if it may be left out. A flag:
    # --every SECONDS, or --format a|b, which takes one of these. A switch: --json; its value is
    # "true". Behind "..." it may be given again; the values are joined by newlines.
    usage: str
    text: str
    _: KW_ONLY
    default: str = ""
    is_place: bool = False  # it names a folder or a file of this machine
    needs: str = ""  # what it is given with: a flag, or WITH_PROGRAM

    @property
    def name(self) -> str:
        return self.usage.strip("[]").split()[0].removeprefix("--").lower()

    @property
    def choices(self) -> tuple[str, ...]:
        value = self.usage.partition(" ")[2]
        return tuple(value.split("|")) if "|" in value else ()

    @property
    def is_word(self) -> bool:
        return not self.usage.startswith("--")

    @property
    def is_switch(self) -> bool:
        return not self.is_word and " " not in self.usage

    @property
    def is_repeated(self) -> bool:
        return "..." in self.usage


@dataclass(frozen=True, slots=True)
class Command:
    """A command other than training."""

    text: str
    options: tuple[Option, ...] = ()
    _: KW_ONLY
    takes_settings: bool = False  # it trains, or uses the RUN that it names: settings may follow it

    # What follows "--" is the command line of another program, and is not read here.
    takes_program: bool = False


_place = partial(Option, is_place=True)
_foreign = partial(Option, needs=WITH_PROGRAM)
AVERAGED = "averaged"
WEIGHTS = Option(
    f"--weights {AVERAGED}|trained",
    "averaged: those that --ema has averaged, where the run has them. trained: as the optimizer "
    "left them.",
    default=AVERAGED,
)
OUTPUT_DIR = _place("--output_dir FOLDER", "Folder that holds the run folders.", default="runs")
ANY_CODE = Option("--any_code", "Go on although the code has changed since.")

COMMANDS: Mapping[str, Command] = {
    "doctor": Command(
        "Check this machine: Python, torch, GPUs, network, disk, memory.",
        (
            Option("--cluster", "Started on all ranks: compare all hosts."),
            Option("--wait N", "Seconds to wait for all ranks.", default="60", needs="--cluster"),
            _place("--data FOLDER", "Data to compare.", default="data", needs="--cluster"),
            OUTPUT_DIR,
        ),
    ),
    "explain": Command(
        "Explain the log of any DDP job: which rank failed, why, and how to fix it.",
        (
            _place("[LOG ...]", "Logs, .gz, folders of them, run folders, newest, or - for stdin."),
            Option("--cause CODE", "Code of a cause of docs/CAUSES.md: print it in full."),
            Option("--json", "Write JSON instead of text."),
        ),
    ),
    "watch": Command(
        "Watch a run: every rank, what it does and how fast, the loss, and faults so far.",
        (
            _place("[RUN]", "Run folder, or its name in output_dir. Default: the newest run."),
            OUTPUT_DIR,
            Option("--every N", "Seconds between two updates.", default="1"),
            Option("--once", "Print it once, and exit."),
        ),
    ),
    "report": Command(
        "Write one HTML file of a run, or of several side by side: curves, faults, times.",
        (
            _place("RUN ...", "Run folders, or their names in output_dir."),
            OUTPUT_DIR,
            _place("--output FILE", "Default: report.html in the run folder, or in output_dir."),
        ),
    ),
    "verify-ledger": Command(
        "Prove from a run's ledger that each epoch took every sample exactly once.",
        (_place("RUN", "Run folder, or its name in runs."),),
    ),
    "replay": Command(
        "Do a step of a run again, exactly, and show what it was: loss, gradient, each sample.",
        (
            _place("RUN", "Run folder, or its name in runs."),
            Option("--step N", "Which step: as messages name it, from 0."),
            Option("--ranks N", "Number of processes. Default: as many as then."),
            Option("--open SAMPLE", "Number of a sample: where it lies, and what is in it."),
            Option("--without SAMPLES", "Numbers with commas: what the step is without them."),
            Option("--debug_on", "Detect anomalies in backward at this step."),
            ANY_CODE,
        ),
        takes_settings=True,
    ),
    "bisect": Command(
        "Find the first step where a condition holds, and the samples that made it so.",
        (
            _place("RUN", "Run folder, or its name in runs."),
            Option("--when CONDITION", "'loss > 3', 'nan in weights', 'norm(fc) > 9', ..."),
            Option("--horizon N", "Steps before it that may be to blame.", default="5"),
            ANY_CODE,
        ),
        takes_settings=True,
    ),
    "diff": Command(
        "Say at which step two runs part, and why, as far as their records show it.",
        (_place("RUN ...", "Two run folders, or their names in runs."),),
    ),
    "evaluate": Command(
        "Evaluate a trained model on its whole test set; under torchrun the ranks share it.",
        (
            _place("RUN", "Run folder or checkpoint folder."),
            _place("--output FILE", "JSON. Default: in the run folder, named after the step."),
            WEIGHTS,
        ),
        takes_settings=True,
    ),
    "audit": Command(
        "Run any DDP program under observation, or read its source, and report what is silently "
        "wrong in it.",
        (
            Option("--steps N", "Optimizer steps to observe on each rank.", default="50"),
            Option("--hang_after N", "Seconds without progress that are a hang.", default="20"),
            _place("--source FILE", "Python file to read; without a program nothing is run."),
            Option("--json", "Print the report as JSON."),
        ),
        takes_program=True,
    ),
    "drill": Command(
        "Inject a fault into a run, or with -- COMMAND faults into any DDP program: what is lost?",
        (
            Option("[NAME]", "Name of the fault, or all. Without it they are listed."),
            Option("--ranks N", "Number of training processes.", default="2"),
            _place("--table FILE", "Write the verdicts there, as a Markdown table."),
            _foreign("--faults NAMES", "Faults of any program, with commas. Default: all."),
            _foreign("--step N", "The step of the fault. Default: between two checkpoints."),
            _foreign("--rank N", "The rank that has the fault.", default="1"),
            _foreign("--again COMMAND", "What continues the program. Default: the same command."),
            _foreign("--also FOLDER ...", "Another folder that it writes to."),
            _foreign("--repeat N", "How often each fault is injected.", default="1"),
            _foreign("--hang_after N", "Seconds without progress that are a hang.", default="120"),
            _foreign("--copy", "Copy the program's folder: no overlay mount."),
            _foreign("--json", "Print the facts as JSON."),
            _foreign("--html FILE", "File to write a page to."),
        ),
        takes_settings=True,
        takes_program=True,
    ),
    "export": Command(
        "Write the model of a run for other programs, read it back and compare it.",
        (
            _place("RUN", "Run folder or checkpoint folder."),
            Option(
                "--format safetensors|huggingface|peft|torch_export|onnx",
                "safetensors: the weights; huggingface: for from_pretrained(), adapters merged; "
                "peft: adapters alone; torch_export, onnx: a program that needs none of this code.",
                default="safetensors",
            ),
            WEIGHTS,
            _place("--output FOLDER", "A new one. Default: exports/, the run's name and format."),
        ),
    ),
}
