"""explain on real failures: every reproducer, and variants of their logs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_doctor.explain.catalogue import BY_CODE
from tests.explain import reproducers
from tests.explain.explained import code_of, explain_text, rank_of
from tests.explain.variants import FORMS
from tests.harness.processes import ROOT, clean_environment

_LIMIT_S = 900
_FORMS = ("as it is", "healthy lines between", "docker", "torchrun tee", "colours", "much around")


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
def test_a_real_log_is_explained_in_every_form_and_no_wrong_rank_is_named(tmp_path: Path) -> None:
    cases = reproducers.load()
    codes = {case.code for case in cases.values()}
    assert len(codes) >= 60
    assert codes <= BY_CODE.keys()
    command = [sys.executable, "-m", "tests.explain.reproducers", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, timeout=_LIMIT_S)
    wrong, changed = [], []
    for name, case in cases.items():
        text = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        for form in _FORMS:
            found = explain_text(FORMS[form](text), tmp_path)
            rank = rank_of(found) if case.num_ranks > 1 else case.guilty
            is_known = (code_of(found), rank) == (case.code, case.guilty)
            said = f"{name}, {form}: {code_of(found)}, rank {rank}"
            if rank not in (None, case.guilty) or (form == "as it is" and not is_known):
                wrong.append(said)
            elif code_of(found) != case.code:
                changed.append(said)
    assert not wrong
    assert len(changed) <= 0.05 * len(cases) * len(_FORMS), changed
