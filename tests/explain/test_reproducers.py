"""explain on real failures: every reproducer, and variants of their logs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_doctor.explain.catalogue import BY_CODE
from tests.explain import reproducers
from tests.explain.explained import code_of, explain, explain_text, rank_of
from tests.explain.reproducers import Reproducer
from tests.explain.variants import FORMS
from tests.harness.processes import ROOT, clean_environment

pytestmark = pytest.mark.slow
_LIMIT_S = 900
_RUNS = ("healthy lines between", "docker", "torchrun tee", "colours", "much around", "ray")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all reproducers once; give the folder of their logs."""
    folder = tmp_path_factory.mktemp("logs")
    subprocess.run(
        [sys.executable, "-m", "tests.explain.reproducers", str(folder)],
        cwd=ROOT,
        env=clean_environment(),
        check=True,
        timeout=_LIMIT_S,
    )
    return folder


def mistakes(case: Reproducer, found: dict[str, object]) -> tuple[bool, bool]:
    """Say whether the cause is wrong, and whether a wrong rank is named."""
    rank = rank_of(found)
    is_wrong_rank = case.num_ranks > 1 and rank is not None and rank != case.guilty
    return code_of(found) != case.code, is_wrong_rank


@pytest.mark.timeout(_LIMIT_S)
class TestReproducers:
    def test_there_are_enough_and_each_entry_names_one_that_exists(self) -> None:
        cases = reproducers.load()
        codes = {case.code for case in cases.values()}
        assert len(codes) >= 60
        assert codes <= BY_CODE.keys()

    def test_each_real_log_is_explained(self, logs: Path) -> None:
        wrong = []
        for name, case in reproducers.load().items():
            found = explain(logs / f"{name}.log")
            named = rank_of(found) == case.guilty or case.num_ranks == 1
            if code_of(found) != case.code or not named:
                wrong.append(f"{name}: {code_of(found)}, rank {rank_of(found)}")
        assert not wrong

    def test_variants_keep_their_cause_and_never_get_a_wrong_rank(
        self, logs: Path, tmp_path: Path
    ) -> None:
        wrong, accused = [], []
        cases = reproducers.load()
        for name, case in cases.items():
            text = (logs / f"{name}.log").read_text(encoding="utf-8")
            for form in _RUNS:
                found = explain_text(FORMS[form](text), tmp_path)
                is_wrong, is_wrong_rank = mistakes(case, found)
                wrong += [f"{name}, {form}: {code_of(found)}"] * is_wrong
                accused += [f"{name}, {form}: rank {rank_of(found)}"] * is_wrong_rank
        num_variants = len(cases) * len(_RUNS)
        assert num_variants >= 150
        assert not accused
        assert len(wrong) <= 0.05 * num_variants, wrong
