"""The command line of explain, audit and drill, without the trainer beside it."""

import os
import shlex
import sys

# WHY first: -m looks into the current folder first, and a program there may have a json.py
sys.path[:] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))] + [
    path for path in sys.path if os.path.abspath(path or ".") != os.getcwd()
]

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TextIO, cast  # noqa: E402

from ddp_doctor.terminal import DoctorError, PrintableOutput, printable  # noqa: E402

COMMAND = "ddp-doctor"  # of an installation
DRILL_OPTIONS = {
    "faults": "names of faults, with commas between; default: all of them",
    "step": "the step in which the fault comes; default: between two checkpoints",
    "rank": "the rank that has it; default 1",
    "again": "command that continues; default: the same one",
    "repeat": "how often each fault is given; default 1",
    "hang_after": "seconds without progress that count as a hang; default 120",
    "html": "file to write a page to",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a mistake of the user is one line and 2."""
    name = COMMAND if Path(sys.argv[0]).name == COMMAND else "python -m ddp_doctor"
    output = cast(TextIO, PrintableOutput(sys.stdout))
    try:
        asked = _parser(name).parse_args(argv)
        # WHY imported here: explain needs nothing of audit, and answers at once
        if asked.command == "explain":
            from ddp_doctor.explain.command import run_cause, run_explain
            from ddp_doctor.explain.report import Commands

            commands = Commands(own=partial(own_command, name))
            if asked.cause:
                return run_cause(asked.cause, output=output, commands=commands)
            return run_explain(asked.log, wants_json=asked.json, output=output, commands=commands)
        if asked.command == "drill":
            from ddp_doctor.drill.command import run_drill

            options = vars(asked) | {"also": "\n".join(asked.also), "usage": f"{name} drill --help"}
            return run_drill(options, asked.program, output=output, env=os.environ)
        from ddp_doctor.audit.command import run_audit

        options = vars(asked) | {"usage": f"{name} audit --help"}
        return run_audit(options, asked.program, output=output, env=os.environ)
    except DoctorError as error:
        print(printable(f"{name.split()[-1]}: error: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has gone, as in: ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not sent yet
        return 141  # what a shell gives for SIGPIPE
    except KeyboardInterrupt:
        return 130  # what a shell gives for Ctrl-C


def own_command(name: str, *arguments: str | Path) -> str:
    """Type a command: of this program by its name, else of the trainer."""
    is_own = arguments[:1] in (("explain",), ("audit",))
    words = shlex.split(name) if is_own else ["python", "ddp_training.py"]
    return shlex.join([*words, *map(str, arguments)])


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="which rank failed, why, and how to fix it")
    explain.add_argument("log", nargs="*", help="log files, .gz, folders of logs, or - for stdin")
    explain.add_argument("--cause", default="", metavar="CODE", help="print one cause in full")
    explain.add_argument("--json", action="store_true", help="write JSON instead of text")
    audit = commands.add_parser("audit", help="what is silently wrong in a program or a source")
    audit.add_argument("--steps", default="50", help="optimizer steps to observe per rank")
    audit.add_argument("--hang_after", default="20", help="seconds without progress: a hang")
    audit.add_argument("--source", default="", help="Python file to read; alone, nothing is run")
    drill = commands.add_parser("drill", help="what faults cost a program: steps, samples, weights")
    for option, text in DRILL_OPTIONS.items():
        drill.add_argument(f"--{option}", default="", help=text)
    drill.add_argument("--also", action="append", default=[], help="another folder it writes to")
    drill.add_argument("--copy", action="store_true", help="copy the folder: no overlay mount")
    for command, verb in ((audit, "observe"), (drill, "drill")):
        command.add_argument("--json", action="store_true", help="write JSON instead of text")
        command.add_argument("program", nargs="*", help=f"the command to {verb}, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
