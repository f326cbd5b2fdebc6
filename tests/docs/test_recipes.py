"""The recipes of CONTRIBUTING.md: each patch applies to the code as it is, and its command runs.

A recipe is a section of "How to add" with a patch and the commands that show what it adds. What
goes wrong here: the code around a patch has changed. Then change the patch in CONTRIBUTING.md, too.
"""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documents import text_of
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command, run_program
from tests.mutate import copy_tree

# What a recipe's commands print or write if its patch has an effect.
SHOWN = {"cause": "a file name is too long", "check": "1 passed"}
SHOWN |= {"setting": "nesterov: true", "metric": '"confidence/test"'}
WRITTEN = ("runs/*/config.yaml", "runs/*/metrics.jsonl")
GUARDS = ["tests/docs/test_docs.py", "tests/tools/test_architecture.py"]
GUARDS += ["tests/explain/test_explain.py::TestCatalogue"]
CHECKS = ("python -m tests.documents", "ruff format --check .", "ruff check .")
# WHY not the budgets of code and documents: a patch of a recipe is an example, not a feature.
_PYTEST = "python -m pytest -q -p no:cacheprovider -m 'not slow' -k 'not budget and not 250_kb'"
CHECKS += (f"{_PYTEST} {' '.join(GUARDS)}",)
CHANGED = re.compile(r"^\+\+\+ b/(.*\.py)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to add one kind of thing."""

    name: str
    patch: str
    commands: tuple[str, ...]


def read_recipes() -> list[Recipe]:
    """Read the sections of "How to add" that have a patch."""
    chapter = text_of("CONTRIBUTING.md").split("\n## How to add\n")[1].split("\n## ")[0]
    found = []
    for section in chapter.split("\n### ")[1:]:
        blocks = dict(re.findall(r"^```(diff|bash)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
        if blocks:
            name = section.splitlines()[0].split()[-1]
            found.append(Recipe(name, blocks["diff"], tuple(blocks["bash"].splitlines())))
    return found


RECIPES = read_recipes()


def apply(recipe: Recipe, tree: Path) -> None:
    """Apply the patch of a recipe to a copy of the repository, or say that it is out of date."""
    # --unidiff-zero: with so little context a change of other lines breaks no recipe.
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        cwd=tree,
        input=recipe.patch,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, (
        f"recipe {recipe.name} no longer applies: update CONTRIBUTING.md\n{done.stderr}"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the repository."""
    copy_tree(ROOT, tmp_path / "tree")
    return tmp_path / "tree"


def run(command: str, tree: Path) -> str:
    """Run a command in a copy of the repository; give what it printed."""
    env = {"TMPDIR": str(tree.parent), "PYTHONPATH": str(tree)}
    words = shlex.split(command)
    # WHY not pytest: some of its tests look at what an interpreter imports
    run_it = run_program if words[0] == "python" and "pytest" not in words else run_command
    return run_it(words, timeout_s=170, cwd=tree, env=env).ok().output


def test_there_is_a_recipe_for_each_kind_and_all_patches_apply(tree: Path) -> None:
    assert [recipe.name for recipe in RECIPES] == list(SHOWN)
    for recipe in RECIPES:
        apply(recipe, tree)


@pytest.mark.slow
def test_what_recipes_add_can_be_used_and_passes_the_checks(tree: Path) -> None:
    for recipe in RECIPES:
        apply(recipe, tree)
    run(CHECKS[0], tree)
    for recipe in RECIPES:
        output = "".join(run(command, tree) for command in recipe.commands if command != CHECKS[0])
        written = [path for pattern in WRITTEN for path in tree.glob(pattern)]
        assert SHOWN[recipe.name] in output + "".join(path.read_text() for path in written)
    known = ROOT / ".mypy_cache"  # `make check` has made it: mypy reads torch again without it
    if known.exists():
        shutil.copytree(known, tree / known.name)
    changed = {path for recipe in RECIPES for path in CHANGED.findall(recipe.patch)}
    for command in (*CHECKS[1:], f"mypy {' '.join(sorted(changed))}"):
        run(command, tree)
