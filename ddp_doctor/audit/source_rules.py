"""What can be seen in a file without running it, one rule each.

A rule yields calls and what is wrong with them. It yields nothing where it is not sure: helpers in
other files, frameworks that do the work themselves, and conditions that may depend on the rank all
count in favour of the program.
"""

import ast
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ddp_doctor.audit.injected.collectives import OPERATIONS
from ddp_doctor.audit.verdict import Verdict
from ddp_doctor.terminal import UsageError

Found = Iterator[tuple[ast.Call, str]]
"""Each call that is a mistake, and what is wrong with it."""

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
_OPENERS = ("BytesIO", "open", "StringIO", "NamedTemporaryFile", "TemporaryFile", "mkstemp")
_UNIQUE = ("rank", "pid", "uuid", "temp", "tmp", "buf", "worker", "hostname", "node", "gpu")
_DIST_NAMES = ("dist", "distributed", "torch.distributed", "c10d", "torch_dist", "tdist")


class Script:
    """One parsed file. Raises UsageError if it can't be read, or is no Python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8", errors="replace")
            self.tree = ast.parse(self.text, filename=str(path))
        except OSError as error:
            told = f"--source: {path} can't be read: {error.strerror}"
            raise UsageError(told, fix="name a Python file") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            told = f"--source: {path} is no Python that this interpreter can parse: {error}"
            fix = shlex.join([sys.executable, "-m", "py_compile", str(path)])
            raise UsageError(told, fix=fix) from error
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.assigned = list(assignments(self.nodes))
        self.ddp_models = {ast.unparse(t) for t, v in self.assigned if called(v) in DDP_NAMES}
        self.rank_flags = {
            last_name(target).lower()
            for target, value in self.assigned
            if any("rank" in name.lower() for name in names_in(value))
        } - {""}
        """Names that may hold the outcome of a comparison with the rank."""

    @property
    def is_distributed(self) -> bool:
        """Whether the file itself sets up ranks in plain torch."""
        return any(word in self.text for word in ("DistributedDataParallel", "init_process_group"))

    def imports_any(self, names: frozenset[str]) -> bool:
        modules = [a.name for n in self.nodes if isinstance(n, ast.Import) for a in n.names]
        modules += [n.module or "" for n in self.nodes if isinstance(n, ast.ImportFrom)]
        return any(module.split(".")[0] in names for module in modules)

    def calls(self, name: str) -> Iterator[ast.Call]:
        """Yield calls of a function or method by its last name."""
        yield from (n for n in self.nodes if isinstance(n, ast.Call) and called(n) == name)

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
        given: list[ast.AST] = []
        for parent in self.above(node):
            given += getattr(parent, "items", getattr(parent, "decorator_list", []))
        words = " ".join(map(ast.unparse, given))
        return any(word in words for word in ("no_grad", "inference_mode", "set_grad_enabled"))

    def branches_of(self, node: ast.AST) -> Iterator[tuple[ast.If | ast.IfExp, bool]]:
        """Yield the conditions that a node depends on, in its function, and whether they hold."""
        child = node
        for parent in self.above(node):
            if isinstance(parent, FUNCTIONS):
                return
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                yield parent, child in body
            child = parent

    def is_for_some_ranks(self, node: ast.AST) -> bool:
        """Whether a node may be kept from some ranks: read generously, to accuse nobody."""
        if any(self.names_a_rank(test.test) for test, _ in self.branches_of(node)):
            return True
        function = self.function_of(node)
        decorators = " ".join(map(ast.unparse, getattr(function, "decorator_list", [])))
        if "rank" in decorators or "main" in decorators:
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
        is_named = any(part in word for word in words for part in RANK_WORDS)
        return is_named or bool(words & self.rank_flags)

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


def find_bypass(script: Script) -> Found:
    """Yield calls of model.module(x) whose loss goes backward in the same loop or function."""
    for call in script.calls("module"):
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        model = ast.unparse(function.value)
        # WHY a function, too: that of one batch has no loop in it
        scopes = (*LOOPS, ast.FunctionDef)
        scope = next((n for n in script.above(call) if isinstance(n, scopes)), None)
        if model not in script.ddp_models or scope is None or script.is_without_grad(call):
            continue
        calls = [ast.unparse(n.func) for n in ast.walk(scope) if isinstance(n, ast.Call)]
        if model not in calls and _reaches_backward(call, scope):
            told = f"{model}.module(...) is called in training: DDP's forward does not run, so "
            yield call, told + "no gradients are averaged, and every rank trains a model of its own"


def _reaches_backward(call: ast.Call, scope: ast.AST) -> bool:
    """Whether a value made by a call flows, by assignments around it, into a backward."""
    tainted: set[str] = set()
    kinds = ast.Assign | ast.AugAssign | ast.Call
    statements = [node for node in ast.walk(scope) if isinstance(node, kinds)]
    for node in sorted(statements, key=lambda n: (n.lineno, n.col_offset)):
        value = node if isinstance(node, ast.Call) else node.value
        if not any(n is call or getattr(n, "id", "") in tainted for n in ast.walk(value)):
            continue
        if called(node) == "backward":
            return True
        if isinstance(node, ast.Assign):
            tainted |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            tainted.add(node.target.id)
    return False


def find_missing_set_epoch(script: Script) -> Found:
    """Yield shuffling DistributedSamplers of a training that never calls set_epoch."""
    constants = {node.value for node in script.nodes if isinstance(node, ast.Constant)}
    words = constants.union(map(last_name, script.nodes))  # and no comments
    if "set_epoch" in words or "backward" not in words or script.imports_any(FRAMEWORKS):
        return
    if not any(map(_is_epoch_loop, script.nodes)):
        return
    for call in script.calls("DistributedSampler"):
        shuffle = next((k.value for k in call.keywords if k.arg == "shuffle"), None)
        statement = next((n for n in script.above(call) if isinstance(n, ast.stmt)), None)
        text = ast.unparse(statement).lower() if statement else ""
        is_eval = any(word in text for word in ("val", "test", "eval", "dev", "pred"))
        is_new = "seed=" in text and any(isinstance(n, LOOPS) for n in script.above(call))
        # WHY True only: a name or an expression may be False when it runs
        if not (is_eval or is_new) and (shuffle is None or ast.unparse(shuffle) == "True"):
            told = "this DistributedSampler shuffles, but set_epoch is called nowhere in the file: "
            yield call, told + "all epochs have the same order"


def _is_epoch_loop(node: ast.AST) -> bool:
    """Whether a loop is named so, or goes over a number and has a loop over batches in it."""
    if not isinstance(node, ast.For):
        return False
    words = (ast.unparse(node.target) + " " + ast.unparse(node.iter)).lower()
    # WHY not a loop that counts: it may go over the micro-batches of one step
    loops = (n for n in ast.walk(node) if isinstance(n, ast.For) and called(n.iter) != "range")
    trains = any(getattr(n, "attr", "") == "backward" for loop in loops for n in ast.walk(loop))
    return "epoch" in words or (called(node.iter) == "range" and trains)


def find_save_on_all_ranks(script: Script) -> Found:
    """Yield torch.save to a fixed path that every rank reaches."""
    if not script.is_distributed:
        return
    for call in script.calls("save"):
        if ast.unparse(call.func) != "torch.save" or len(call.args) < 2:
            continue
        function = script.function_of(call)
        is_for_some = isinstance(function, ast.Lambda) or script.is_for_some_ranks(call)
        if is_for_some or not _is_fixed_path(script, call.args[1]):
            continue
        name = getattr(function, "name", "")
        callers = list(script.calls(name)) if name else []
        # WHY: who is called from other files only, nobody knows
        is_unsure = not callers or any(map(script.is_for_some_ranks, callers))
        on_all = {"", "main"} | {last_name(c.args[0]) for c in script.calls("spawn") if c.args}
        if not is_unsure or name in on_all:
            path = ast.unparse(call.args[1])
            yield call, f"torch.save writes {path} on every rank at the same time"


def _is_fixed_path(script: Script, path: ast.expr) -> bool:
    """Whether a path is surely the same on all ranks: only texts, and names made of texts."""
    if any(part in name.lower() for name in names_in(path) for part in (*_UNIQUE, *_OPENERS)):
        return False
    match path:
        case ast.Constant(value=text):
            return isinstance(text, str) and not text.startswith("/dev/")
        case ast.JoinedStr():
            return True
        case ast.Name(id=name):
            values = [v for t, v in script.assigned if isinstance(t, ast.Name) and t.id == name]
            are_plain = bool(values) and not any(isinstance(v, ast.Name) for v in values)
            return are_plain and all(_is_fixed_path(script, v) for v in values)
        case ast.BinOp(left=left, right=right):
            return isinstance(left, ast.Constant) or isinstance(right, ast.Constant)
    return called(path) == "join"


def find_hard_coded_device(script: Script) -> Found:
    """Yield devices with a fixed index in a script that runs on all ranks."""
    if not script.is_distributed or script.imports_any(OTHER_LAUNCHERS):
        return
    for node in script.nodes:
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, first = ast.unparse(node.func), node.args[0]
        if isinstance(first, ast.IfExp) and isinstance(first.orelse, ast.Constant):
            is_plain = isinstance(first.test, ast.Call) and "is_available" in ast.unparse(first)
            first = first.body if is_plain else first
        value = first.value if isinstance(first, ast.Constant) else None
        is_index = type(value) is int and last_name(node.func) in ("cuda", "set_device")
        is_named = isinstance(value, str) and value.startswith(("cuda:", "xpu:", "npu:"))
        takes_device = last_name(node.func) in ("to", "cuda", "device", "set_device")
        if not (is_index or (is_named and takes_device)) or any(script.branches_of(node)):
            continue
        if name.startswith(("torch.load", "tl.")) or not _is_top_of_training(script, node):
            continue
        yield node, f"{ast.unparse(node)} names the same GPU on every rank"


def _is_top_of_training(script: Script, node: ast.AST) -> bool:
    """Whether the function also sets up DDP, or is the file itself: no helper for one GPU."""
    words = set(map(called, ast.walk(script.function_of(node))))
    return not words.isdisjoint((*DDP_NAMES, "init_process_group"))


def find_one_rank_collective(script: Script) -> Found:
    """Yield collectives under rank == 0 that have no counterpart for the other ranks."""
    for name in OPERATIONS:
        for call in script.calls(name):
            has_group = any(k.arg == "group" for k in call.keywords)
            alone = _one_rank_branch(script, call)
            is_theirs = _is_torchs(script, call, name) and not has_group
            if is_theirs and alone and not _has_partner(script, call, name):
                told = f"{ast.unparse(call.func)} is called under `if {ast.unparse(alone.test)}` "
                yield call, told + "only: that rank waits for the others, which never come"


def _is_torchs(script: Script, call: ast.Call, name: str) -> bool:
    """Whether a call is torch.distributed's function of that name."""
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value) in _DIST_NAMES
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("torch.distributed")
        and any((alias.asname or alias.name) == name for alias in node.names)
        for node in script.nodes
    )


