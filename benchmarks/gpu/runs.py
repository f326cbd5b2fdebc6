"""The parts of gpu_report.py that are whole runs: tests, faults, and the life of a run.

Owns their commands, and what makes each of them good. Each gives the lines of the report.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.equal_weights import hash_tensors
from benchmarks.gpu.row import MISS, OPEN, PASS, ROOT, TIMED_OUT, Done, Row, end_of, guarded, run

FIRST_DRILLS = ("kill-backward", "memory-forward", "stop-backward")
FIRST_DRILLS += ("memory-backward", "memory-optimizer")
NAN_DRILLS = ("nan-once", "nan-repeated")
_TESTS = "tests/step/test_gpu.py"
_TESTED = re.compile(rf"^{_TESTS}::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_VERDICTS = {"PASSED": PASS, "SKIPPED": OPEN}
_SCRIPT = ROOT / "ddp_training.py"
_STATES_GB = (1, 10)
_HANG_AFTER_S = 20.0
_NUM_SAVES = 3
_MOST_COPIES = 3  # the one that is kept, the one that is written, and a survivor's
_BYTES_PER_PARAMETER = 12  # weight and two of AdamW, in fp32


def first_contact(*, dry: bool, ends_at: float) -> Iterator[Row]:
    """Train; kill and resume; memory gone; a hang: what matters most, on two ranks over gloo."""
    names = FIRST_DRILLS[:3] if dry else FIRST_DRILLS
    yield from _drills(names, amp="off", dry=dry, ends_at=ends_at)


def first_tests(*, dry: bool, ends_at: float) -> Iterator[Row]:
    """Run the checks, and on a GPU tests/step/test_gpu.py."""
    flags = ["--device", "cpu"] if dry else []
    words: list[str | Path] = ["python", "-m", "benchmarks.gpu.checks", *flags]
    yield from _lines("the checks", words, ends_at)
    if dry:
        return
    if find_spec("pytest") is None:
        yield Row(_TESTS, "pytest is not installed (requirements-dev.txt)", OPEN)
        return
    command = ["python", "-m", "pytest", "-v", "-rA", _TESTS]
    # WHY: the ranks are forked from a process that has torch, which must not start the driver
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTEST_ADDOPTS": "", "PYTHONUNBUFFERED": "1"}
    done = run(command, limit_s=_left(ends_at), env=env)
    # with -v each test has a line as soon as it ends, so a run that was killed still counts
    found = dict(_TESTED.findall(done.output))
    for name, word in found.items():
        yield Row(name, "" if word == "PASSED" else word.lower(), _VERDICTS.get(word, MISS))
    if not found or set(found.values()) != {"PASSED"} or done.status:
        yield _verdict(_TESTS, done)


def faults(*, dry: bool, ends_at: float) -> Iterator[Row]:
    """Cause faults that only a GPU has, and NaN in 16 bits."""
    for name, cause in (("an assert", assert_on_device), ("the hook", memory_gone_in_the_hook)):
        with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
            yield from guarded(name, partial(_one, cause, Path(folder), dry=dry, ends_at=ends_at))
    for amp in ("bf16",) if dry else ("bf16", "fp16"):  # a CPU has no fp16
        yield from _drills(NAN_DRILLS[:1] if dry else NAN_DRILLS, amp=amp, dry=dry, ends_at=ends_at)


def _one(cause: Callable[..., Row], folder: Path, *, dry: bool, ends_at: float) -> Iterator[Row]:
    yield cause(folder, dry=dry, ends_at=ends_at)


def _drills(names: Sequence[str], *, amp: str, dry: bool, ends_at: float) -> Iterator[Row]:
    """Run drills with one undisturbed run; two ranks on one GPU, which only gloo allows."""
    flags = [*(["--cpu_only"] if dry else []), "--ranks", "2"]
    words: list[str | Path] = ["python", "-m", "benchmarks.gpu.drills", *names, "--amp", amp]
    found = list(_lines(f"drills, amp {amp}", [*words, *flags], ends_at))
    yield from found
    told = " ".join(row.what for row in found)
    yield from (
        Row(f"drill {name}, amp {amp}", "no time left in this part", OPEN)
        for name in names
        if f"drill {name}," not in told
    )


def _lines(what: str, words: Sequence[str | Path], ends_at: float) -> Iterator[Row]:
    """Run what prints a line for each of its rows, and give them, also if it is cut off."""
    done = run(words, limit_s=_left(ends_at))
    lines = [
        line.split("\t") for line in done.output.splitlines() if line[:5] in ("PASS\t", "MISS\t")
    ]
    rows = [Row(name, found, verdict) for verdict, name, found in lines]
    yield from rows
    if not rows or (done.status and all(row.verdict == PASS for row in rows)):
        yield _verdict(what, done)
    elif done.status:
        yield Row(f"{what} that failed", "what they wrote", "", _details(done, MISS))


def checkpoints(*, dry: bool, ends_at: float) -> Iterator[Row]:
    """Measure the stall of a checkpoint for 1 and 10 GB of state, and the time of a restart."""
    for size_gb in (0.001,) if dry else _STATES_GB:
        yield from guarded(
            f"a checkpoint of {size_gb} GB",
            partial(_checkpoints_of, size_gb, dry=dry, ends_at=ends_at),
        )
        with tempfile.TemporaryDirectory(prefix="gpu-report-", dir=_place()) as folder:
            cause = partial(survivor_save, size_gb=size_gb)
            yield from guarded(
                f"a survivor save of {size_gb} GB",
                partial(_one, cause, Path(folder), dry=dry, ends_at=ends_at),
            )


def _checkpoints_of(size_gb: float, *, dry: bool, ends_at: float) -> Iterator[Row]:
    name = f"a checkpoint of {size_gb} GB: how long it held up training"
    if too_little := _too_little(size_gb):
        yield Row(name, too_little, OPEN)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-report-", dir=_place()) as folder:
        argv = _argv(Path(folder), dry=dry, model=f"wide, {_shape(size_gb, dry=dry)}")
        # WHY so far apart: before one is begun, the one before it must be written
        every = 3 if dry else 300
        argv += ["--keep_last", "1", "--checkpoint_every_steps", str(every), "--epochs", "100"]
        num_steps = every * _NUM_SAVES + every // 2
        done = run([*argv, "--max_steps", str(num_steps)], limit_s=_left(ends_at))
        if done.status:
            yield _verdict(name, done)
            return
        [run_folder] = _runs(Path(folder))
        all_s = _checkpoint_s(run_folder)
        argv += ["--max_steps", str(num_steps + 1), "--run_name", run_folder.name]
        started_at = time.monotonic()
        done = run(argv, limit_s=_left(ends_at))
        took_s = time.monotonic() - started_at
        last_s = _checkpoint_s(run_folder) - all_s
        each = f"{max(0.0, all_s - last_s) / _NUM_SAVES:.2f} s each, of {_NUM_SAVES}"
        yield Row(name, f"{each}; {last_s:.1f} s the one at the end, which is waited for")
        found = f"{took_s:.1f} s from the command, over one step, to the end of its last save"
        verdict = _verdict(name, done).verdict
        verdict = MISS if verdict == PASS and "resuming" not in done.output else verdict
        yield Row(f"a restart with {size_gb} GB", found, verdict, _details(done, verdict))


def survivor_save(folder: Path, *, size_gb: float, dry: bool, ends_at: float) -> Row:
    """Kill a rank of two; give the seconds from the kill to the manifest of the survivor's save."""
    text = f"a survivor save of {size_gb} GB: from the kill of another rank to the manifest"
    if too_little := _too_little(size_gb):
        return Row(text, too_little, OPEN)
    mark = folder / "killed"
    model = f"killed, mark: {mark}, {_shape(size_gb, dry=dry)}"
    argv = _argv(folder / "runs", dry=dry, model=model, ranks=2)
    argv += ["--max_steps", "12", "--run_name", "run", "--checkpoint_every_epochs", "0"]
    argv += ["--checkpoint_every_steps", "0"]
    done = run(argv, limit_s=_left(ends_at))
    if done.status == TIMED_OUT:
        return _verdict(text, done)
    saved = list((folder / "runs").glob("run/checkpoints/step-*/manifest.json"))
    if not mark.exists() or not saved or done.status == 0:
        found = f"status {done.status}, {len(saved)} checkpoints"
        return Row(text, found, MISS, end_of(done.output))
    took_s = max(path.stat().st_mtime for path in saved) - mark.stat().st_mtime
    return Row(text, f"{took_s:.1f} s", PASS)


