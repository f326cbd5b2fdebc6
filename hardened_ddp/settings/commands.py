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

    name: str
    text: str
    _: KW_ONLY
    default: str = ""
    choices: tuple[str, ...] = ()
    # Given by its place, without a flag; such an option must be given, unless it is_optional.
    is_word: bool = False
    is_optional: bool = False
    is_place: bool = False  # it names a folder or a file of this machine
    is_switch: bool = False  # a flag without a value; given, its value is "true"

    # The last of the words given by place takes all that are left, a flag may be given again; the
    # values are joined by newlines.
    is_repeated: bool = False
    needs: str = ""  # what it is given with: a flag, or WITH_PROGRAM


@dataclass(frozen=True, slots=True)
class Command:
    """A command other than training."""

    text: str
    options: tuple[Option, ...] = ()
    _: KW_ONLY
    takes_settings: bool = False  # it trains, or uses the RUN that it names: settings may follow it

    # What follows "--" is the command line of another program, and is not read here.
    takes_program: bool = False


_place = partial(Option, is_place=True)  # a folder or a file, by a flag
_word = partial(Option, is_word=True, is_place=True)  # one without a flag
_foreign = partial(Option, needs=WITH_PROGRAM)
RUN = _word("run", "Run folder or checkpoint folder.")
AVERAGED = "averaged"
WEIGHTS = Option(
    "weights",
    "averaged: those that --ema has averaged, where the run has them. trained: as the optimizer "
    "left them.",
    default=AVERAGED,
    choices=(AVERAGED, "trained"),
)
OUTPUT_DIR = _place("output_dir", "Folder that holds the run folders.", default="runs")

COMMANDS: Mapping[str, Command] = {
    "doctor": Command(
        "Check this machine: Python, torch, GPUs, network, disk, memory.",
        (
            Option("cluster", "Started on all ranks: compare all hosts.", is_switch=True),
            Option("wait", "Seconds to wait for all ranks.", default="60", needs="--cluster"),
            _place("data", "Folder of data to compare.", default="data", needs="--cluster"),
            OUTPUT_DIR,
        ),
    ),
    "explain": Command(
        "Explain the log of any DDP job: which rank failed, why, and how to fix it.",
        (
            _word(
                "log",
                "Log files, .gz, folders of logs, run folders, newest for the newest run in runs, "
                "or - for standard input.",
                is_optional=True,
                is_repeated=True,
            ),
            Option("cause", "Code of a cause of docs/CAUSES.md: print it in full."),
            Option("json", "Write JSON instead of text.", is_switch=True),
        ),
    ),
    "watch": Command(
        "Watch a run: every rank, what it does and how fast, the loss, and faults so far.",
        (
            _word(
                "run",
                "Run folder, or its name in output_dir. Default: the newest run.",
                is_optional=True,
            ),
            OUTPUT_DIR,
            Option("every", "Seconds between two updates.", default="1"),
            Option("once", "Print it once, and exit.", is_switch=True),
        ),
    ),
    "report": Command(
        "Write one HTML file of a run, or of several side by side: curves, faults, times.",
        (
            _word("run", "Run folders, or their names in output_dir.", is_repeated=True),
            OUTPUT_DIR,
            _place(
                "output",
                "File to write. Default: report.html in the run folder; of several runs, in "
                "output_dir.",
            ),
        ),
    ),
    "verify-ledger": Command(
        "Prove from a run's ledger that each epoch took every sample exactly once.",
        (_word("run", "Run folder, or its name in runs."),),
    ),
    "replay": Command(
        "Do a step of a run again, exactly, and show what it was: loss, gradient, each sample.",
        (
            _word("run", "Run folder, or its name in runs."),
            Option("step", "Which step: as messages name it, from 0."),
            Option("ranks", "Number of processes. Default: as many as then."),
            Option("open", "Number of a sample: where it lies, and what is in it."),
            Option("without", "Numbers of samples, with commas: what the step is without them."),
            Option("debug_on", "Detect anomalies in backward at this step.", is_switch=True),
            Option("any_code", "Go on although the code has changed since.", is_switch=True),
        ),
        takes_settings=True,
    ),
    "bisect": Command(
        "Find the first step where a condition holds, and the samples that made it so.",
        (
            _word("run", "Run folder, or its name in runs."),
            Option("when", "The condition: 'loss > 3', 'nan in weights', 'norm(fc) > 9', ..."),
            Option("horizon", "Steps before it that may be to blame.", default="5"),
            Option("any_code", "Go on although the code has changed since.", is_switch=True),
        ),
        takes_settings=True,
    ),
    "diff": Command(
        "Say at which step two runs part, and why, as far as their records show it.",
        (_word("run", "Two run folders, or their names in runs.", is_repeated=True),),
    ),
    "evaluate": Command(
        "Evaluate a trained model on its whole test set; under torchrun the ranks share it.",
        (
            RUN,
            _place(
                "output",
                "JSON file to write. Default: a file in the run folder, named after the step.",
            ),
            WEIGHTS,
        ),
        takes_settings=True,
    ),
    "audit": Command(
        "Run any DDP program under observation, or read its source, and report what is silently "
        "wrong in it.",
        (
            Option("steps", "Optimizer steps to observe on each rank.", default="50"),
            Option(
                "hang_after",
                "Seconds without progress on any rank after which the program counts as hung.",
                default="20",
            ),
            _place("source", "Python file to read; without a program nothing is run."),
            Option("json", "Print the report as JSON.", is_switch=True),
        ),
        takes_program=True,
    ),
    "drill": Command(
        "Inject a fault into a run, or with -- COMMAND faults into any DDP program: what is lost?",
        (
            Option(
                "name",
                "Name of the fault; all: all of them, one by one. Without it they are listed.",
                is_word=True,
                is_optional=True,
            ),
            Option("ranks", "Number of training processes.", default="2"),
            _place("table", "File to write the verdicts to, as a Markdown table."),
            _foreign("faults", "Faults of any program, with commas between. Default: all."),
            _foreign(
                "step", "The step in which the fault comes. Default: between two checkpoints."
            ),
            _foreign("rank", "The rank that has the fault.", default="1"),
            _foreign("again", "Command that continues the program. Default: the same one."),
            _foreign("also", "Another folder that it writes to.", is_repeated=True),
            _foreign("repeat", "How often each fault is injected.", default="1"),
            _foreign("hang_after", "Seconds without progress that are a hang.", default="120"),
            _foreign("copy", "Copy the program's folder: no overlay mount.", is_switch=True),
            _foreign("json", "Print the facts as JSON.", is_switch=True),
            _foreign("html", "File to write a page to."),
        ),
        takes_settings=True,
        takes_program=True,
    ),
    "export": Command(
        "Write the model of a run for other programs, read it back and compare it.",
        (
            RUN,
            Option(
                "format",
                "safetensors: the weights; huggingface: for from_pretrained(), adapters merged; "
                "peft: adapters alone; torch_export, onnx: a program that needs none of this code.",
                default="safetensors",
                choices=("safetensors", "huggingface", "peft", "torch_export", "onnx"),
            ),
            WEIGHTS,
            _place(
                "output",
                "New folder to write to. Default: exports/ and the run's name (and format).",
            ),
        ),
    ),
}
