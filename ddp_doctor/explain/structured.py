"""Log lines that are JSON objects: the text that they hold, as lines.

Owns the names under which container runtimes, clouds and log libraries keep a message, an exception
and a rank; and torch elastic's error file.
Does not own: the prefixes of the text (prefixes.py).
"""

import json
from typing import Any

_MESSAGES = ("log", "message", "msg", "textPayload", "data", "text", "event")
_EXCEPTIONS = ("exc_info", "exception", "traceback", "stack_trace", "stacktrace", "exc_text")
_NESTED = ("jsonPayload", "record", "body")
_RANKS = ("rank", "global_rank")
_MAX_PREFIX = 120


def lines_of(raw: str) -> list[str]:
    """Give the lines of text in a line that is a JSON object, or the line itself."""
    at = raw.find('{"', 0, _MAX_PREFIX)
    if at < 0 or not raw.rstrip().endswith("}"):
        return [raw]
    try:
        entry: Any = json.loads(raw[at:])  # Any: whatever the program logged
    except (ValueError, RecursionError):
        return [raw]
    nested = [entry[name] for name in _NESTED if isinstance(entry.get(name), dict)]
    text = next((found for part in (entry, *nested) if (found := _text_of(part))), "")
    lines = [line for line in text.splitlines() if line.strip()]
    ranks = [part[name] for part in (entry, *nested) for name in _RANKS if _is_rank(part, name)]
    if ranks and "[rank" not in text:
        lines = [f"[rank{ranks[0]}]: {line}" for line in lines]
    return lines or [raw]


def _text_of(entry: dict[str, Any]) -> str:
    """Join the message and the exception of an entry."""
    message = next((entry[name] for name in _MESSAGES if isinstance(entry.get(name), str)), "")
    errors = [entry[name] for name in _EXCEPTIONS if isinstance(entry.get(name), str)]
    return "\n".join([message, *errors])


def _is_rank(entry: dict[str, Any], name: str) -> bool:
    return isinstance(entry.get(name), int) and not isinstance(entry[name], bool)


def stack_of_error_file(text: str) -> str:
    """Give the traceback in torch elastic's error.json; empty if it is another file."""
    try:
        entry: Any = json.loads(text)  # Any: whatever the file has
        return str(entry["message"]["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
