"""docs/AUDIT.md: its commands are tested. Its tables are made from the catalogue (documents.py)."""

from tests.documents import AUDIT, README, commands_of


def test_its_commands_are_those_of_the_readme_which_a_test_runs() -> None:
    assert set(commands_of(AUDIT)) <= set(commands_of(README))
    assert list(commands_of(AUDIT))
