"""Take one thing away at a time, and see whether a test notices:  python -m tests.mutate

Owns a copy of the working tree, in which each entry of mutations.txt is made in turn, and its tests
are run: first those that are not slow, then, if all of them pass, the slow ones too. An entry that
nobody notices ends the command with status 1: mend the test, or add one.

An entry has a title, === FILE: ARGUMENTS OF PYTEST, the file from the root of the repository or in
hardened_ddp/; after - the lines that stand there exactly once, after + what takes their place. They
are parts of lines, unless a - or + alone ends them.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness.processes import ROOT, clean_environment

TIMEOUT_S = 900.0
_FAILED, _NONE_SELECTED = 1, 5  # exit statuses of pytest


class Mutation(NamedTuple):
    file: str
    tests: str
    old: str
    new: str

    def path_in(self, tree: Path) -> Path:
        """Find the file in a working tree."""
        path = tree / self.file
        return path if path.exists() else tree / "hardened_ddp" / self.file


def read_mutations() -> Iterator[Mutation]:
    text = Path(__file__).with_name("mutations.txt").read_text(encoding="utf-8")
    for entry in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        title, *lines = entry.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        file, _, tests = title.partition(": ")
        yield Mutation(file, tests, old, new)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("words", nargs="*", help="only entries whose file or text has one of them")
    asked = parser.parse_args()
    words = asked.words or [""]
    wanted = [m for m in read_mutations() if any(word in f"{m.file} {m.old}" for word in words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(ROOT, tree)
        for mutation in wanted:
            by = noticed_by(tree, mutation, quick=asked.quick)
            unnoticed += by is None
            old, new = (" ".join(text.split()) for text in (mutation.old, mutation.new))
            print(f"{mutation.file}: {old} -> {new}: {by or 'NOBODY NOTICED'}", flush=True)
    print(f"{len(wanted) - unnoticed} of {len(wanted)} noticed")
    return 1 if unnoticed else 0


def copy_tree(source: Path, target: Path) -> None:
    """Copy what git knows of a working tree, as it is now."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(argv, cwd=source, text=True, timeout=180)
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def noticed_by(tree: Path, mutation: Mutation, *, quick: bool = False) -> str | None:
    """Make the mutation in tree, run its tests, and take it back; give the test that failed."""
    path = mutation.path_in(tree)
    whole = path.read_text(encoding="utf-8")
    if whole.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} has {whole.count(mutation.old)} x {mutation.old!r}")
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        for marks in ("not slow",) if quick else ("not slow", "slow"):
            if by := failing_test(tree, [*shlex.split(mutation.tests), "-m", marks]):
                return by
    finally:
        path.write_text(whole, encoding="utf-8")
    return None


def failing_test(tree: Path, arguments: Sequence[str]) -> str:
    """Run pytest in tree; give the first test that fails, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    how = {"timeout": TIMEOUT_S, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=tree, env=clean_environment(), **how)
    if done.returncode in (0, _NONE_SELECTED):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != _FAILED or not failed:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].split(" - ")[0].split(" ", 1)[1].rpartition("/")[2]


if __name__ == "__main__":
    sys.exit(main())
