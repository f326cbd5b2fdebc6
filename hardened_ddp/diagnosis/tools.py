"""The commands that train nothing: each is imported only when it is asked for.

Owns the choice by name. WHY not imported above: explain and watch answer in a fraction of a second,
and no command waits for what only another one needs.
"""

import os
import sys
from pathlib import Path

from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.sinks import printed
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.typed_command import own_command


def run_tool(request: Request) -> int:
    """Run the command of request; return the exit status. Raises HardenedError."""
    output = printed(sys.stdout)  # watch draws, and escapes what it draws
    match request.command:
        case "doctor":
            from hardened_ddp.diagnosis.doctor import run_doctor

            return run_doctor(output=output, env=environment())
        case "explain":
            from hardened_ddp.diagnosis.explain.command import run_explain
            from hardened_ddp.diagnosis.explain.commands import Commands

            return run_explain(
                [_named(log) for log in request.options["log"].splitlines()],
                wants_json=bool(request.options["json"]),
                output=output,
                progress=sys.stderr,
                commands=Commands(own=own_command, resume=_resume),
            )
        case "watch":
            from hardened_ddp.diagnosis.watch import run_watch

            return run_watch(request.options, output=sys.stdout)
        case "report":
            from hardened_ddp.diagnosis.report import run_report

            return run_report(request.options, output=output)
        case "verify-ledger":
            from hardened_ddp.diagnosis.ledger_check import check_ledger
            from hardened_ddp.diagnosis.run_files import find_run_folder
            from hardened_ddp.settings.config import Config

            run = find_run_folder(request.options["run"], Config().run.output_dir)
            return check_ledger(run, output=output)
        case "audit":
            from hardened_ddp.diagnosis.audit.command import run_audit

            return run_audit(request, output=output, env=environment())
    raise ValueError(f"{request.command} is no command of run_tool")


def _named(log: str) -> str:
    """Give the path of a log; newest, if no file is called so, is the newest run."""
    if log != "newest" or os.path.lexists(log):
        return log
    from hardened_ddp.diagnosis.run_files import find_run_folder

    return str(find_run_folder("", "runs"))


def _resume(run: Path, num_ranks: int) -> str:
    """Type the command that continues a run as it was started."""
    from hardened_ddp.diagnosis.run_files import read_run, resume_command

    return resume_command(read_run(run).ranks, run)
