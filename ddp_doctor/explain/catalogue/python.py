"""Causes by the type of a Python exception, for messages that no other entry knows.

They have no phrases: an exception's own type chooses one.
"""

from ddp_doctor.explain.events import Cause, Raised


def _cause(name: str, title: str, why: str = "") -> Cause:
    return Cause(
        code=f"python-{name.lower()}",
        title=title,
        is_generic=True,
        why=why or title,
        fix="Read the line that is named, with the values of this rank's batch.",
        confirm="Run that line in one process with the same input.",
    )


_TEXTS = {
    "KeyError": "a name that the code expects is not in a dictionary",
    "IndexError": "a list or tensor is shorter than the code expects",
    "ValueError": "a function got a value that it refuses",
    "TypeError": "an argument has the wrong type, or their number is wrong",
    "AttributeError": "an object is None, or of another class or version",
    "NameError": "a variable or an import is missing on this path",
    "UnboundLocalError": "a variable has a value on another path only",
    "AssertionError": "the program checked something that was not so",
    "ZeroDivisionError": "a count or a length is 0 on this rank",
    "NotImplementedError": "the class or the device does not have this operation",
    "RecursionError": "a function calls itself without an end",
    "UnicodeDecodeError": "a file is binary, or not in the expected encoding",
    "JSONDecodeError": "a file is not JSON: empty, cut off, or of another kind",
    "StopIteration": "this rank had fewer batches than the loop took",
    "SyntaxError": "a typing mistake, or a newer Python's syntax",
    "IndentationError": "the indentation of the code is not consistent",
    "OverflowError": "a number does not fit its type",
    "FloatingPointError": "an overflow, a division by 0 or NaN",
    "EOFError": "a file or an input is cut off, or nobody answers a prompt",
    "PermissionError": "a path may not be used: rights, or a read-only mount",
    "NotADirectoryError": "a file stands where a folder should be",
    "IsADirectoryError": "a folder was given where a file should be",
    "TimeoutError": "a service or storage is slow or gone",
}
BUILT_IN = {name: _cause(name, text) for name, text in _TEXTS.items()}
RAISED = _cause(
    "raised",
    "the program raised an exception of its own",
    "Code of the program, not of torch, raised it",
)
OPERATION = _cause(
    "operation",
    "an operation of torch or of a native library refused its input",
    "Its message says which value, shape, type or device does not fit",
)
CAUSES = (*BUILT_IN.values(), RAISED, OPERATION)


def cause_of_type(raised: Raised) -> Cause | None:
    """Give the general entry for an exception that no phrase knows."""
    if raised.name in BUILT_IN:
        return BUILT_IN[raised.name]
    last = raised.frames[-1] if raised.frames else None
    if last is None or last.is_library:
        return None
    return RAISED if raised.has_raise else OPERATION
