"""What mutate.py takes away, one at a time, and the tests that should notice it."""

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    """From the root of the repository, or in hardened_ddp/."""

    old: str
    """It stands there exactly once."""

    new: str
    tests: str
    """Arguments of pytest."""

    def path_in(self, tree: Path) -> Path:
        """Find the file in a working tree."""
        path = tree / self.file
        return path if path.exists() else tree / "hardened_ddp" / self.file


SAMPLER = "tests/data/test_sampler.py"
LEDGER = "tests/data/test_ledger.py"
DATASETS = "tests/data/test_datasets.py"
LOADER = "tests/data/test_loader.py"
FAULTS = "tests/data/test_data_faults.py"
DOWNLOAD = "tests/data/test_download.py"
REPORTING = "tests/reporting/test_reporting.py"
GOODPUT = "tests/reporting/test_goodput.py"
NUMBERS = "tests/guard/test_numbers.py"
FILES = "tests/checkpoint/test_checkpoint_files.py"
HOSTILE = "tests/checkpoint/test_checkpoint_faults.py"
CRASHES = "tests/checkpoint/test_checkpoint_crashes.py"
TENSORS = "tests/checkpoint/test_checkpoint_tensors.py"
SNAPSHOT = "tests/checkpoint/test_checkpoint_snapshot.py"
EXPORT = "tests/export/test_checkpoint_export.py"
HANGS = "tests/guard/test_hangs.py"
LAUNCH = "tests/ranks/test_launch.py"
REPLICA = "tests/model/test_replica.py"
ENVIRONMENTS = "tests/ranks/test_launcher_environments.py"
LOCK = "tests/training/test_run_lock.py"
SHARED = "tests/ranks/test_shared_sum.py"
OPTIMIZER = "tests/model/test_optimizer.py"
STEPS = "tests/step/test_steps.py"
OWN_OPTIMIZERS = "tests/model/test_own_optimizers.py"
PUT_BACK = f"{OWN_OPTIMIZERS} -k 'put_back or taken_back'"
DOCTOR = "tests/runs/test_doctor.py"
FORMATS = "tests/export/test_export_formats.py"
PROBLEMS = "tests/settings/test_settings_problems.py"
SETTINGS = "tests/settings/test_settings.py"
FORMAT = "tests/preflight/test_memory_format.py"

