"""Events of a run, told to a command of the user: --on_event COMMAND.

It runs on rank 0, beside training, one event after the other, by a shell. What happened is JSON on
its stdin, and in HDDP_EVENT, HDDP_STATUS (the exit status, of an ending) and HDDP_RUN (the run
folder). It has LIMIT_S; a failure of it is a warning, and never ends the run.
"""

import json
import logging
import os
import signal
import subprocess
import time
from functools import partial
from typing import Any

from hardened_ddp.errors import HardenedError, first_line
from hardened_ddp.ranks.launch import Launch, environment
from hardened_ddp.ranks.launchers_env import OF_LAUNCHERS
from hardened_ddp.reporting.ending import RUN
from hardened_ddp.reporting.sinks import ReportWriter

log = logging.getLogger(__name__)

LIMIT_S = 30.0
_MOST_TEXT = 200


class Events:
    """Tells a command what happens. Nothing here raises or waits, but for the end."""

    def __init__(self, command: str = "", launch: Launch | None = None) -> None:
        """command: empty for none. On ranks other than 0 nothing is told."""
        self._command = command if launch is None or launch.is_main else ""
        self._writer = ReportWriter(flush=lambda: True, name="on-event")
        self._has_ended = False

    def close(self, error: BaseException | None = None) -> None:
        """Tell of an error that ends the run, and wait for the command."""
        if error is not None:
            status = error.exit_status if isinstance(error, HardenedError) else 1
            self.tell("failed", status=status, error=f"{type(error).__name__}: {error}")
        if not self._writer.close("the command of on_event"):
            log.warning("the command of on_event is left behind: events may be missing")

    def tell(self, event: str, *, status: int | None = None, **facts: Any) -> None:  # Any: JSON
        """Run the command for an event. status: that of the run, if it ends by it. Rank-local."""
        if not self._command or self._has_ended:
            return
        self._has_ended = status is not None
        # WHY not the launcher's: a command that runs hardened-ddp would take itself for this rank
        env = {n: v for n, v in environment().items() if not n.startswith(OF_LAUNCHERS)}
        env["HDDP_EVENT"] = event
        env["HDDP_STATUS"] = "" if status is None else str(status)
        known = {"event": event, "time": round(time.time(), 3), "run": env.get(RUN, "")}
        known |= {} if status is None else {"status": status}
        text = json.dumps(known | facts, default=str)
        if not self._writer.do(partial(self._run, event, text, env)):
            log.warning("on_event: %s is not told, because too many events wait", event)

    def _run(self, event: str, text: str, env: dict[str, str]) -> None:
        # WHY a session: Ctrl-C is for the run, and what the command starts ends with it
        with subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        ) as process:
            try:
                _, said = process.communicate(text, timeout=LIMIT_S)
                why = f"status {process.returncode}: {said.strip()[-_MOST_TEXT:]}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                why = f"not over after {LIMIT_S:.0f} s: it was killed"
            except OSError as error:
                why = first_line(error)
            if process.wait() != 0:
                log.warning("the command of on_event failed for %s: %s", event, why)
