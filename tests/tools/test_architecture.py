"""The rules of the code that a machine can check; CONTRIBUTING.md tells them to people.

A rule takes a file's name, its tree and what its names stand for, and yields what breaks it. All
of it is shown at once. Beside each rule stands a source that breaks it: a rule that sees nothing
would pass for ever.
"""

import ast
import fnmatch
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.documents import READING, text_of
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command
from tests.marks import sections

LAYERS = ["errors", "settings", "ranks", "reporting", "data/foreign_code", "data/batches"]
LAYERS += ["streams", "data/sources", "data", "task", "model", "gradients", "checkpoint", "guard"]
LAYERS += ["step", "preflight", "training", "export", "own_loop"]
HANDS_OVER = ("ddp_runs/tools.py",)
# Packages beside the trainer, and who imports them.
USERS_OF = {
    "ddp_runs": ("ddp_training", "ddp_runs", "ddp_drills"),
    "ddp_drills": ("ddp_training", "ddp_drills"),
}
LAUNCHERS = sorted((ROOT / "launchers").glob("*.py"))
COMMAND = "hardened_ddp_command.py"
PRODUCT = [ROOT / "ddp_training.py", ROOT / COMMAND, *sorted((ROOT / "hardened_ddp").rglob("*.py"))]
PRODUCT += sorted((ROOT / "ddp_drills").glob("*.py"))
PRODUCT += sorted((ROOT / "ddp_runs").glob("*.py"))
PRODUCT += sorted((ROOT / "ddp_doctor").rglob("*.py"))
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 6
# A file ends where its subject ends; a package has room for so many lines in all. A feature that
# needs more takes it from what docs/PROMISES.md does not name.
BUDGETS = {
    "ddp_training.py": 410,
    "hardened_ddp_command.py": 180,
    "ddp_doctor/*": 12_500,
    "ddp_runs/*": 3_600,
    "hardened_ddp/*": 29_100,
    "hardened_ddp/gradients/*": 680,
    "hardened_ddp/settings/*": 2_125,
    "hardened_ddp/step/*": 2_035,
    "hardened_ddp/reporting/*": 1_775,
    "hardened_ddp/task/*": 1_455,
    "hardened_ddp/checkpoint/*": 1_775,
    "hardened_ddp/training/*": 2_825,
    "hardened_ddp/export/*": 485,
    "hardened_ddp/model/*": 3_085,
    "hardened_ddp/preflight/*": 980,
    "hardened_ddp/ranks/*": 2_535,
    "hardened_ddp/guard/*": 1_245,
    "hardened_ddp/data/*": 4_185,
    "hardened_ddp/streams/*": 2_635,
    "ddp_drills/*": 1_935,
    "launchers/*": 670,
    "tests/harness/*": 900,
    "tests/*": 28_995,
}
# So many modules of less than SMALL_LINES have only one importer, into which such a module belongs
# unless its docstring says why not. This number only falls.
MAX_SMALL_MODULES, SMALL_LINES = 3, 80
# What everything passes through holds few things: class, its file, how many attributes at most.
MAX_ATTRIBUTES = [("Stepper", "step/step.py", 10), ("Replica", "model/replica.py", 6)]
# Functions that take one value, by its name, for each thing that they make or pass on.
ONE_FOR_EACH_FIELD = {
    "data/batches/sampler.py": {"__init__"},
    "streams/shard_sampler.py": {"__init__"},
    # their parameters are the keys of --dataset_args
    "data/sources/built_in.py": {"__init__"},
    "data/sources/hub_sets.py": {"open_hub_set"},
    "streams/adapters.py": {"open_hub_stream"},
    "streams/formats.py": {"open_files"},
    "own_loop/protect.py": {"protect"},
}

