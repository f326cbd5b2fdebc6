"""explain on composed, real and short logs: causes, forms, files, healthy logs, and no logs.

The short ones are in short_logs.txt: after the title of each stand the verdict and, if that
matters, of whom. What logs.made_of() fills in begins with @; @says has words of the answer.
"""

import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_training
from ddp_doctor.explain.catalogue import BY_CODE, CAUSES
from ddp_doctor.explain.matching import Matcher
from ddp_doctor.explain.reader import Search
from tests.explain import logs, reproducers
from tests.explain.logs import FORMS, code_of, explain, explain_text, joined, rank_of, timeouts
from tests.harness.processes import ROOT, clean_environment
from tests.marks import sections, slow_after

SPOKEN_BY_RANK = 3
_FORMS = ("as it is", "healthy lines between", "docker", "torchrun tee", "colours", "much around")
KEY_ERROR = logs.traceback_of("KeyError: 'label'")


class TestCatalogue:
    def test_each_cause_of_all_families_has_a_program_a_log_or_the_reason_why_not(self) -> None:
        others = [cause for cause in CAUSES if not cause.code.startswith(("DDP-", "python-"))]
        assert len(others) >= 150
        assert len({cause.code for cause in CAUSES}) == len(CAUSES)
        programs = reproducers.load().values()
        shown = {case.code for case in (*programs, *logs.LOGS)}
        assert {cause.code for cause in others} - shown == logs.WITHOUT_LOG.keys()

    def test_every_phrase_compiles_and_the_first_search_finds_its_lines(self) -> None:
        search = Search(Matcher(CAUSES).words())
        for case in logs.LOGS:
            assert search.line_starts(case.text.encode()), case.code
        for phrase in [phrase for cause in CAUSES for phrase in cause.phrases]:
            re.compile(phrase)


def test_what_a_log_says_beside_a_message_chooses_the_remedy(tmp_path: Path) -> None:
    shown = set()
    for line in Path(__file__).with_name("cases.txt").read_text(encoding="utf-8").splitlines():
        code, begin, text = line.split(" | ", 2)
        found = explain_text(text.replace("\\n", "\n"), tmp_path)
        fix = found["fixes"][0]["text"] if found["fixes"] else ""
        assert (code_of(found), fix[: len(begin)]) == (code, begin), text
        shown.add((code, fix))
    assert {(cause.code, fix) for cause in CAUSES for _, _, fix in cause.cases} <= shown


@pytest.mark.parametrize("form", slow_after(1, FORMS))
def test_a_cause_is_found_in_every_form_of_its_log(form: str, tmp_path: Path) -> None:
    wrong = []
    # Each log as it is, and in every third of the other forms.
    place = [*FORMS].index(form)
    for case in logs.LOGS[place % 3 :: 3] if place else logs.LOGS:
        found = explain_text(FORMS[form](logs.log_of(case, rank=SPOKEN_BY_RANK, other=5)), tmp_path)
        rank = rank_of(found)
        if code_of(found) != case.code or not is_right(case, rank, form):
            wrong.append(f"{case.code}: {code_of(found)}, rank {rank}")
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_log_is_explained_in_every_form_and_no_wrong_rank_is_named(tmp_path: Path) -> None:
    cases = reproducers.load()
    codes = {case.code for case in cases.values()}
    assert len(codes) >= 60
    assert codes <= BY_CODE.keys()
    command = [sys.executable, "-m", "tests.explain.reproducers", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, timeout=900)
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


def is_right(case: logs.Composed, rank: int | None, form: str) -> bool:
    if case.code == "nccl-store-get":
        return rank == 0
    if case.kind == "line" or (form == "cut at the top" and rank is None):
        return rank is None or form in ("srun on one task", "torchrun tee", "mpirun")
    return rank == (SPOKEN_BY_RANK if case.kind == "rank" else None)


def entry(seq: int, name: str, **more: object) -> dict[str, object]:
    """Make a collective of a flight recorder's dump."""
    found = {"collective_seq_id": seq, "profiling_name": name, "input_sizes": [[4, 8]]}
    return {**found, "process_group": ("0", "default_pg"), **more}


FOLDERS = sections(Path(__file__).with_name("folders.txt"))
"""Of each its files, in the form of short_logs.txt, and as the last words of its title the verdict
and the rank."""


