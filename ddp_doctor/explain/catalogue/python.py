"""Causes by the type of a Python exception, for messages that no other entry knows.

They have no phrases: an exception's own type chooses one.
"""

from ddp_doctor.explain.events import Cause, Raised


def _cause(name: str, title: str, why: str) -> Cause:
    return Cause(
        code=f"python-{name.lower()}",
        title=title,
        is_generic=True,
        why=why,
        fix="Read the line that is named, with the values of this rank's batch.",
        confirm="Run that line in one process with the same input.",
    )


_TEXTS = {
    "KeyError": ("a key is not in a dictionary", "A name that the code expects is not there"),
    "IndexError": ("an index is out of range", "A list or tensor is shorter than expected"),
    "ValueError": ("a value is not acceptable", "A function got a value that it refuses"),
    "TypeError": ("an argument has the wrong type or number", "A call does not fit the function"),
    "AttributeError": (
        "an attribute does not exist",
        "An object is None, or of another class or version",
    ),
    "NameError": ("a name is not defined", "A variable or import is missing on this path"),
    "UnboundLocalError": ("a variable has no value yet", "It is set on another path only"),
    "AssertionError": ("an assertion failed", "The program checked something that was not so"),
    "ZeroDivisionError": ("a division by zero", "A count or a length is 0 on this rank"),
    "NotImplementedError": (
        "an operation is not implemented",
        "The class or device does not have it",
    ),
    "RecursionError": ("the recursion is too deep", "A function calls itself without an end"),
    "UnicodeDecodeError": (
        "a file is not text in the expected encoding",
        "It is binary, or not UTF-8",
    ),
    "JSONDecodeError": ("a file is not JSON", "It is empty, cut off, or of another kind"),
    "StopIteration": (
        "an iterator ended too early",
        "This rank had fewer batches than the loop took",
    ),
    "SyntaxError": ("the code can't be parsed", "A typing mistake, or a newer Python's syntax"),
    "IndentationError": ("the code can't be parsed", "The indentation is not consistent"),
    "OverflowError": ("a number is too large", "It does not fit its type"),
    "FloatingPointError": ("a number is not finite", "An overflow, a division by 0 or NaN"),
    "EOFError": ("a file or an input ended too early", "It is cut off, or nobody answers a prompt"),
    "PermissionError": ("a path may not be used", "Rights, or a read-only mount"),
    "NotADirectoryError": ("a path is not a folder", "A file stands where a folder should be"),
    "IsADirectoryError": ("a path is a folder", "A folder was given where a file should be"),
    "TimeoutError": ("something did not answer in time", "A service or storage is slow or gone"),
}
BUILT_IN = {name: _cause(name, *texts) for name, texts in _TEXTS.items()}
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