def memory_gone_in_the_hook(folder: Path, *, dry: bool, ends_at: float) -> Row:
    """Memory is gone where DDP's hook allocates: the step is retried, and no rank hangs."""
    text = "memory gone in the communication hook: the step is retried"
    mark = folder / "happened"
    argv = _argv(folder / "runs", dry=dry, model=f"hook, mark: {mark}, width: 1024", ranks=2)
    argv += ["--max_steps", "12", "--comm_hook", "fp16", "--hang_after_s", f"{_HANG_AFTER_S:.0f}"]
    limit_s = _left(ends_at)
    done = run(argv, limit_s=limit_s)
    if done.status == TIMED_OUT:
        # WHY: cut off before the hang watch could have spoken, it says nothing
        is_hang = mark.exists() and limit_s >= 3 * _HANG_AFTER_S
        found = f"killed after {limit_s:.0f} s"
        return Row(text, found, MISS if is_hang else OPEN, end_of(done.output))
    is_good = done.status == 0 and mark.exists() and (dry or "retrying step" in done.output)
    found = f"status {done.status}"
    return Row(text, found, PASS if is_good else MISS, "" if is_good else end_of(done.output))


def life_of_a_run(*, dry: bool, ends_at: float) -> Iterator[Row]:
    """Evaluate, export, resume bitwise with --deterministic; the recorder of NCCL."""
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as name:
        folder = Path(name)
        yield from guarded("a resume", partial(_resumes, folder, dry=dry, ends_at=ends_at))
        place = folder / "whole" / "run"
        amp = ["--cpu_only"] if dry else []
        yield _tried("evaluate", ["python", _SCRIPT, "evaluate", place, *amp], ends_at)
        words = ["python", _SCRIPT, "export", place, "--output", folder / "export"]
        yield _tried("export", words, ends_at)
        argv = [*_argv(folder / "segments", dry=dry, model="images"), "--max_steps", "7"]
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        yield _tried("expandable_segments: 7 steps", argv, ends_at, env=env)
    text = "the flight recorder's dump when a collective of NCCL times out"
    yield Row(text, "needs two GPUs: NCCL does not run two ranks on one", OPEN)


