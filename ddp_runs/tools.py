"""The commands that train nothing: each is imported only when it is asked for.

Owns the choice by name. WHY not imported above: explain and watch answer in a fraction of a second,
and no command waits for what only another one needs.
"""

import os
import sys
from pathlib import Path
from typing import TextIO

from ddp_doctor.terminal import UnreadableLogError as UnreadableInput
from ddp_doctor.terminal import UsageError
from hardened_ddp.errors import ConfigError, MissingPackageError, UnreadableLogError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.sinks import printed
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.earlier_run import find_folder
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.typed_command import own_command, pip_command


def run_tool(request: Request) -> int:
    """Run the command of request; return the exit status. Raises HardenedError."""
    try:
        return _run(request)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("rich", "plotly"):  # which only these commands need
            raise
        text = f"the command {request.command} needs {name}, which is not installed"
        # WHY not the whole file: it may be another torch that is installed
        raise MissingPackageError(text, fix=pip_command("requirements.txt", name)) from error
    except UnreadableInput as error:  # ddp_doctor knows nothing of our codes
        raise UnreadableLogError(error.message, fix=error.fix) from error
    except UsageError as error:
        raise ConfigError(error.message, fix=error.fix) from error


def _run(request: Request) -> int:
    output = printed(sys.stdout)  # watch draws, and escapes what it draws
    match request.command:
        case "doctor" if request.options["cluster"]:
            from ddp_runs.cluster import run_cluster

            return run_cluster(request.options, output=output, env=environment())
        case "doctor":
            from ddp_runs.doctor import run_doctor

            return run_doctor(output=output, env=environment())
        case "version":
            from ddp_runs.software import versions

            output.write(versions())
            return 0
        case "explain":
            return _explain(request, output)
        case "watch":
            from ddp_runs.watch import run_watch

            return run_watch(request.options, output=sys.stdout)
        case "report":
            from ddp_runs.report import run_report

            return run_report(request.options, output=output)
        case "diff":
            from ddp_runs.replay import run_diff

            return run_diff(request.options, output=output)
        case "replay" | "bisect":
            from ddp_runs.replay import run_bisect, run_replay

            command = run_replay if request.command == "replay" else run_bisect
            return command(request.options, _settings_of(request), output=output)
        case "verify-ledger":
            from ddp_runs.ledger_check import check_ledger

            return check_ledger(find_folder(request.options["run"], Path("runs")), output=output)
        case "audit":
            from ddp_doctor.audit.command import run_audit

            options = {**request.options, "usage": own_command("audit", "--help")}
            return run_audit(options, request.program, output=output, env=environment())
        case "drill":
            return _drill_program(request, output)
    raise ValueError(f"{request.command} is no command of run_tool")


def _explain(request: Request, output: TextIO) -> int:
    from ddp_doctor.explain.command import run_cause, run_explain
    from ddp_doctor.explain.report import Commands

    commands = Commands(own=own_command, resume=_resume)
    if code := request.options["cause"]:
        return run_cause(code, output=output, commands=commands)
    # newest, if no file is called so, is the newest run
    logs = [
        str(find_folder("", Path("runs"))) if log == "newest" and not os.path.lexists(log) else log
        for log in request.options["log"].splitlines()
    ]
    wants_json = bool(request.options["json"])
    return run_explain(logs, wants_json=wants_json, output=output, commands=commands)


def _drill_program(request: Request, output: TextIO) -> int:
    from ddp_doctor.drill.command import run_drill

    options = dict(request.options) | {"usage": own_command("drill", "--help")}
    if options["name"] or options["table"] or options["ranks"] != "2":
        text = "drill -- COMMAND takes no NAME, no --ranks and no --table: see --faults"
        raise UsageError(text, fix=options["usage"])
    return run_drill(options, request.program, output=output, env=environment())


def _settings_of(request: Request) -> list[str]:
    """Write the settings of a request as flags again, for a trainer. Raises ConfigError."""
    problems = list(request.settings.problems)
    for name in sorted({"output_dir", "run_name"} & request.settings.values.keys()):
        problems.append(f"--{name}: it runs in a folder of its own, within that of the run")
    if problems:
        raise ConfigError("; ".join(problems), fix=own_command(request.command, "--help"))
    given = {name: value for name, value in request.settings.values.items() if name != "resume"}
    return [as_flag(f"--{name}", value) for name, value in given.items()]


def as_flag(name: str, value: object) -> str:
    """Write a setting as a flag of the trainer, which takes text as it is."""
    return f"{name}={value if isinstance(value, str) else yaml_word(value)}"


def _resume(run: Path, num_ranks: int) -> str:
    from ddp_runs.run_files import read_run, resume_command

    return resume_command(read_run(run))
