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
        fix="Print the values in the named line; if a library raised it: does its version fit?",
    )


_NAMES = """
KeyError IndexError ValueError TypeError AttributeError NameError UnboundLocalError AssertionError
ZeroDivisionError NotImplementedError RecursionError UnicodeDecodeError JSONDecodeError EOFError
SyntaxError IndentationError OverflowError FloatingPointError PermissionError TimeoutError
NotADirectoryError IsADirectoryError StopIteration
"""
BUILT_IN = {name: _cause(name, f"the program raised {name}", "") for name in _NAMES.split()}
RAISED = _cause("raised", "the program raised an exception of its own", "Its own code raised it")
OPERATION = _cause(
    "operation",
    "an operation of torch or of a native library refused its input",
    "Its message says which value, shape, type or device does not fit",
)
CAUSES = (*BUILT_IN.values(), RAISED, OPERATION)


def cause_of_type(raised: Raised) -> Cause | None:
    """Give the general entry for an exception that no phrase knows."""
    if not raised.type:  # cut off
        return None
    if raised.name in BUILT_IN:
        return BUILT_IN[raised.name]
    last = raised.frames[-1] if raised.frames else None
    if last is None or last.is_library:
        return None
    return RAISED if raised.has_raise else OPERATION
