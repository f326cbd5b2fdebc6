"""The command line: which command, and which settings with which values.

A flag is --name, with dashes or underscores, never abbreviated; a switch is --flag, --flag
true|false or --no_flag; if a flag is given twice, the last one wins, so that a command can be
extended by hand. WHY not argparse: it stops at the first mistake, while we list all of them, those
in the file included; and it reads -1e-3 as a flag.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.commands import COMMANDS, HELP, TRAIN, VERSION, WITH_PROGRAM
from hardened_ddp.settings.document import Misfit
from hardened_ddp.settings.schema import COMMAND_LINE, SETTINGS, Layer, fit, from_text, needs
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import advice, as_word, nearest, shown, url_problem

NO_CONFIG = "no_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for. For train, layers.resolve reports its problems."""

    command: str = TRAIN  # train, help, version, or a key of COMMANDS

    # Options of a command of COMMANDS; for help the topic: train, or a key of COMMANDS.
    options: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()  # the words after "--", for a command that runs another program
    settings: Layer = field(default_factory=Layer)
    config_file: str = ""
    # config.yaml beside the script, which is read without being named; empty: not read.
    edited_file: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flag:
    given: str  # as typed, without its value; empty for the words before the first flag
    words: list[str]  # what follows: the text after =, then the words up to the next flag

    @property
    def name(self) -> str:
        return self.given.removeprefix("--").replace("-", "_")


def parse(argv: Sequence[str], *, edited_file: str = "") -> Request:
    """Read the arguments behind the script's name. Rank-local.

    edited_file: see Request; --no_config leaves it out. Raises ConfigError for an unknown command
    and for wrong options of a command.
    """
    is_named = bool(argv) and not argv[0].startswith("-")
    command = argv[0] if is_named else TRAIN
    program: tuple[str, ...] = ()
    if command in COMMANDS and COMMANDS[command].takes_program and "--" in argv:
        end = argv.index("--")
        argv, program = argv[:end], tuple(argv[end + 1 :])
        if not program and COMMANDS[command].takes_settings:
            raise _command_error(["--: no command stands behind it"], command)
    flags = _split(argv[1:] if is_named else argv)
    if command not in (TRAIN, HELP, *COMMANDS):
        near = nearest(command, (TRAIN, HELP, *COMMANDS))
        known = f"did you mean {near}?" if near else f"known: {', '.join((TRAIN, *COMMANDS))}"
        raise _command_error([f"{shown(command)}: no such command; {known}"])
    if any(flag.given == "--version" for flag in flags):
        return Request(command=VERSION)
    if command == HELP or any(flag.given in ("-h", "--help") for flag in flags):
        words = [word for flag in flags for word in flag.words] if command == HELP else [command]
        topic = words[0] if words and words[0] in COMMANDS else TRAIN
        return Request(command=HELP, options={"topic": topic})
    if command == TRAIN:
        return _train_request(flags, edited_file)
    if COMMANDS[command].takes_settings and not program:
        return _continuing_request(command, flags, edited_file)
    options = _read_options(command, flags, has_program=bool(program))
    return Request(command=command, options=options, program=program)


def _split(argv: Sequence[str]) -> list[_Flag]:
    """Group words behind the flag that they follow."""
    flags: list[_Flag] = []
    for word in argv:
        if _is_flag(word):
            given, has_value, value = word.partition("=")
            flags.append(_Flag(given=given, words=[value] if has_value else []))
        elif flags:
            flags[-1].words.append(word)
        else:
            flags.append(_Flag(given="", words=[word]))
    return flags


def _is_flag(word: str) -> bool:
    """Tell a flag from a value such as -1, -1e-3, -.5, -inf."""
    is_number = word.lower() in ("-inf", "-nan")
    return word.startswith("--") or (word[:1] == "-" and word[1:2].isalpha() and not is_number)


def _train_request(flags: Sequence[_Flag], edited_file: str) -> Request:
    """Read settings and collect problems; those in the file are reported with them."""
    settings, config_file = Layer(), ""
    for flag in flags:
        name = _setting_name(flag.name)
        try:
            if flag.name == "config":
                if problem := url_problem(file := _only_word(flag)):
                    raise Misfit(problem)
                config_file = file
            elif flag.name == NO_CONFIG and not flag.words:
                edited_file = ""
            elif name:
                settings.values[name] = _read_flag(flag, name)
            else:
                settings.problems.append(_unknown(flag))
        except Misfit as misfit:
            settings.problems.append(f"--{flag.name}: {misfit}")
            settings.bad_names.add(name)
    settings.sources |= dict.fromkeys(settings.values, COMMAND_LINE)
    return Request(settings=settings, config_file=config_file, edited_file=edited_file)


