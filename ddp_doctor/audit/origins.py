"""Finds in the program's files where a mistake is written that was seen at another line.

Only what was measured is looked for. Empty: it is not found, and the line where it was seen counts.
"""

import ast
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from ddp_doctor.audit.source_rules import assignments, called, last_name, names_in

_DRAWS = frozenset(("randn", "randn_like", "rand", "rand_like", "randint", "randint_like")).union(
    ("normal_", "uniform_", "bernoulli", "bernoulli_", "normal", "random_", "exponential_")
)
_SHUFFLE = re.compile(r"((np\.|numpy\.)?random\.(shuffle|sample|permutation)|torch\.randperm)\(")
_ONE = ("1", "()", "[]", "(1,)", "[1]")
"""Sizes of a decision, which ranks may share."""

_DROPS = ("unique", "dedup", "drop_dup", "remainder", "truncat")


def _lines_of(place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def is_between(place: str, first: str, last: str) -> bool:
    """Whether a line lies between two others of its file."""
    (file, number), (file_1, begin), (file_2, end) = map(_lines_of, (place, first, last))
    return file == file_1 == file_2 and begin <= number <= end


def loop_line(lines: Sequence[str]) -> str:
    """Give the head of the loop around a loop over batches. lines: its call stack, from inside."""
    for place in lines:
        if around := [loop.lineno for loop in _loops_around(place)]:
            return f"{_lines_of(place)[0]}:{max(around)}"
    return ""


def leaving_line(lines: Sequence[str]) -> str:
    """Give the only way out of the loops around a call stack, or else the only `continue`."""
    loops = [(_lines_of(place)[0], loop) for place in lines for loop in _loops_around(place)]
    nodes = [(f"{file}:{getattr(n, 'lineno', 0)}", n) for file, at in loops for n in _own(at.body)]
    breaks = {line for line, node in nodes if isinstance(node, ast.Break | ast.Return)}
    found = breaks or {line for line, node in nodes if isinstance(node, ast.Continue)}
    return found.pop() if len(found) == 1 else ""


def _own(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Walk a loop's body, but for loops and functions in it: their ends are not the loop's."""
    for node in statements:
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own(list(ast.iter_child_nodes(node)))


def epoch_line(place: str) -> str:
    """Give the call of set_epoch() in the loops around a line."""
    loops = _loops_around(place)
    calls = _lines(_lines_of(place)[0], lambda n: called(n) == "set_epoch")
    return next((c for c in calls for loop in loops if has_line(loop.body, _lines_of(c)[1])), "")


def _loops_around(place: str) -> list[ast.For | ast.While]:
    file, number = _lines_of(place)
    loops = [node for node in nodes_of(file) if isinstance(node, ast.For | ast.While)]
    return [loop for loop in loops if has_line(loop.body, number)]


def made_line(place: str, keyword: str = "") -> str:
    """Give the assignment to the model whose parameters() a call at a line gets, or its keyword."""
    file = _lines_of(place)[0]
    given: list[ast.expr] = []
    for node in _calls_at(place):
        given += [a.value for a in node.keywords if a.arg == keyword]
        if not keyword and called(node) == "parameters" and isinstance(node.func, ast.Attribute):
            given.append(node.func.value)
    names = {value.id for value in given if isinstance(value, ast.Name)}
    made = (
        f"{file}:{target.lineno}"
        for targets, _ in assignments(nodes_of(file))
        for target in ast.walk(targets)
        if isinstance(target, ast.Name) and target.id in names
    )
    before = [line for line in made if is_between(line, f"{file}:0", place)]
    return max(before, key=_lines_of, default="")


def _calls_at(place: str) -> list[ast.Call]:
    file, number = _lines_of(place)
    return [n for n in nodes_of(file) if isinstance(n, ast.Call) and has_line([n], number)]


def change_line(first: str, last: str) -> str:
    """Give the first line between two others that changes weights in place."""
    found = re.compile(r"_$|apply|init|reset|load")
    calls = _lines(_lines_of(first)[0], lambda n: found.search(called(n)) is not None)
    return next((line for line in calls if line != first and is_between(line, first, last)), "")


def seed_line(lines: Sequence[str]) -> str:
    """Give the outermost line of a stack that speaks of a seed: there its value is chosen."""
    spoken = [place for place in lines if "seed" in linecache.getline(*_lines_of(place)).lower()]
    return (spoken or list(lines) or [""])[-1]


def _lines(file: str, is_it: Callable[[ast.AST], bool]) -> list[str]:
    nodes: Iterator[Any] = filter(is_it, nodes_of(file))  # Any: nodes that have a line
    return [f"{file}:{node.lineno}" for node in nodes]


def _sets(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Assign) and any(last_name(t) == attribute for t in node.targets)


def set_line(file: str, attribute: str) -> str:
    """Give the first line that sets an attribute."""
    return next(iter(_lines(file, lambda n: _sets(n, attribute))), "")


def unfreezing_line(file: str) -> str:
    """Give the last line that may set requires_grad to True."""

    def unfreezes(node: ast.AST) -> bool:
        is_set = _sets(node, "requires_grad") or called(node) == "requires_grad_"
        return is_set and not ast.unparse(node).rstrip(")").endswith("False")

    return next(reversed(_lines(file, unfreezes)), "")


def unwrapping_line(files: Sequence[str]) -> str:
    """Give the assignment that puts a model's module in its place, or the only one of a module."""
    found = [
        (last_name(target) in names_in(value), f"{file}:{target.lineno}")
        for file in files
        for target, value in assignments(nodes_of(file))
        if re.search(r"\.module\b(?!\.)|'module'|unwrap_model", ast.unparse(value))
    ]
    lines = [line for is_same, line in found if is_same] or [line for _, line in found]
    return lines[0] if len(lines) == 1 else ""


def own_loss_line(place: str) -> str:
    """Give the line of a trainer's compute_loss() that makes the loss, in the file of a line."""
    file = _lines_of(place)[0]
    own = [n for n in nodes_of(file) if getattr(n, "name", "") == "compute_loss"]
    made = [pair for function in own for pair in assignments(ast.walk(function))]
    lines = [target.lineno for target, _ in made if "loss" in last_name(target)]
    return f"{file}:{max(lines)}" if lines else ""


def call_line(files: Iterable[str], names: Set[str]) -> str:
    """Give the first call that is written as one of these names, in the first file that has one."""

    def is_it(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and bool(names & {called(node), ast.unparse(node.func)})

    return next((line for file in files for line in _lines(file, is_it)), "")


def noise_line(file: str) -> str:
    """Give the line that draws random numbers in training: with torch's own generator."""
    for function in nodes_of(file):
        name = getattr(function, "name", "")
        if not isinstance(function, ast.FunctionDef) or name.startswith("__") or "data" in name:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or last_name(node.func) not in _DRAWS:
                continue
            is_own = any(k.arg == "generator" for k in node.keywords)
            is_own |= bool(node.args) and ast.unparse(node.args[-1]) in _ONE
            if not is_own and not ast.unparse(node.func).startswith(("np.", "numpy.", "random.")):
                return f"{file}:{node.lineno}"
    return ""


def choice_line(place: str) -> str:
    """Give the line of a sampler's __iter__ that shuffles without a seed, or else gives samples."""
    file, number = _lines_of(place)
    own = (n for n in nodes_of(file) if isinstance(n, ast.FunctionDef) and n.lineno == number)
    nodes: list[Any] = [n for function in own for n in ast.walk(function)]
    gives = [n.lineno for n in nodes if isinstance(n, ast.Return | ast.Yield | ast.YieldFrom)]
    calls = [(n.lineno, ast.unparse(n)) for n in nodes if isinstance(n, ast.Call)]
    draws = [line for line, text in calls if _SHUFFLE.match(text) and "generator=" not in text]
    return f"{file}:{max(draws or gives)}" if draws or gives else ""


def forward_cut_line(file: str) -> str:
    """Give the line that cuts gradients off within a forward, if there is only one."""
    cuts = {
        node.lineno
        for function in nodes_of(file)
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in ("detach", "no_grad", "data")
    }
    return f"{file}:{cuts.pop()}" if len(cuts) == 1 else ""


def drops_padding(gathered: str, size: int) -> bool:
    """Whether what a line gathers seems to be cut to size, or put in by index: read generously."""
    file, number = _lines_of(gathered)
    around = [n for n in nodes_of(file) if isinstance(n, ast.FunctionDef) and has_line([n], number)]
    for node in nodes_of(file):
        is_cut = any(word in last_name(node).lower() for word in _DROPS)
        match node:
            case ast.Slice(lower=None, upper=ast.expr() as end):
                is_plain = isinstance(end, ast.Constant | ast.UnaryOp)
                is_before = end.lineno < number and has_line(around, end.lineno)
                is_cut = not is_before and (not is_plain or ast.unparse(end) == str(size))
            case ast.Subscript(ctx=ast.Store(), slice=ast.Name(id=name)) if node.lineno > number:
                is_cut = "epoch" not in name and "step" not in name
        if is_cut:
            return True
    return False


def is_planned_by_loader(place: str) -> bool:
    """Whether the calls at a line, or what is assigned to the names in them, ask len(loader)."""
    nodes = nodes_of(_lines_of(place)[0])
    assigned = {last_name(target): ast.unparse(value) for target, value in assignments(nodes)}
    texts = list(map(ast.unparse, _calls_at(place)))
    for _ in range(2):
        texts += [assigned.get(name, "") for name in re.findall(r"\w+", " ".join(texts))]
    return re.search(r"len\(\w*(loader|dl)\w*\)", " ".join(texts)) is not None


def last_line(place: str) -> str:
    """Give the last line of the loop that begins at a line."""
    file, number = _lines_of(place)
    loops = (n for n in nodes_of(file) if isinstance(n, ast.For) and n.lineno == number)
    return next((f"{file}:{node.end_lineno}" for node in loops), place)


def scaling_line(near: str, words: Collection[str]) -> str:
    """Find the line that multiplies or divides by what has one of these words in its name.

    Without words: by anything but a plain number. near: where it takes effect; of several lines
    the last one before it counts.
    """
    file, number = _lines_of(near)
    nodes = nodes_of(file)
    scales = [target for target, value in assignments(nodes) if _has(value, words)]
    aliases = set().union(*map(names_in, scales))

    def is_it(factor: ast.expr) -> bool:
        is_named = not words or _has(factor, words) or bool(names_in(factor) & aliases)
        return is_named and not isinstance(factor, ast.Constant)

    operations: list[int] = []
    calls: list[int] = []
    for node in nodes:
        match node:
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
                sides, found = [left, right], operations
            case ast.AugAssign(op=ast.Mult() | ast.Div(), value=value):
                sides, found = [value], operations
            case ast.Call(func=ast.Attribute(attr="div_" | "mul_" | "div" | "mul"), args=[value]):
                sides, found = [value], calls
            case _:
                continue
        text = ast.unparse(node).lower()
        is_loss = any(word in text for word in ("loss", "grad", "criterion", "entropy"))
        if (is_loss or found is calls) and any(map(is_it, sides)):
            found.append(node.lineno)
    lines = sorted(operations or calls)
    before = [line for line in lines if line <= number]
    return f"{file}:{(before[-1:] or lines)[0]}" if lines else ""


@cache
def nodes_of(file: str) -> list[ast.AST]:
    """Parse a file; empty if it is no Python."""
    try:
        return list(ast.walk(ast.parse(Path(file).read_text("utf-8", "replace"))))
    except (OSError, SyntaxError, ValueError):
        return []


def _has(node: ast.AST, words: Collection[str]) -> bool:
    return any(word in name.lower() for name in names_in(node) for word in words)


def are_alternatives(lines: Sequence[str]) -> bool:
    """Whether one pass of a loop runs only one of these lines: the arms of one `if`."""
    if len(lines) < 2:
        return True
    (file, first), (other, second) = sorted(map(_lines_of, lines))[:2]
    choices = [node for node in nodes_of(file) if isinstance(node, ast.If)]
    is_either = any(has_line(n.body, first) and has_line(n.orelse, second) for n in choices)
    return len(lines) == 2 and file == other and is_either


def has_line(body: Sequence[ast.stmt | ast.expr], number: int) -> bool:
    return any(node.lineno <= number <= (node.end_lineno or 0) for node in body)