def _resumes(folder: Path, *, dry: bool, ends_at: float) -> Iterator[Row]:
    flags = ["--deterministic", "--channels_last", "--lr_schedule", "constant"]
    flags += ["--checkpoint_every_steps", "5"]
    for kind, steps in (("whole", (20,)), ("parts", (7, 20))):
        for num in steps:
            argv = _argv(folder / kind, dry=dry, model="images")
            argv += [*flags, "--max_steps", str(num), "--run_name", "run"]
            row = _tried(f"{kind}: {num} steps", argv, ends_at)
            if row.verdict != PASS:
                yield row
                return
    same = _weights(folder / "whole") == _weights(folder / "parts")
    text = "stopped after 7 of 20 steps, and continued: the same weights, bit for bit"
    yield Row(text, "equal" if same else "different", PASS if same else MISS)


def assert_on_device(folder: Path, *, dry: bool, ends_at: float) -> Row:
    """An index out of range fails in a kernel, while a checkpoint is being written.

    The model has a BatchNorm, whose statistics that step may have moved. The run ends with its
    cause, and a re-run finishes.
    """
    text = "a device-side assert ends the run with its cause, and the same command finishes it"
    mark, width = folder / "happened", 32 if dry else 4096
    argv = _argv(folder / "runs", dry=dry, model=f"asserts, mark: {mark}, width: {width}")
    argv += ["--max_steps", "12", "--run_name", "run", "--checkpoint_every_steps", "1"]
    first = run(argv, limit_s=_left(ends_at))
    second = run(argv, limit_s=_left(ends_at))
    if TIMED_OUT in (first.status, second.status):
        return _verdict(text, first if first.status == TIMED_OUT else second)
    is_told = "DDP-" in first.output or dry  # on the CPU the step is only retried
    is_good = is_told and mark.exists() and second.status == 0 and (dry or first.status != 0)
    found = f"status {first.status}, then {second.status}"
    output = f"{first.output}\n--- again ---\n{second.output}"
    return Row(text, found, PASS if is_good else MISS, "" if is_good else end_of(output))