# What is done, by its full name -> the files that may do it. What stands first counts.
HARMLESS = "torch.distributed.is_* torch.distributed.get_backend* torch.distributed.ReduceOp*"
HARMLESS += " torch.distributed.*Store torch.distributed.*Store.* torch.distributed.ProcessGroup"
HARMLESS += " torch.distributed.elastic.* torch.distributed.run torch.distributed.run.*"
OWNERS = {
    HARMLESS: "*",
    # ddp_doctor/audit/injected/: it runs inside of a foreign program
    "os.environ os.environb os.getenv os.putenv os.unsetenv os.getenvb": (
        "ranks/launch.py ddp_doctor/__main__.py ddp_doctor/audit/injected/*"
    ),
    # own_loop/registry.py: it unwraps what a user has wrapped
    "torch.distributed.*.DistributedDataParallel torch.nn.parallel.*": (
        "gradients/* own_loop/registry.py"
    ),
    # ddp_drills/injectors.py: a model that misbehaves calls a collective, ends its process
    # ddp_runs/cluster.py: it measures torch's own all-reduce
    "torch.distributed.[a-z_]*": (
        "ranks/group.py gradients/* ddp_drills/injectors.py ddp_runs/cluster.py"
    ),
    "torch.save torch.load safetensors*": "checkpoint/* export/*",
    "torch.manual_seed torch.seed torch.*.manual_seed* torch.*.set_rng_state*": "ranks/seeding.py",
    "torch.set_rng_state torch.use_deterministic_algorithms random.seed": "ranks/seeding.py",
    "numpy.random.seed": "ranks/seeding.py",
    "signal.signal": (
        "guard/stop.py data/batches/worker_pool.py ddp_training.py ddp_doctor/drill/command.py"
    ),
    "signal.set_wakeup_fd signal.siginterrupt": "guard/stop.py",
    "threading.Thread threading.Timer _thread.* concurrent.futures.Thread*": (
        # ranks/threads.py gives each thread its rank's GPU; the rest: in a foreign program
        "ranks/threads.py ddp_doctor/audit/injected/*"
    ),
    "print": f"reporting/* ddp_runs/* ddp_doctor/* ddp_drills/* ddp_training.py {COMMAND}",
    "sys.exit exit quit": (
        f"ddp_training.py {COMMAND} ddp_doctor/__main__.py ddp_doctor/drill/command.py"
    ),
    # what a user's code raises; and what ends the program of a user's own loop
    "SystemExit": (
        "ddp_training.py errors.py data/foreign_code.py step/failure.py own_loop/protect.py"
    ),
    "os._exit": "guard/stop.py ddp_drills/injectors.py",
}


def find_upward_imports(name: str, tree: ast.AST, full: dict[str, str]) -> Iterator[str]:
    """A layer imports only layers above it in LAYERS; nobody imports the script or the tests.

    But the installed command, which runs the script.

    ddp_runs and ddp_drills import the trainer, and the trainer neither of them: only the script
    does, and drills read what runs leave. ddp_doctor imports nothing but itself and the standard
    library, and only the script's hand-over imports it.
    """
    own = name.split("/")[0].removesuffix(".py")
    layer = layer_of(name.removesuffix(".py"))
    allowed = LAYERS[: LAYERS.index(layer) + 1] if layer else LAYERS
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{node.lineno}: a relative import; write the whole name"
    for module in full.values():
        parts = module.split(".")
        if name == COMMAND and parts[0] == "ddp_training":
            continue  # the installed command runs the script
        if parts[0] in ("tests", "ddp_training", "test_ddp_training", "benchmarks"):
            yield f"imports {module}"
        elif parts[0] in USERS_OF and own not in USERS_OF[parts[0]]:
            yield f"imports {module}: only {USERS_OF[parts[0]]} do"
        elif own == "ddp_doctor" and not may_be_in_doctor(name, parts[0]):
            yield f"imports {module}: this folder works alone"
        elif parts[0] == "ddp_doctor" and own != "ddp_doctor" and name not in HANDS_OVER:
            yield f"imports {module}: only {HANDS_OVER} does"
        elif module.startswith("hardened_ddp.") and layer_of("/".join(parts[1:])) not in allowed:
            yield f"imports {module}, and may import only: {', '.join(allowed)}"


def layer_of(path: str) -> str:
    """Return the layer of a module, the innermost that holds it; empty if it is in none."""
    holding = [layer for layer in LAYERS if path == layer or path.startswith(f"{layer}/")]
    return max(holding, key=len, default="")


def may_be_in_doctor(name: str, package: str) -> bool:
    """Whether ddp_doctor may import a package: torch only inside the observed program."""
    if package == "torch":
        return name.startswith(("ddp_doctor/audit/injected/", "ddp_doctor/drill/injected.py"))
    return package == "ddp_doctor" or package in sys.stdlib_module_names