class TestFiles:
    @pytest.mark.parametrize("name", FOLDERS)
    def test_files_of_one_job_tell_of_it_and_of_its_rank(self, name: str, tmp_path: Path) -> None:
        says, *files = re.split(r"^--- ", FOLDERS[name], flags=re.M)
        for place, _, text in (file.partition("\n") for file in files):
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place).write_text(logs.made_of(text)[0])
        (tmp_path / "link.log").symlink_to("a" * 300)  # it can't be asked what it leads to
        found = explain(tmp_path)
        assert f"{code_of(found)} of {rank_of(found)}" == name.rpartition(": ")[2]
        assert all(word in json.dumps(found) for word in logs.made_of(says)[1])

    def test_a_pipe_of_the_shell_is_read_once(self) -> None:
        reader, writer = os.pipe()
        os.write(writer, joined(KEY_ERROR).encode())
        os.close(writer)
        try:
            assert code_of(explain(Path(f"/dev/fd/{reader}"))) == "python-keyerror"
        finally:
            os.close(reader)

    @pytest.mark.parametrize(("newest", "guilty"), [((7, 7, 6), 2), ((7, 7, 7), None)])
    def test_flight_recorder_dumps_name_the_rank_that_is_behind(
        self, newest: tuple[int, ...], guilty: int | None, tmp_path: Path
    ) -> None:
        for rank, last in enumerate(newest):
            states = {seq: "completed" if seq < 7 else "started" for seq in range(3, last + 1)}
            entries = [entry(seq, "nccl:all_reduce", state=state) for seq, state in states.items()]
            dump = {"version": "2.10", "entries": entries}
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("nccl-timeout", guilty)

    @pytest.mark.parametrize(
        ("last", "code", "guilty"),
        [
            ([("all_reduce", False), None], "nccl-timeout", 1),
            ([("all_reduce", True), ("broadcast", False)], "collective-mismatch", None),
        ],
    )
    def test_dumps_of_gloo_have_no_states(
        self, last: list[tuple[str, bool] | None], code: str, guilty: int | None, tmp_path: Path
    ) -> None:
        """Every entry stays scheduled: what is done is said by retired, and by pg_status."""
        for rank, call in enumerate(last):
            calls = [*[("all_reduce", seq == 2) for seq in range(1, 4)], *([call] if call else [])]
            entries = [
                entry(seq, f"gloo:{op}", state="scheduled", retired=is_retired, is_p2p=False)
                for seq, (op, is_retired) in enumerate(calls, start=1)
            ]
            status = {"0": {"last_completed_collective": 3}}
            dump = {"version": "2.10", "entries": entries, "pg_status": status}
            (tmp_path / f"my_dump_{rank}").write_bytes(pickle.dumps(dump))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == (code, guilty)

    def test_a_pickle_with_code_in_it_is_not_run(self, tmp_path: Path) -> None:
        class Bad:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (tmp_path / "ran",))

        (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Bad()]}))
        explain(tmp_path / "nccl_trace_rank_0")
        assert not (tmp_path / "ran").exists()

    def test_gzip_and_utf_16(self, tmp_path: Path) -> None:
        text = joined(KEY_ERROR)
        (tmp_path / "a.log.gz").write_bytes(gzip.compress(text.encode()))
        (tmp_path / "b.log").write_bytes(text.encode("utf-16"))
        for name in ("a.log.gz", "b.log"):
            assert code_of(explain(tmp_path / name)) == "python-keyerror", name

    def test_what_can_not_be_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ddp_training.main(["explain", str(tmp_path / "none.log")]) == 2
        assert "none.log can't be read" in capsys.readouterr().err
        assert ddp_training.main(["explain", str(tmp_path)]) == 2
        (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 9999)[:20])
        assert ddp_training.main(["explain", str(tmp_path / "cut.gz")]) == 2
        for content in (b"", b"\n \n", b"\0\xff\xfe"):
            (tmp_path / "job.log").write_bytes(content)
            assert ddp_training.main(["explain", str(tmp_path / "job.log")]) == 2
            assert "job.log: no text in it" in capsys.readouterr().err


