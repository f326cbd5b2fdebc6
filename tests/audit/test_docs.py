"""docs/AUDIT.md tells the verdicts that there are, as the code has them."""

from ddp_doctor.audit.catalogue import CATALOGUE
from tests.documents import AUDIT, README, commands_of, table_rows


def test_the_tables_are_the_catalogue() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table_rows(AUDIT, cells=4)}
    rows.pop("code", None)
    rows.pop("---", None)
    told = {
        code: [kind.severity, kind.meaning, kind.fix.replace("|", "/")]
        for code, kind in CATALOGUE.items()
    }
    assert {code: rows.get(code) for code in told} == told
    assert set(rows) == set(told)


def test_its_commands_are_those_of_the_readme_which_a_test_runs() -> None:
    assert set(commands_of(AUDIT)) <= set(commands_of(README))
    assert list(commands_of(AUDIT))