def _one_rank_branch(script: Script, node: ast.AST) -> ast.If | None:
    """Give the `if rank == 0` that a node is under, if that is the only question about ranks."""
    match [found for found in script.branches_of(node) if script.names_a_rank(found[0].test)]:
        case [(ast.If() as test, True)] if script.is_rank_zero(test.test):
            return test
    return None


def _has_partner(script: Script, call: ast.Call, name: str) -> bool:
    """Whether the function has the same collective under another condition on the rank."""
    function = script.function_of(call)
    return any(
        other is not call
        and script.function_of(other) is function
        and any(script.names_a_rank(test.test) for test, _ in script.branches_of(other))
        for other in script.calls(name)
    )


def find_one_rank_forward(script: Script) -> Found:
    """Yield calls of a DDP model, with gradients, under rank == 0."""
    for node in script.nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in script.ddp_models:
            continue
        alone = _one_rank_branch(script, node)
        others = [called(n) for part in (alone.orelse if alone else []) for n in ast.walk(part)]
        if alone and called(node) not in others and not script.is_without_grad(node):
            told = f"{ast.unparse(node.func)}(...) is DDP's forward, and runs under `if "
            yield node, f"{told}{ast.unparse(alone.test)}` only: it waits for the other ranks"


def last_name(node: ast.AST) -> str:
    """Give the last part of a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> str:
    """Give the last name of the function that a node calls; empty if it is no call."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def names_in(node: ast.AST) -> set[str]:
    """Collect all names and attributes below a node."""
    return {last_name(n) for n in ast.walk(node)} - {""}


def _is_global_rank(node: ast.AST) -> bool:
    """Whether an expression is the rank itself, by the names in use for it."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("get_rank", "get_global_rank")
    return last_name(node) in ("rank", "global_rank", "RANK", "ddp_rank", "world_rank", "my_rank")


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)


RULES: Sequence[tuple[str, Callable[[Script], Found]]] = (
    ("gradients-not-averaged", find_bypass),
    ("same-order", find_missing_set_epoch),
    ("collectives-differ", find_one_rank_collective),
    ("collectives-differ", find_one_rank_forward),
    ("same-file", find_save_on_all_ranks),
    ("hard-coded-device", find_hard_coded_device),
)


def read_script(script: Script) -> list[Verdict]:
    """Apply all rules to one file; the evidence is the line that a rule found."""
    lines = script.text.splitlines()
    return [
        Verdict(code, told, f"{script.path}:{n.lineno}", evidence=(lines[n.lineno - 1].strip(),))
        for code, rule in RULES
        for n, told in rule(script)
    ]
