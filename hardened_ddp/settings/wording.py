"""How messages name a value, and the name that was probably meant."""

import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

LONGEST_VALUE = 60
# The control characters, and those that change the direction of a text or end its line.
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)
# Also behind the word that says what a place holds: text:s3://bucket/*.txt
_URL = re.compile(r"\s*(\w+:)?(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_NO_BREAK = "\0"  # stands for a space that stays inside its line
# What other programs call a setting of ours, where the name is too different to guess it.
_TOLD_ELSEWHERE = {
    "learning_rate": ("lr",),
    "weight_decay": ("wd",),
    "batch_size": ("bs", "bsz", "batch", "per_device_train_batch_size"),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "num_workers": ("workers",),
    "accumulation_steps": ("grad_accum", "gradient_accumulation_steps"),
    "clip_grad_norm": ("max_grad_norm", "max_norm"),
    "lr_schedule": ("scheduler",),
    "warmup_steps": ("warmup",),
    "epochs": ("num_epochs", "num_train_epochs"),
    "model": ("arch",),
    "amp": ("precision", "mixed_precision", "fp16", "bf16"),
    "cpu_only": ("device", "cpu", "no_cuda"),
    "single_gpu": ("gpu",),
    "run_name": ("name",),
    "resume": ("checkpoint", "resume_from_checkpoint"),
    "checkpoint_every_steps": ("save_every", "save_steps"),
    "log_interval": ("log_every", "logging_steps"),
    "timeout_s": ("timeout",),
}
OTHER_NAMES = {other: name for name, others in _TOLD_ELSEWHERE.items() for other in others}
TORCHRUN_SWITCHES = ("standalone", "virtual_local_rank")
# The options of torchrun's launcher that the command hardened-ddp passes on to it.
TORCHRUN_OPTIONS = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "max_restarts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "monitor_interval", "start_method"),
    *("event_log_handler", "role", "log_dir", "redirects", "tee", "local_ranks_filter"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "local_addr", "logs_specs"),
    *("numa_binding", "signals_to_handle", "shutdown_timeout", "log_line_prefix_template"),
)


def shown(value: object) -> str:
    """Write a value as it was given, cut short if it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def printable(text: str) -> str:
    """Escape what would steer a terminal or turn the text around; line breaks and tabs stay.

    WHY: files, names and exceptions of others are shown. WHY as JSON does it: JSON stays valid.
    """
    text = text.replace("\r\n", "\n")
    return text if text.isprintable() else _CONTROLS.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def url_problem(value: str) -> str:
    """Say what to write instead of a URL where a folder or a file is meant; empty if it is none."""
    if (match := _URL.match(value)) is None:
        return ""
    return (
        f"found {shown(value)}, needs a folder or file of this machine: {match['scheme']}:// can't "
        "be read or written here; copy first what is to be read, write to a folder here, and let "
        "--mirror copy it there"
    )


def as_word(name: str) -> str:
    """Write a key or a flag as it was typed, unless that would garble the message."""
    return name if name.isprintable() and len(name) <= LONGEST_VALUE else shown(name)


def as_typed(path: Path) -> str:
    """Write a path as one types it here: relative if it is below the working folder."""
    try:
        full = os.path.abspath(path)
        short = os.path.relpath(full)
    except OSError:  # the working folder was removed
        return str(path)
    return full if short.startswith(os.pardir) else short


def unbroken(text: str) -> str:
    """Mark text so that wrapped() keeps it in one line."""
    return text.replace(" ", _NO_BREAK)


def wrapped(text: str, *, width: int) -> list[str]:
    """Break text into lines, but not inside what unbroken() marked."""
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(text, width)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Give the known name that was probably meant; empty if none is near."""
    import difflib  # WHY here: only a mistake needs it, and --help need not wait for it

    known = list(known)
    meant = OTHER_NAMES.get(name.lower())
    if meant is not None and meant in known:
        return meant
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return near[0] if near else ""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 8) -> str:
    """Write names in a row, so many of them: a, b and 3 more."""
    every = list(map(str, names))
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest


def advice(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Say what to write instead of a name that does not exist."""
    if name in (*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES):
        return "it belongs to torchrun: write it before ddp_training.py"
    if name == "local_rank":
        return "torch.distributed.launch passes it; start with torchrun instead"
    near = nearest(name, known)
    return f"did you mean {prefix}{near}?" if near else "--help lists all of them"
