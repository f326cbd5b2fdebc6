"""Logs without a failure, with all that looks like one and is none: healthy.txt."""

import re
from pathlib import Path

_TEXT = Path(__file__).with_name("healthy.txt").read_text(encoding="utf-8")
_BARS = "".join(
    f"\rEpoch 1:  {i}%|###       | {i}/100 [00:0{i % 10}<00:20, 4.1it/s, loss=0.{i}]"
    for i in range(10, 99)
)
LOGS = {
    **dict(re.findall(r"^=== (.+)\n((?:(?!=== ).*\n)+)", _TEXT, re.MULTILINE)),
    "progress bars": _BARS + "\n",
    "bars at the end of the line": _BARS.replace("\r", "\n") + "\n",
    "error as a metric": "step 10 train_error 0.31 val_error=0.29 error: 0.30\n" * 50,
}
ENDED = {
    *("lightning", "trainer", "slurm", "deepspeed", "told to stop, and saved", "this suite"),
    *("a retried download", "exception that was ignored", "a logged exception", "status 0"),
    *("a restart that succeeded", "addresses of Docker Desktop, and training in Chinese"),
}
"""Those that say that the job ended as it should; the others only stop."""
