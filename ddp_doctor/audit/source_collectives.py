"""What waits for ever, as far as a source shows it: a collective that one rank alone calls.

The other rules, and the way of all of them, are in source_rules.py.
"""

import ast
from collections.abc import Iterator

from ddp_doctor.audit.script import Script, found, last_name
from ddp_doctor.audit.verdict import Verdict

COLLECTIVES = [
    "barrier",
    "monitored_barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "gather",
    "gather_object",
    "scatter",
    "all_to_all",
]
_DIST_NAMES = ("dist", "distributed", "torch.distributed", "c10d", "torch_dist", "tdist")


def find_one_rank_collective(script: Script) -> Iterator[Verdict]:
    """Yield collectives under rank == 0 that have no counterpart for the other ranks."""
    for name in COLLECTIVES:
        for call in script.calls(name):
            has_group = any(k.arg == "group" for k in call.keywords)
            alone = _one_rank_branch(script, call)
            if (
                _is_torchs(script, call, name)
                and not has_group
                and alone
                and not _has_partner(script, call, name)
            ):
                yield found(
                    script,
                    call,
                    "collective-on-one-rank",
                    f"{ast.unparse(call.func)} is called under `if {ast.unparse(alone.test)}` "
                    "only: that rank waits for the others, which never come",
                )


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
    asked = [(test, holds) for test, holds in script.branches_of(node)]
    ranks = [(test, holds) for test, holds in asked if script.names_a_rank(test.test)]
    if len(ranks) == 1 and isinstance(ranks[0][0], ast.If):
        test, holds = ranks[0]
        if holds and isinstance(test, ast.If) and script.is_rank_zero(test.test):
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


def find_one_rank_forward(script: Script) -> Iterator[Verdict]:
    """Yield calls of a DDP model, with gradients, under rank == 0."""
    for node in script.nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in script.ddp_models:
            continue
        alone = _one_rank_branch(script, node)
        is_elsewhere = any(
            last_name(n.func) == last_name(node.func) and n in ast.walk(part)
            for part in (alone.orelse if alone else [])
            for n in ast.walk(part)
            if isinstance(n, ast.Call)
        )
        if alone and not is_elsewhere and not script.is_without_grad(node):
            yield found(
                script,
                node,
                "ddp-forward-on-one-rank",
                f"{ast.unparse(node.func)}(...) is DDP's forward, and runs under "
                f"`if {ast.unparse(alone.test)}` only: it waits for the other ranks",
            )