BY_FILE: dict[str, list[tuple[str, str, str]]] = {
    "data/batches/sampler.py": [
        ("(rank < num_longer)", "(rank <= num_longer)", SAMPLER),
        ("drop_last and self.size >= global_batch", "drop_last", SAMPLER),
        ("list(self._orders.items())[-1:]", "[]", SAMPLER),
    ],
    "data/batches/ledger.py": [
        ("min([done.step, *later])", "done.step", LEDGER),
        (
            " - sum(i >= len(taken) or taken[i] == 0 for i in left_out)",
            "",
            f"{LEDGER} {FAULTS} -k 'ledger or left_out'",
        ),
        ("if position + count * width > len(raw):", "if False:", LEDGER),
        (
            "of_shards = done.sizes if epoch < done.epoch else done.taken",
            "of_shards = done.sizes",
            LEDGER,
        ),
    ],
    "data/batches/checks.py": [
        (
            "~tensor.isfinite() if is_alone else tensor.isnan()",
            "~tensor.isfinite()",
            f"{FAULTS} -k 'number or mask or infin or nan'",
        ),
        ("or max(values) >= self.num_classes", "", FAULTS),
    ],
    "data/batches/read_errors.py": [
        (
            "following = following.__cause__ or following.__context__",
            "following = None",
            f"{FAULTS} -k 'moment or pass or transient'",
        ),
        (">= REPORT_EVERY_S", ">= 0", f"{FAULTS} -k 'told or report or retries or minute'"),
    ],
    "data/batches/images.py": [
        ("self.images.shape[1] == 3", "True", DATASETS),
        ("2 * max_shift + 1", "2 * max_shift", DATASETS),
    ],
    "data/sources/facts.py": [
        ("if key not in _PLACES", "", DATASETS),
        ('first if first == second else b"random"', "first", DATASETS),
    ],
    "data/sources/downloads.py": [
        ("if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:", "if False:", DOWNLOAD),
        ("0 if after > before else num_idle + 1", "num_idle + 1", DOWNLOAD),
        ("fcntl.flock(lock, fcntl.LOCK_EX)", "pass", DOWNLOAD),
    ],
    "data/batches/workers.py": [
        (
            "return min(quotas, default=None)",
            "return max(quotas, default=None)",
            f"{LOADER} {DATASETS}",
        ),
        ("max(1, min(prefetch, room // workers))", "prefetch", f"{LOADER} {DATASETS}"),
    ],
    "ranks/shared_sum.py": [
        (
            "word] >= self._number:\n            return\n        if has_left",
            "word] >= self._number:\n            pass\n        if has_left",
            SHARED,
        ),
        ("self._slots[self._number % 2]", "self._slots[0]", SHARED),
    ],
    "ranks/seeding.py": [
        (
            "value = mix(seed, step, rank)",
            "value = mix(seed, step)",
            f"{STEPS} {SAMPLER} {REPLICA}",
        ),
        (
            "_seed_all(mix(seed, epoch, index))",
            "_seed_all(mix(seed, index))",
            f"{LOADER} {DATASETS}",
        ),
    ],
    "ranks/process.py": [
        (" or fields[START_FIELD] != started", "", f"{LOCK} {FILES}"),
    ],
    "ranks/launchers_env.py": [
        ('nodelist).split(",")[0]', 'nodelist).split(",")[-1]', ENVIRONMENTS),
        ("int(match[2] or 1)", "1", ENVIRONMENTS),
    ],
    "ranks/rendezvous.py": [
        (
            'store.set(f"{round_id}/refused", json.dumps(conflict))',
            "pass",
            f"{LAUNCH} tests/promises/test_restarts.py",
        ),
    ],
    "ranks/group.py": [
        ('getattr(errors, other.get("kind", ""), MainRankError)', "MainRankError", LAUNCH),
        ("if theirs.get(name) != value", "if theirs.get(name, value) != value", LAUNCH),
    ],
    "ranks/launch.py": [
        ('env.setdefault("GLOO_SOCKET_IFNAME", "lo")', "pass", f"{LAUNCH} {ENVIRONMENTS}"),
    ],
    "reporting/metrics.py": [
        ("number if math.isfinite(number) else None for", "number for", REPORTING),
        ("if step > 0 and not self._has_restart_record:", "if False:", REPORTING),
    ],
    "reporting/sinks.py": [
        ("and size and not self._rest and", "and size and", REPORTING),
        ("self._rest = record[num_written:]", 'self._rest = b""', REPORTING),
        (
            "        aside.replace(path)\n",
            "        path.write_bytes(aside.read_bytes())\n",
            REPORTING,
        ),
    ],
    "reporting/goodput.py": [
        ('min([attempt["step"], *later])', 'attempt["step"]', GOODPUT),
        ('down += max(0.0, attempt["began_at"] - attempts[index - 1]["now"])', "pass", GOODPUT),
    ],
    "reporting/background.py": [
        ("if self._jobs.qsize() >= _MAX_WAITING:", "if False:", "tests/reporting/test_trackers.py"),
    ],
    "checkpoint/folder.py": [
        ("if step not in protected", "", FILES),
        ("and path.name != step_folder_name(manifest.step)", "and False", f"{HOSTILE} {FILES}"),
        (
            "is_open = bool(status.st_mode & stat.S_IWOTH)",
            "is_open = False",
            "tests/checkpoint/test_checkpoint_faults.py",
        ),
        ("return type(value) is int and", "return isinstance(value, int) and", HOSTILE),
        (
            "best = read_best_step(root) if prefer_best else None",
            "best = None",
            f"{EXPORT} {FILES}",
        ),
    ],
    "checkpoint/disk.py": [
        ("return time.time() - newest > _FOREIGN_AGE_S", "return True", FILES),
        (
            "    disk.rename(aside, path)\n    disk.sync_folder(path.parent)\n",
            "    disk.rename(aside, path)\n",
            f"{CRASHES} {FILES}",
        ),
        (
            "    if not is_real_folder(path):\n        disk.unlink(path)",
            "    if not path.is_dir():\n        disk.unlink(path)",
            HOSTILE,
        ),
    ],
    "checkpoint/tensors.py": [
        ('    text += b" " * (-len(text) % 8)\n', "", TENSORS),
        ("key=lambda name: -tensors[name].element_size()", "key=lambda name: name", TENSORS),
    ],
    "checkpoint/store.py": [
        ("if name in volatile or not tensor.is_cpu]", "if not tensor.is_cpu]", SNAPSHOT),
    ],
    "guard/hang_rules.py": [
        (
            "        late = [report for report in late if report.step == first]\n",
            "",
            f"{HANGS} -k 'verdict or blam or decide or told or late or named'",
        ),
        ("return max(most_s, timeout_s / 2)", "return most_s", f"{HANGS} -k 'patience or timeout'"),
    ],
    "guard/slow.py": [
        ("and work[rank] - usual > LEAST_S", "", f"{HANGS} -k slow"),
        ("if self._in_a_row[rank] < NUM_REPORTS:", "if False:", f"{HANGS} -k slow"),
    ],
    "guard/divergence.py": [
        ("if 2 * count > len(everyone)", "if 2 * count >= len(everyone)", NUMBERS),
    ],
    "guard/stop.py": [
        (
            "(self.folder / STOP_FILE).unlink(missing_ok=True)",
            "pass",
            f"{LAUNCH} tests/promises/test_restarts.py test_ddp_training.py -k 'stop'",
        ),
    ],
    "model/optimizer_state.py": [
        (
            """if option != "params" and not (option in base and _is_same(value, base[option]))""",
            "if option == 'no option'",
            PUT_BACK,
        ),
        ("schedule.restore(_unpack", "(_unpack", PUT_BACK),
    ],
    "step/step.py": [
        (
            "            seed_update(seed, step=step, device_type=parts.device.type)",
            "            pass",
            f"{OWN_OPTIMIZERS} -k 'noisy'",
        ),
    ],
    "model/schedule.py": [
        ("            group.update(options)", "            pass", PUT_BACK),
        (
            "return peak * (step + 1) / config.warmup_steps",
            "return peak * step / config.warmup_steps",
            OPTIMIZER,
        ),
    ],
    "data/batches/batch.py": [
        (
            "    if batch.read_part is not None:",
            "    if batch is None:",
            "tests/data/test_collate.py",
        ),
    ],
    "model/optimizer.py": [
        ('names = ["momentum_buffer"] if group["momentum"] else []', "names = []", OPTIMIZER),
    ],
    "gradients/sums.py": [
        (
            "return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)",
            "return math.isfinite(sum(sums))",
            f"{NUMBERS} {REPLICA}",
        ),
    ],
    "model/checksum.py": [
        ("torch.dot(part, row[: len(part)])", "part.sum()", NUMBERS),
        ("words.bitwise_xor_(upper).mul_(", "words.mul_(", NUMBERS),
        ("((upper, factors[1]),", "((piece, factors[1]),", NUMBERS),
    ],
    "preflight/memory_format.py": [
        ("        is_chosen = all(", "        is_chosen = any(", FORMAT),
        (
            "return _are_alike(usual, last) or not _are_alike(last, drawn_again)",
            "return _are_alike(usual, last)",
            FORMAT,
        ),
    ],
    "preflight/padding.py": [
        (
            "calls = findings.collectives or findings.collectives.in_evaluation",
            "calls = findings.collectives",
            "tests/data/test_length_split.py",
        ),
    ],
    "model/torchvision_models.py": [
        (
            "mean_weight = first.weight.sum(dim=1, keepdim=True) / channels",
            "mean_weight = first.weight.mean(dim=1, keepdim=True) / channels",
            "tests/model/test_zoo.py",
        ),
    ],
    "ddp_runs/machine.py": [
        ("if hard != unlimited and hard < 4096:", "if False:", DOCTOR),
    ],
    "ddp_runs/variables.py": [
        ('if value.startswith("="):', "if False:", DOCTOR),
    ],
    "ddp_runs/software.py": [
        ("if number > NEWEST_TRIED_TORCH:", "if False:", DOCTOR),
    ],
    "export/export.py": [
        ("and not (output.is_dir() and not any(output.iterdir()))", "", EXPORT),
        ("same = specs_of(written) == specs_of(weights) and all(", "same = all(", EXPORT),
        ("path.chmod((aside / CARD_NAME).stat().st_mode)", "pass", FORMATS),
    ],
    "settings/rules.py": [
        (
            "0 < loop.max_steps <= optimizer.warmup_steps",
            "0 < loop.max_steps < optimizer.warmup_steps",
            PROBLEMS,
        ),
    ],
    "settings/schema.py": [
        (
            "value < bounds.high if bounds.is_high_open else value <= bounds.high",
            "value <= bounds.high",
            PROBLEMS,
        ),
    ],
    "settings/layers.py": [
        (
            'told = str(error).replace("--resume ", "") if is_named else str(error)',
            "told = str(error)",
            f"{PROBLEMS} {SETTINGS}",
        ),
    ],
}
"""For each file: what stands there, what takes its place, and the tests."""

MUTATIONS = [Mutation(file, *entry) for file, entries in BY_FILE.items() for entry in entries]
