"""The benchmark that compares the weights of two checkouts: what counts as equal."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import equal_weights
from benchmarks.equal.ranks import Ranks
from benchmarks.equal_weights import Checkout, Kept, differing, hash_tensors
from tests.harness.processes import ROOT


def write_tensors(path: Path, tensors: dict[str, bytes], **more: object) -> dict[str, str]:
    """Write U8 tensors as a safetensors file, in this order, and give their hashes."""
    header: dict[str, object] = {}
    begin = 0
    for name, data in tensors.items():
        offsets = [begin, begin + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        begin += len(data)
    text = json.dumps(header | more).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return hash_tensors(path)


def test_the_order_of_tensors_in_a_file_does_not_count(tmp_path: Path) -> None:
    first = write_tensors(tmp_path / "a", {"model.a": b"12", "optimizer.a.step": b"3"})
    meta = {"__metadata__": {"format": "pt"}}
    second = write_tensors(tmp_path / "b", {"optimizer.a.step": b"3", "model.a": b"12"}, **meta)
    assert differing(first, second) == []


def test_one_byte_another_name_and_another_dtype_are_named(tmp_path: Path) -> None:
    first = write_tensors(tmp_path / "a", {"optimizer.a.step": b"3", "model.a": b"12"})
    second = write_tensors(tmp_path / "b", {"optimizer.a.step": b"4", "model.b": b"12"})
    assert differing(first, second) == ["model.a", "model.b", "optimizer.a.step"]
    assert differing(first, first | {"model.a": first["model.a"].replace("U8", "I8")})


def test_a_setting_is_given_by_the_name_that_a_checkout_knows() -> None:
    older = Checkout(Path(), "abc", "  --recovery on|off   When one rank fails")
    newer = Checkout(Path(), "def", "  --step_retry on|off   When one rank fails")
    assert older.translate(["--step_retry", "off"]) == ["--recovery", "off"]
    assert newer.translate(["--step_retry", "off"]) == ["--step_retry", "off"]


def test_what_was_kept_is_taken_for_the_same_commit_only(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    Kept(file, "abc").add("resume", {"model.a": "1"})
    assert Kept(file, "abc").facts == {"resume": {"model.a": "1"}}
    assert Kept(file, "def").facts == {}
    Kept(file, "def+").add("resume", {"model.a": "2"})
    assert Kept(file, "abc").facts == {"resume": {"model.a": "1"}}


@pytest.mark.slow
def test_the_same_code_is_equal_and_other_numbers_are_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    for name in ("hardened_ddp", "ddp_drills"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "ddp_training.py", copy)
    monkeypatch.setattr(sys, "argv", ["equal_weights.py", str(copy), "--only", "1r"])
    monkeypatch.setattr(equal_weights, "AT_A_TIME", 1)
    with Ranks() as ranks:  # one for all: it takes seconds to start
        monkeypatch.setattr(equal_weights, "Ranks", lambda: nullcontext(ranks))
        assert equal_weights.main() == 0
        assert "  equal\n1 of 1 runs are equal\n" in capsys.readouterr().out
        with (copy / "hardened_ddp" / "model" / "schedule.py").open("a", encoding="utf-8") as file:
            file.write("\n\n_rate = learning_rate\n\n\ndef learning_rate(*given, **facts):\n")
            file.write("    return _rate(*given, **facts) * 1.000001\n")
        assert equal_weights.main() == 1
    said = capsys.readouterr().out
    assert "  DIFFERENT: model." in said
    assert "0 of 1 runs are equal" in said
