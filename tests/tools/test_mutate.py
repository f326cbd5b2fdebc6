"""The tool that takes things away tells what a test notices from what nobody notices."""

from pathlib import Path

import pytest

from tests.mutate import noticed_by
from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


def test_each_mutation_stands_in_the_code_once() -> None:
    gone = [
        f"{mutation.file}: {mutation.old}"
        for mutation in MUTATIONS
        if mutation.path_in(ROOT).read_text(encoding="utf-8").count(mutation.old) != 1
    ]
    assert not gone


@pytest.mark.slow
def test_what_nobody_notices_is_told_and_each_mutation_is_taken_back(tmp_path: Path) -> None:
    code = tmp_path / "hardened_ddp" / "parity.py"
    code.parent.mkdir()
    code.write_text("def is_odd(number):\n    return number % 2 == 1\n")
    test = (
        "from hardened_ddp.parity import is_odd\n\ndef test_three_is_odd():\n    assert is_odd(3)\n"
    )
    (tmp_path / "test_parity.py").write_text(test)

    def noticed(old: str, new: str) -> str | None:
        return noticed_by(tmp_path, Mutation("parity.py", old, new, "test_parity.py"), quick=True)

    assert noticed("== 1", "== 0") == "test_parity.py::test_three_is_odd"
    assert noticed("number % 2 == 1", "number % 2") is None
    assert "return number % 2 == 1" in code.read_text()
    with pytest.raises(SystemExit, match="0 x"):
        noticed("is_even", "")