OTHERS_OF_1000 = [f"[rank{rank}]: step 7 | loss 2.5" for rank in range(2, 1000)]
OTHERS_OF_4 = [f"<gpu-a.{number}/12:30:07> step 7" for number in range(4)]
SUB_GROUP = ("PG ID 0 PG GUID 0(default_pg)", "PG ID 5 PG GUID 37(TENSOR)")
ITS_PLACE = "PG ID 3 PG GUID 7(TENSOR) Rank 0]  failure"
OTHER_GROUP = logs.waiting("ALLREDUCE 18233, ALLREDUCE 18233, ALLGATHER 12, ALLREDUCE 18233")
OTHER_GROUP = OTHER_GROUP.replace("PG ID 0 PG GUID 0(default_pg) Rank 2]  failure", ITS_PLACE)
IN_IT = "@says rank 2 in ALLGATHER number 12 of 9801523 elements, of another group"
# fmt: off
LONG_OR_CHANGED = {
    "a line of each of 1000 ranks between those of a traceback: python-keyerror of rank 1":
        joined(*([line, *OTHERS_OF_1000] for line in logs.of_rank(1, KEY_ERROR))),
    "a rank whose line was cut off: nccl-timeout of nobody":
        joined(["@says nothing is known of rank 7"],
               timeouts(dict.fromkeys(range(8), 808), world_size=8).splitlines()[:9]),
    "an operation that was cut off is no other one: nccl-timeout of nobody":
        logs.waiting("ALLREDUCE 90, ALLREDUCE 90, ALLREDUCE 90, untold").rpartition("EDUCE")[0],
    "numbers of different groups are not compared: nccl-timeout":
        f"{IN_IT}\n{OTHER_GROUP}",
    "a rank that says nothing, for which one in another group may wait: nccl-timeout of rank 1":
        joined([line for line in OTHER_GROUP.splitlines() if "[rank1]" not in line]),
    "of two ranks one has another size, and nobody knows which: collective-mismatch of nobody":
        logs.with_other_size(timeouts({0: 90, 1: 90}, world_size=2), rank=1),
    "ranks of a sub-group are not those of the job: nccl-timeout of nobody":
        timeouts({0: 90, 1: 90, 3: 90}, world_size=8).replace(*SUB_GROUP),
    "a rank that may be in no such sub-group: nccl-timeout of nobody":
        timeouts({0: 90, 1: 90, 2: 90}, world_size=4).replace(*SUB_GROUP),
    "a prefix that nobody knows, with numbers that are no rank: python-keyerror of nobody":
        joined(["@says train.py:37"],
               *([f"<gpu-a.3/12:30:05> {line}", *OTHERS_OF_4] for line in KEY_ERROR)),
    "what was logged, long before the exception that ended it: python-valueerror of nobody":
        joined(logs.traceback_of("requests.ConnectionError: Max retries exceeded with url: /a"),
               ["step 0", "step 1", "step 2"], logs.traceback_of("ValueError: differs in length"),
               80 * [60 * "="]),
    "of many error lines the last one counts, after words of success, too: unknown":
        joined(["{'train_runtime': 12.1}", ""],
               *([f"ERROR: could not upload part {n}", f"step {n}"] for n in range(40)),
               ["ERROR: giving up"]),
}
# fmt: on
ANSWER = ("guilty", "cause", "evidence", "later", "near", "exceptions", "confidence")
SHORT_LOGS = {**sections(Path(__file__).with_name("short_logs.txt")), **LONG_OR_CHANGED}


@pytest.mark.parametrize("name", SHORT_LOGS)
def test_the_cause_and_the_rank_at_fault(name: str, tmp_path: Path) -> None:
    text, words = logs.made_of(SHORT_LOGS[name])
    found = explain_text(text, tmp_path)
    whose = "nobody" if (rank := rank_of(found)) is None else f"rank {rank}"
    assert name.rpartition(": ")[2] in (code_of(found), f"{code_of(found)} of {whose}")
    answer = json.dumps({part: found[part] for part in ANSWER})
    assert not [word for word in words if word not in answer]


@pytest.mark.parametrize("name", logs.HEALTHY)
def test_a_healthy_log_is_not_called_failed(name: str, tmp_path: Path) -> None:
    found = explain_text(logs.HEALTHY[name], tmp_path)
    assert found["verdict"] == ("healthy" if name in logs.ENDED else "open")
    assert found["cause"] is None


def test_of_the_waiting_ranks_own_log_nothing_is_concluded(tmp_path: Path) -> None:
    for rank in (1, 2):
        lines = timeouts({rank: 90}, world_size=3).splitlines()
        text = "\n".join([*lines[:2], "Saving the last epoch", *lines[2:]])
        (tmp_path / f"rank-{rank}.log").write_text(text)
    assert "while the others wait" not in explain(tmp_path)["cause"]["headline"]


class TestFuzz:
    @pytest.mark.parametrize("seed", slow_after(1, range(2)))
    def test_random_bytes_never_raise(self, seed: int, tmp_path: Path) -> None:
        chance = random.Random(seed)
        text = joined(logs.of_rank(1, KEY_ERROR)) + timeouts({0: 1, 1: 2}, world_size=2)
        data = bytearray((text + logs.block_of({1: -9}, root=1)).encode() * 4)
        for _ in range(400):
            data[chance.randrange(len(data))] = chance.randrange(256)
        for _ in range(20):
            start = chance.randrange(len(data))
            del data[start : start + chance.randrange(40)]
        log = tmp_path / "broken.log"
        log.write_bytes(bytes(data) + chance.randbytes(50_000))
        explain(log)

    def test_a_line_of_10_mb_and_20_mb_of_training_output_around_it(self, tmp_path: Path) -> None:
        log = tmp_path / "large.log"
        line = b"epoch 3 step 123 | loss 2.345 | lr 3e-4 | grad_norm 1.2 | tokens/s 123456\n"
        half = line * (10_000_000 // len(line))
        raised = joined(logs.of_rank(1, KEY_ERROR)).encode()
        log.write_bytes(half + b"x" * 10_000_000 + b"\n" + raised + half)
        found = explain(log)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)
        assert found["evidence"][0]["line"] == len(half) // len(line) + 1 + len(KEY_ERROR)