def _place() -> Path:
    return ROOT.parent if os.access(ROOT.parent, os.W_OK) else Path(tempfile.gettempdir())


def _too_little(size_gb: float) -> str:
    """Say that there is not room enough on the disk; empty: there is."""
    free_gb = shutil.disk_usage(_place()).free / 1e9
    is_enough = free_gb >= _MOST_COPIES * size_gb + 1
    return "" if is_enough else f"{free_gb:.0f} GB free in {_place()}: too little"


def _shape(size_gb: float, *, dry: bool) -> str:
    """Return the arguments of a model whose state has so many GB."""
    width = 256 if dry else 4096
    depth = max(1, round(size_gb * 1e9 / _BYTES_PER_PARAMETER / width**2))
    return f"width: {width}, depth: {depth}"


def _argv(folder: Path, *, dry: bool, model: str, ranks: int = 1) -> list[str | Path]:
    """Return the command of a run with one of the models in trials.py."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv: list[str | Path] = ["python", *(launcher if ranks > 1 else [])]
    argv += [_SCRIPT, "--no_config"]
    # WHY gloo: NCCL refuses two ranks on one GPU
    on_gpu = ["--backend", "gloo"] if ranks > 1 else ["--single_gpu"]
    # WHY no workers: each run of them imports torch once more
    argv += ["--cpu_only", "--no_shared_memory", "--num_workers", "0"] if dry else on_gpu
    argv += ["--dataset", "synthetic", "--dataset_args", "{num_samples: 512, image_size: 16}"]
    # WHY the rate: these models are deep and wide, and with the default of it some of them diverge
    argv += ["--batch_size", "8", "--learning_rate", "1e-6", "--eval_every", "0"]
    argv += ["--output_dir", folder]
    argv += ["--model", "benchmarks.gpu.trials:build", "--model_args", f"{{kind: {model}}}"]
    return argv


def _tried(
    what: str, words: list[str | Path], ends_at: float, *, env: Mapping[str, str] | None = None
) -> Row:
    if _left(ends_at) < 5:
        return Row(what, "no time left in this part", OPEN)
    started_at = time.monotonic()
    done = run(words, limit_s=_left(ends_at), env=env)
    return _verdict(what, done, seconds=time.monotonic() - started_at)


def _verdict(what: str, done: Done, *, seconds: float | None = None) -> Row:
    verdict = {0: PASS, TIMED_OUT: OPEN}.get(done.status, MISS)
    took = "" if seconds is None else f", {seconds:.0f} s"
    return Row(what, f"status {done.status}{took}", verdict, _details(done, verdict))


def _details(done: Done, verdict: str) -> str:
    return "" if verdict == PASS else end_of(done.output)


def _checkpoint_s(run_folder: Path) -> float:
    """Return how long checkpoints have held up a run so far, over all its attempts."""
    account = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))["time"]
    return float(account["checkpoint"])


def _runs(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("[!.]*/summary.json")]


def _weights(folder: Path) -> dict[str, object]:
    """Return the fingerprint of each tensor of the last checkpoint, of model and optimizer."""
    newest = max(folder.glob("run/checkpoints/step-*/manifest.json")).parent
    return hash_tensors(newest / "state.safetensors")


def _left(ends_at: float) -> float:
    return max(1.0, ends_at - time.monotonic())
