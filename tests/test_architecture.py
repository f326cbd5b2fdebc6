"""The house rules that a machine can check: the order of the rooms, who may do what, how long.

CONTRIBUTING.md tells them to people.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = (
    "errors",
    "settings",
    "ranks",
    "reporting",
    "data",
    "model",
    "checkpoint",
    "guard",
    "training",
    "diagnosis",
)
SOURCES = sorted((ROOT / "hardened_ddp").rglob("*.py"))
SCRIPT = ROOT / "ddp_training.py"

# What a call looks like -> the places that may make it.
OWNERS = {
    ("os.environ", "os.getenv", "os.putenv"): ("ranks/launch.py",),
    (
        "dist.init_process_group",
        "dist.destroy_process_group",
        "dist.new_group",
        "dist.all_reduce",
        "dist.all_gather",
        "dist.broadcast",
        "dist.barrier",
    ): ("ranks/group.py",),
    ("torch.save", "torch.load"): (),
    ("safe_open", "load_file", "save_file"): ("checkpoint/",),
    (
        "torch.manual_seed",
        "random.seed",
        "np.random.seed",
        "torch.cuda.manual_seed",
    ): ("ranks/seeding.py",),
    ("signal.signal", "signal.set_wakeup_fd"): ("guard/stop.py",),
    ("threading.Thread",): ("guard/", "checkpoint/snapshot.py", "reporting/"),
    ("print",): ("reporting/", "diagnosis/", "ddp_training.py"),
    ("sys.exit",): ("ddp_training.py",),
    ("os._exit",): ("guard/watchdog.py",),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("hardened_ddp/")


def room_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").split("/")[0]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_room_imports_only_from_rooms_below_it(path: Path) -> None:
    if room_of(path) == "__init__":
        return
    allowed = ROOMS[: ROOMS.index(room_of(path)) + 1]
    for module in imports_of(path):
        if module.startswith("hardened_ddp."):
            assert module.split(".")[1] in allowed, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", [*SOURCES, SCRIPT], ids=name_of)
def test_an_act_is_done_only_by_its_owner(path: Path) -> None:
    found = {
        dotted(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    for acts, owners in OWNERS.items():
        if not any(name_of(path).startswith(owner) for owner in owners):
            assert not found & set(acts), f"{name_of(path)}: only {owners or 'nobody'} may do that"


@pytest.mark.parametrize("path", [*SOURCES, SCRIPT], ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    limit = 450 if path == SCRIPT or room_of(path) == "settings" else 300
    assert text.count("\n") <= limit
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"
            names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            parameters = [name for name in names if name not in ("self", "cls")]
            if node.name not in ("__init__", "setting"):  # they take one field each
                assert len(parameters) <= 6, f"{node.name} takes {parameters}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_are_named_for_what_they_own_and_errors_are_not_swallowed(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "common", "misc", "manager")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            is_silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not is_silent, f"silent except in line {node.lineno}"


def test_settings_errors_and_launch_import_no_torch() -> None:
    code = (
        "import sys, hardened_ddp.settings.cli, hardened_ddp.settings.layers, "
        "hardened_ddp.settings.manual, hardened_ddp.ranks.launch, ddp_training; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_importing_every_module_does_nothing() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
    ]
    code = "\n".join(
        [
            "import logging, threading, os, torch",
            "before = (dict(os.environ), torch.initial_seed(), threading.active_count())",
            *(f"import {module}" for module in modules),
            "after = (dict(os.environ), torch.initial_seed(), threading.active_count())",
            "assert before == after",
            "assert not logging.getLogger().handlers",
            "assert not torch.cuda.is_initialized()",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
