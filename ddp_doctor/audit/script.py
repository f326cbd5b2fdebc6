"""A Python file as a tree, and what its names stand for: the questions that source rules ask.

Owns: parents, imports, which names hold DDP models, conditions on the rank.
"""

import ast
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from ddp_doctor.errors import UsageError

DDP_NAMES = ("DistributedDataParallel", "DDP")
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Words in a condition that say: not every rank comes here.
RANK_WORDS = (
    *("rank", "main", "master", "primary", "chief", "leader", "zero", "gpu", "writer", "head"),
    *("root", "save", "local"),
)
OTHER_LAUNCHERS = frozenset(("deepspeed", "horovod", "colossalai"))
FRAMEWORKS = OTHER_LAUNCHERS.union(
    ("lightning", "pytorch_lightning", "accelerate", "transformers", "ignite", "fastai"),
    ("composer", "catalyst", "ray"),
)


class Script:
    """One parsed file. Raises UsageError if it can't be read, or is no Python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8", errors="replace")
            self.tree = ast.parse(self.text, filename=str(path))
        except OSError as error:
            raise UsageError(
                f"--source: {path} can't be read: {error.strerror}", fix="name a Python file"
            ) from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(
                f"--source: {path} is no Python that this interpreter can parse: {error}",
                fix=shlex.join([sys.executable, "-m", "py_compile", str(path)]),
            ) from error
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.modules = _imported(self.nodes)
        self.ddp_models = _assigned_from(self.nodes, DDP_NAMES)
        self.rank_flags = _rank_flags(self.nodes)

    @property
    def is_distributed(self) -> bool:
        """Whether the file itself sets up ranks in plain torch."""
        return any(word in self.text for word in ("DistributedDataParallel", "init_process_group"))

    def imports_any(self, names: frozenset[str]) -> bool:
        return any(module.split(".")[0] in names for module in self.modules)

    def calls(self, name: str) -> Iterator[ast.Call]:
        """Yield calls of a function or method by its last name."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node.func) == name:
                yield node

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """Give the function that a node is in, or the whole file."""
        return next((n for n in self.above(node) if isinstance(n, FUNCTIONS)), self.tree)

    def is_without_grad(self, node: ast.AST) -> bool:
        """Whether a node stands under no_grad or inference_mode, by with or by decorator."""
        for parent in self.above(node):
            given: list[ast.expr] = []
            if isinstance(parent, ast.With | ast.AsyncWith):
                given = [item.context_expr for item in parent.items]
            elif isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                given = parent.decorator_list
            words = " ".join(map(ast.unparse, given))
            if any(word in words for word in ("no_grad", "inference_mode", "set_grad_enabled")):
                return True
        return False

    def branches_of(self, node: ast.AST) -> Iterator[tuple[ast.If | ast.IfExp, bool]]:
        """Yield the conditions that a node depends on, in its function, and whether they hold."""
        child = node
        for parent in self.above(node):
            if isinstance(parent, FUNCTIONS):
                return
            if isinstance(parent, ast.If) and child is not parent.test:
                yield parent, child in parent.body
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield parent, child is parent.body
            child = parent

    def is_for_some_ranks(self, node: ast.AST) -> bool:
        """Whether a node may be kept from some ranks: read generously, to accuse nobody."""
        if any(self.names_a_rank(test.test) for test, _ in self.branches_of(node)):
            return True
        function = self.function_of(node)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            "rank" in ast.unparse(item) or "main" in ast.unparse(item)
            for item in function.decorator_list
        ):
            return True
        return any(
            isinstance(other, ast.If)
            and other.lineno < getattr(node, "lineno", 0)
            and self.names_a_rank(other.test)
            and any(isinstance(n, ast.Return | ast.Continue | ast.Raise) for n in other.body)
            and self.function_of(other) is function
            for other in self.nodes
        )

    def names_a_rank(self, test: ast.AST) -> bool:
        """Whether a condition has a word that may stand for the rank."""
        words = {word.lower() for word in names_in(test)}
        return any(part in word for word in words for part in RANK_WORDS) or bool(
            words & self.rank_flags
        )

    def is_rank_zero(self, test: ast.AST) -> bool:
        """Whether a condition surely holds on one rank only: rank == 0, not rank."""
        match test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=int())]):
                return _is_global_rank(left)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _is_global_rank(operand)
            case ast.BoolOp(op=ast.And(), values=values):
                return any(map(self.is_rank_zero, values))
        return False


def last_name(node: ast.AST) -> str:
    """Give the last part of a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """Collect all names and attributes below a node."""
    return {last_name(n) for n in ast.walk(node)} - {""}


def _is_global_rank(node: ast.AST) -> bool:
    """Whether an expression is the rank itself, by the names in use for it."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("get_rank", "get_global_rank")
    return last_name(node) in ("rank", "global_rank", "RANK", "ddp_rank", "world_rank", "my_rank")


def _imported(nodes: list[ast.AST]) -> set[str]:
    modules = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return modules | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    }


def _assigned_from(nodes: list[ast.AST], functions: tuple[str, ...]) -> set[str]:
    """Collect the names to which a call of one of these functions is assigned."""
    found = set()
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and last_name(node.value.func) in functions
        ):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def _rank_flags(nodes: list[ast.AST]) -> set[str]:
    """Collect the names that hold the outcome of a comparison with the rank."""
    return {
        last_name(target).lower()
        for node in nodes
        if isinstance(node, ast.Assign)
        and any("rank" in name.lower() for name in names_in(node.value))
        for target in node.targets
    } - {""}
