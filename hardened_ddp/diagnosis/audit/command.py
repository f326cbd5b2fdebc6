"""The command audit: read a source, or run a program under observation, and report.

Owns its output and its exit status: 0 healthy, 1 mistakes found, 2 could not observe.
Does not own: what a mistake is (source_rules.py).
"""

from pathlib import Path
from typing import TextIO

from hardened_ddp.diagnosis.audit.script import Script
from hardened_ddp.diagnosis.audit.source_rules import read_script
from hardened_ddp.diagnosis.audit.verdict import Verdict, as_json, as_text
from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import Request

HEALTHY, MISTAKES, UNSEEN = 0, 1, 2
_USAGE = "python ddp_training.py audit --source train.py"


def run_audit(request: Request, *, output: TextIO) -> int:
    """Print the report and return the exit status. Raises ConfigError for wrong options."""
    source = request.options["source"]
    if not source:
        raise ConfigError("audit has nothing to look at: --source FILE is missing", fix=_USAGE)
    verdicts = read_script(Script(Path(source)))
    return _report(verdicts, request, output, seen=f"{source} was read, not run")


def _report(verdicts: list[Verdict], request: Request, output: TextIO, *, seen: str) -> int:
    num_mistakes = sum(verdict.is_mistake for verdict in verdicts)
    if request.options["json"]:
        print(as_json(verdicts), file=output)
    else:
        found = f"{num_mistakes or 'no'} mistake{'' if num_mistakes == 1 else 's'} found"
        print("\n".join([*as_text(verdicts), f"audit: {found}; {seen}"]), file=output)
    return MISTAKES if num_mistakes else HEALTHY