def _continuing_request(command: str, flags: Sequence[_Flag], edited_file: str) -> Request:
    """Read a command that takes settings, for the RUN that it names if any. Raises ConfigError."""
    own = {option.name for option in COMMANDS[command].options if not option.is_word}
    options = _read_options(command, [f for f in flags if not f.given or f.name in own])
    its_own = [flag for flag in flags if flag.given and flag.name not in own]
    request = _train_request(its_own, edited_file)
    foreign = [each.name for each in COMMANDS[command].options if each.needs == WITH_PROGRAM]
    options = {name: value for name, value in options.items() if name not in foreign}
    if "run" in options:
        request.settings.values["resume"] = options["run"]
        request.settings.sources["resume"] = COMMAND_LINE
    return replace(request, command=command, options=options)


def _setting_name(flag_name: str) -> str:
    """Give the setting that --name or --no_name sets; empty if there is none."""
    if flag_name in SETTINGS:
        return flag_name
    switch = flag_name.removeprefix("no_")
    return switch if switch in SETTINGS and SETTINGS[switch].is_switch else ""


def _read_flag(flag: _Flag, name: str) -> Any:  # Any: the type of the setting
    """Give the value that a flag sets. Raises Misfit."""
    setting = SETTINGS[name]
    if flag.name != name:
        if flag.words:
            raise Misfit(f"found {shown(flag.words[0])}, needs no value: it turns {name} off")
        return fit(setting, False)
    if setting.is_switch and not flag.words:
        return fit(setting, True)
    return from_text(setting, _only_word(flag))


def _only_word(flag: _Flag) -> str:
    """Give the one value of a flag. Raises Misfit if there is none, or more than one."""
    if not flag.words:
        setting = SETTINGS.get(flag.name)
        raise Misfit("has no value, needs " + (needs(setting) if setting else "a file"))
    if len(flag.words) > 1:
        extra = shown(" ".join(flag.words[1:]))
        raise Misfit(f"found {extra} after its value {shown(flag.words[0])}, needs one value")
    return flag.words[0]


def _unknown(flag: _Flag) -> str:
    if not flag.given:
        return f"{shown(flag.words[0])}: unexpected; a setting is written --name value"
    known = [*SETTINGS, "config", NO_CONFIG]
    meant = advice(flag.name.lstrip("_"), known, prefix="--")
    return f"{as_word(flag.given)}: no such setting; {meant}"


def _read_options(
    command: str, flags: Sequence[_Flag], *, has_program: bool = False
) -> dict[str, str]:
    """Read the options of a command of COMMANDS. Raises ConfigError."""
    options = {option.name: option for option in COMMANDS[command].options}
    by_flag = [option.name for option in options.values() if not option.is_word]
    by_place = [option.name for option in options.values() if option.is_word]
    known = f"known: {', '.join(f'--{name}' for name in by_flag)}" if by_flag else "it takes none"
    values: dict[str, str] = {}
    problems: list[str] = []
    words: list[str] = []
    for flag in flags:
        if not flag.given:
            words += flag.words
        elif flag.name not in by_flag:
            problems.append(f"{as_word(flag.given)}: no such option of {command}; {known}")
        elif options[flag.name].is_switch:
            values[flag.name] = "true"
            words += flag.words
        elif not flag.words or not flag.words[0]:
            problems.append(f"{as_word(flag.given)}: has no value, needs {options[flag.name].text}")
        else:
            earlier = values.get(flag.name, "") if options[flag.name].is_repeated else ""
            values[flag.name] = "\n".join(filter(None, [earlier, flag.words[0]]))
            words += flag.words[1:]
    if by_place and options[by_place[-1]].is_repeated and len(words) > len(by_place):
        last = len(by_place) - 1
        words = [*words[:last], "\n".join(words[last:])]
    values |= dict(zip(by_place, words, strict=False))
    problems += [f"{shown(word)}: unexpected behind {command}" for word in words[len(by_place) :]]
    given = {"", *(f"--{name}" for name in values), WITH_PROGRAM if has_program else ""}
    alone = [name for name in values if options[name].needs not in given]
    problems += [f"--{name}: needs {options[name].needs}" for name in alone]
    for name, option in options.items():
        value = values.setdefault(name, option.default)
        place = name.upper() if option.is_word else f"--{name}"
        if option.is_word and not value and not option.usage.startswith("["):
            problems.append(f"{place}: is missing: {option.text}")
        if option.is_place:
            found = filter(None, map(url_problem, value.split("\n")))
            problems += [f"{place}: {problem}" for problem in found]
        if option.choices and value not in option.choices:
            needed = ", ".join(option.choices)
            problems.append(f"{place}: found {shown(value)}, needs one of {needed}")
    if problems:
        raise _command_error(problems, command)
    return values


def _command_error(problems: Sequence[str], *command: str) -> ConfigError:
    told = "\n  ".join(["the command line can't be used", *problems])
    return ConfigError(told, fix=own_command(*command, "--help"))
