"""What --help says: every setting by section, its default and what it takes.

Owns the layout; the texts are those of config.py, the commands those of commands.py.
Does not own: printing.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from hardened_ddp.settings import config
from hardened_ddp.settings.commands import COMMANDS, TRAIN, Command
from hardened_ddp.settings.record import WIDTH, yaml_word
from hardened_ddp.settings.schema import AUTO, SETTINGS, TITLES, Setting, names_of
from hardened_ddp.settings.typed_command import PROGRAM, SCRIPT, is_installed
from hardened_ddp.settings.wording import unbroken, wrapped

_TEXT_COLUMN = 34
_VALUE_NAMES = {int: "N", float: "NUMBER", str: "TEXT", dict: "MAPPING"}
_HEAD = """\
usage: {ranks} [--config FILE] [--SETTING VALUE ...]
       {program} [--config FILE] [--SETTING VALUE ...]
       {program} COMMAND ...

Train a model with DistributedDataParallel on one process, one node or many.

Examples
  {program} --single_gpu --batch_size 128
  {two} --resume newest --epochs 20
  {program} --cpu_only --model mlp --model_args '{{hidden: 256, depth: 2}}'
"""
_NOTES = """\
How values are given
  Names take underscores or dashes and can't be abbreviated. A switch is --flag, --flag false or
  --no_flag. If a flag is given twice, the last one wins. Numbers may be written 1e-4. A MAPPING is
  JSON or YAML: '{{size: 28}}'.
  Order: default < {config} < settings of the run that is continued <
  --config FILE < command line.
"""


def help_text(topic: str = TRAIN) -> str:
    return _command_help(topic, COMMANDS[topic]) if topic in COMMANDS else _train_help()


@cache
def setting_texts() -> Mapping[str, str]:
    """Read what each setting does: its docstring, which Python itself drops."""
    found = {}
    sections = ast.parse(inspect.getsource(config)).body
    for section in (node for node in sections if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(section.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _train_help() -> str:
    program, edited = _program(), "config.yaml beside ddp_training.py"
    ranks = f"torchrun --nproc_per_node=N {SCRIPT.name}"
    two = f"torchrun --standalone --nproc_per_node=2 {SCRIPT.name}"
    if is_installed():
        ranks, two = f"{PROGRAM} --nproc_per_node=N", f"{PROGRAM} --nproc_per_node=2"
        edited = "config.yaml of the working folder"
    commands = [_entry(TRAIN, "Train. The word may be left out.")]
    commands += [_entry(name, command.text) for name, command in COMMANDS.items()]
    commands += [_entry("help [COMMAND]", "Show this help, or that of a command.")]
    common = [
        _entry("--config FILE", "YAML file of settings, over those of config.yaml."),
        _entry("--no_config", f"Do not read {edited}."),
        _entry("--help, -h", "Show this help."),
        _entry("--version", "Show the versions of this program, torch and CUDA."),
    ]
    if is_installed():
        text = "Start N ranks. Other options of torchrun too: --nnodes, --rdzv_endpoint, ..."
        common.insert(0, _entry("--nproc_per_node N", text))
    blocks = [_HEAD.format(ranks=ranks, program=program, two=two)]
    blocks += ["Commands\n" + "".join(commands), _NOTES.format(config=edited)]
    blocks += ["Common\n" + "".join(common)]
    for section, title in TITLES.items():
        entries = (_setting_entry(SETTINGS[name]) for name in names_of(section))
        blocks.append(f"{title}\n" + "".join(entries))
    return "\n".join(blocks)


def _command_help(name: str, command: Command) -> str:
    usage = [f"usage: {_program()} {name}"]
    entries = []
    for option in command.options:
        usage.append(option.usage if option.is_word else f"[{option.usage}]")
        needs = f"needs {option.needs}" if option.needs else ""
        default = f"default: {option.default}" if option.default else ""
        entries.append(_entry(option.usage, option.text, needs, default))
    if command.takes_settings:
        usage.append("[--SETTING VALUE ...]")
        text = "Any setting of training, such as --cpu_only"
        is_of_run = any(option.name == "run" for option in command.options)
        text += "; the others are those of the run." if is_of_run else "."
        entries.append(_entry("--SETTING VALUE", text))
    if command.takes_program:
        usage.append("[-- PROGRAM ...]")
        text = "The command line of the program to run, such as torchrun and what follows it."
        entries.append(_entry("-- PROGRAM ...", text))
    lines = wrapped(" ".join(map(unbroken, usage)), width=WIDTH - len("usage: "))
    blocks = ["\n       ".join(lines) + "\n", command.text + "\n"]
    return "\n".join([*blocks, "".join(entries)] if entries else blocks)


def _program() -> str:
    return PROGRAM if is_installed() else f"python {SCRIPT.name}"


def _setting_entry(setting: Setting) -> str:
    if setting.choices:
        value = "|".join(setting.choices)
    elif setting.type is bool:
        value = f"{AUTO}|true|false" if setting.has_auto else "true|false"
    else:
        value = f"{AUTO}|N" if setting.has_auto else _VALUE_NAMES[setting.type]
    form = f"--{setting.name} [{value}]" if setting.is_switch else f"--{setting.name} {value}"
    taken = setting.bounds.words() if setting.bounds else ""
    default = f"default: {yaml_word(setting.default)}"
    return _entry(form, setting_texts()[setting.name], taken, default)


def _entry(form: str, text: str, *facts: str) -> str:
    """Write one entry in two columns; a long form has the first line for itself."""
    told = "; ".join(unbroken(fact) for fact in facts if fact)
    lines = wrapped(f"{text} ({told})" if told else text, width=WIDTH - _TEXT_COLUMN)
    indented = [f"{'':{_TEXT_COLUMN}}{line}" for line in lines]
    if len(form) + 4 <= _TEXT_COLUMN:
        indented[0] = f"  {form:<{_TEXT_COLUMN - 2}}{lines[0]}"
    else:
        indented.insert(0, f"  {form}")
    return "\n".join(indented) + "\n"