def find_foreign_acts(name: str, tree: ast.AST, full: dict[str, str]) -> Iterator[str]:
    """What only one place may do is done only there."""
    for node, act in acts_of(tree):
        owners = owners_of(act)
        if not any(fnmatch.fnmatchcase(name, owner) for owner in owners.split()):
            yield f"{node.lineno}: {act} belongs to {owners}"


@cache  # WHY: most acts stand in many files
def owners_of(act: str) -> str:
    """Look up the files that may do an act."""
    for acts, owners in OWNERS.items():
        if any(fnmatch.fnmatchcase(act, pattern) for pattern in acts.split()):
            return owners
    return "*"


def find_private_torch(name: str, tree: ast.AST, full: dict[str, str]) -> Iterator[str]:
    """A private name of torch can be gone in its next version: look first, with hasattr.

    Whose a name is that is reached through an object, nobody can read: all count that the file
    does not make itself. The family of torch._foreach_ is in torch's documentation.
    """
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call)]
    given = [arg for c in calls if dotted(c.func) in ("hasattr", "getattr") for arg in c.args]
    asked = {argument.value for argument in given if isinstance(argument, ast.Constant)}
    own = names_made_in(tree)
    for node, act in acts_of(tree):
        private = {part for part in act.split(".")[1:] if part[0] == "_" and part[-1] != "_"}
        private = {part for part in private if not part.startswith("_foreach_")}
        if not act.startswith("torch"):
            # An object that is not imported may be one of torch: self.scaler, or a parameter.
            is_imported = dotted(node).split(".")[0] in full
            private = set() if is_imported else private - own
        if not private <= asked:
            yield f"{node.lineno}: {act} is private; ask with hasattr, and fall back"


def find_long(name: str, tree: ast.AST, full: dict[str, str]) -> Iterator[str]:
    """Functions and their parameter lists fit on a screen."""
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {num_lines} lines"
            given = node.args
            names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            num_taken = len(names - {"self", "cls"}) + bool(given.vararg) + bool(given.kwarg)
            if num_taken > MAX_PARAMETERS and node.name not in ONE_FOR_EACH_FIELD.get(name, ()):
                yield f"{node.lineno}: {node.name} takes {num_taken} parameters"


