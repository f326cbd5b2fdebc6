"""What a file, a name or an exception says is printed, and changes nothing in the terminal."""

import json
import re
from pathlib import Path

import pytest

from hardened_ddp.settings.wording import printable
from tests.harness.processes import clean_environment
from tests.harness.ranks import run_program, train
from tests.marks import slow_after
from tests.run_folder import only_run

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\r"
GOOD = "größer 漢字 🙂"


def test_controls_are_escaped_and_ordinary_text_is_not() -> None:
    assert printable(f"{GOOD}\n\tat line 3") == f"{GOOD}\n\tat line 3"
    assert printable("a\x1b[1mb\x85\u202ec\x7f") == "a\\u001b[1mb\\u0085\\u202ec\\u007f"
    assert printable("a\r\nb\rc") == "a\nb\\u000dc"
    assert json.loads(printable(json.dumps({"a": EVIL}, ensure_ascii=False))) == {"a": EVIL}
    for code in range(0x11000):
        found = printable(f"{chr(code)}")
        assert not CONTROLS.search(found)
        assert found == chr(code) or not chr(code).isprintable()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("printed")
    argv = ["--cpu_only", "--max_steps", "4", "--checkpoint_every_steps", "2", "--ledger"]
    train([*argv, "--output_dir", output]).ok()
    run = only_run(output)
    status = run / "status" / "rank-0.json"
    told = json.loads(status.read_text())
    process = {**told["process"], "host": EVIL + GOOD}
    told |= {"state": "failed", "phase": EVIL, "device": EVIL, "device_name": EVIL + GOOD}
    status.write_text(json.dumps({**told, "process": process}) + "\n")
    best = {"schema": 1, "step": 4, "metric": EVIL + GOOD, "value": 0.5}
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    (run / "summary.json").unlink()
    with (run / "logs" / "rank-0.log").open("a", encoding="utf-8") as log:
        log.write(f"2026-01-01 00:00:00.000 WARNING hardened_ddp.step: {GOOD}{EVIL}\n")
        log.write(f"2026-01-01 00:00:00.000 ERROR hardened_ddp: [DDP-D01] {GOOD}{EVIL}\n")
        log.write(f"Traceback (most recent call last):\nValueError: {GOOD}{EVIL}\n")
    return run


@pytest.mark.parametrize(
    "words",
    slow_after(4, ["watch RUN --once", "explain RUN", "report RUN --output OUT", "--MISSING 1",
     "explain RUN --json", "verify-ledger RUN", "--config MISSING", "audit --source MISSING"]),
)  # fmt: skip
def test_a_command_prints_no_control_character(words: str, hostile: Path, tmp_path: Path) -> None:
    places = {"RUN": hostile, "OUT": tmp_path / (EVIL + GOOD), "MISSING": f"no{EVIL}{GOOD}"}
    argv = ["python", "ddp_training.py"]
    for word in words.split():
        place = next((name for name in places if name in word), "")
        argv.append(word.replace(place, str(places[place])) if place else word)
    env = clean_environment({"PYTHONIOENCODING": "utf-8"})
    finished = run_program(argv, timeout_s=60, env=env)
    for text in (finished.stdout, finished.stderr):
        assert not CONTROLS.search(text), ascii(CONTROLS.sub("<BAD>", text))
    if words == "explain RUN":
        assert GOOD in finished.stdout
    if "--json" in words:
        json.loads(finished.stdout)


def test_a_run_tells_what_a_dataset_raised_without_its_controls(tmp_path: Path) -> None:
    argv = ["--dataset", "tests.plugins:points_that_write", "--cpu_only", "--num_workers", "0"]
    finished = train([*argv, "--output_dir", tmp_path])
    assert all(finished.statuses)
    assert "it can't be read" in finished.output
    log = (only_run(tmp_path) / "logs" / "rank-0.log").read_text(encoding="utf-8")
    for text in (finished.output, log):
        assert not CONTROLS.search(text), ascii(text)
        assert "\\u001b]0;owned\\u0007" in text
        assert text.count("\n") >= 2  # the lines stay