Rule = Callable[[str, ast.AST, dict[str, str]], Iterator[str]]
RULE_BREAKERS = sections(Path(__file__).with_name("breaks_a_rule.txt"))
BREAKS: dict[Rule, list[str]] = {
    rule: re.split(r"^--- ", RULE_BREAKERS[rule.__name__], flags=re.MULTILINE)[1:]
    for rule in (find_upward_imports, find_foreign_acts, find_private_torch, find_long)
}
BREAKS[find_long].append("a.py\ndef f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
"""For each rule the name of a file, and what breaks the rule there."""

RULES = pytest.mark.parametrize("rule", BREAKS, ids=lambda rule: rule.__name__.strip("_"))


@RULES
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    places = [*PRODUCT, *(LAUNCHERS if rule is find_long else [])]
    found = [f"{name_of(p)}: {problem}" for p in places for problem in rule(*parts_of(p))]
    assert not found, f"{rule.__doc__}\n  " + "\n  ".join(found)


@RULES
def test_a_rule_sees_what_breaks_it(rule: Rule) -> None:
    for name, _, source in (text.partition("\n") for text in BREAKS[rule]):
        tree = ast.parse(source)
        assert list(rule(name, tree, full_names(tree))), source


def test_each_package_keeps_its_budget_of_lines() -> None:
    used = dict.fromkeys(BUDGETS, 0)
    for path in [*PRODUCT, *LAUNCHERS, *(ROOT / "tests").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        packages = [package for package in BUDGETS if fnmatch.fnmatchcase(name, package)]
        assert packages, f"{name} belongs to no package of BUDGETS"
        for package in packages:
            used[package] += len(path.read_text(encoding="utf-8").splitlines())
    over = {package: lines for package, lines in used.items() if lines > BUDGETS[package]}
    assert not over
    told = re.findall(r"^\| `(\w+)/` \| ([\d,]+) in (\d+) \|", text_of(READING), re.MULTILINE)
    assert len(told) == 5
    for folder, lines, files in told:
        assert BUDGETS[f"{folder}/*"] == int(lines.replace(",", "")), folder
        assert len([*(ROOT / folder).rglob("*.py")]) == int(files), folder


def test_small_modules_of_one_importer_become_no_more() -> None:
    small = [p for p in PRODUCT if len(p.read_text(encoding="utf-8").splitlines()) < SMALL_LINES]
    named = [p for p in small if p.stem not in ("__init__", "__main__")]
    found = [name_of(p) for p in named if len(importers_of(module_of(p))) == 1]
    assert len(found) <= MAX_SMALL_MODULES, f"merge one into its importer: {found}"


def importers_of(module: str) -> list[Path]:
    """List the files of the product that import a module, or something in it."""
    names = {path: parts_of(path)[2].values() for path in PRODUCT}
    return [p for p in PRODUCT if any(module in (n, n.rpartition(".")[0]) for n in names[p])]


@pytest.mark.parametrize(("name", "file", "most"), MAX_ATTRIBUTES)
def test_what_everything_passes_through_holds_few_things(name: str, file: str, most: int) -> None:
    _, tree, _ = parts_of(ROOT / "hardened_ddp" / file)
    [found] = [n for n in nodes_of(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    stored = {n for n in ast.walk(found) if isinstance(n, ast.Attribute)}
    names = {n.attr for n in stored if isinstance(n.ctx, ast.Store) and dotted(n.value) == "self"}
    names |= {dotted(n.target) for n in found.body if isinstance(n, ast.AnnAssign)}
    assert 0 < len(names) <= most, sorted(names)


def test_a_retry_and_what_only_a_gpu_needs_import_neither_each_other_nor_the_step() -> None:
    apart = {f"hardened_ddp.step.{name}" for name in ("step", "retry", "async_device")}
    for name in ("retry", "async_device", "gradient"):
        _, _, full = parts_of(ROOT / "hardened_ddp" / "step" / f"{name}.py")
        imported = {*full.values(), *(each.rpartition(".")[0] for each in full.values())}
        assert not imported & apart, name


def test_modules_are_named_for_what_they_own() -> None:
    others = [*LAUNCHERS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    bad = [path for path in [*PRODUCT, *others] if NAMELESS & set(path.stem.lower().split("_"))]
    assert not bad
    found = {p.name for p in (ROOT / "hardened_ddp").iterdir() if (p / "__init__.py").exists()}
    layers = {layer.split("/")[0] for layer in LAYERS[1:]}
    assert found == layers, "a layer that has no place in the order of LAYERS"


def test_settings_errors_and_launch_import_no_torch() -> None:
    light = [p for p in PRODUCT if name_of(p).startswith(("errors", "settings", "ranks/launch"))]
    code = "".join(f"import {module_of(path)}\n" for path in light)
    code += "import ddp_training, sys\nsys.exit('torch' in sys.modules)"
    run_command([sys.executable, "-c", code], timeout_s=100).ok()


@pytest.mark.slow
def test_importing_a_module_does_nothing() -> None:
    code = sections(Path(__file__).with_name("programs.txt"))["imports all modules"]
    code = code.replace("MODULES", repr([module_of(path) for path in PRODUCT]))
    run_command([sys.executable, "-c", code], timeout_s=100).ok()


@cache  # WHY: several rules ask for the same files
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def acts_of(tree: ast.AST) -> list[tuple[ast.expr, str]]:
    """List the full name of everything that is called, read or set by name."""
    full, found = full_names(tree), []
    inner = {node.value for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in inner:
            first, _, rest = dotted(node).partition(".")
            found.append((node, ".".join(filter(None, (full.get(first, first), rest)))))
    return found


@cache
def full_names(tree: ast.AST) -> dict[str, str]:
    """Map each imported name to what it stands for: np to numpy."""
    names = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # WHY: import a.b binds a, and still has to be seen as an import of a.b
                names[alias.asname or alias.name] = alias.name
                names.setdefault(alias.name.split(".")[0], alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def names_made_in(tree: ast.AST) -> set[str]:
    """Collect the names that a file itself gives: to functions, classes, fields, attributes."""
    names = set()
    for node in nodes_of(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@cache
def parts_of(path: Path) -> tuple[str, ast.AST, dict[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return name_of(path), tree, full_names(tree)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("hardened_ddp/")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
