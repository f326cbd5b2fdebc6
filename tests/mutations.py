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


SAMPLER, LEDGER, DATASETS = (
    "tests/data/test_sampler.py",
    "tests/data/test_ledger.py",
    "tests/data/test_datasets.py",
)
LOADER, FAULTS, DOWNLOAD = (
    "tests/data/test_loader.py",
    "tests/data/test_data_faults.py",
    "tests/data/test_download.py",
)
REPORTING, GOODPUT, NUMBERS = (
    "tests/reporting/test_reporting.py",
    "tests/reporting/test_goodput.py",
    "tests/guard/test_numbers.py",
)
FILES, HOSTILE = (
    "tests/checkpoint/test_checkpoint_files.py",
    "tests/checkpoint/test_checkpoint_faults.py",
)
CRASHES, TENSORS = (
    "tests/checkpoint/test_checkpoint_crashes.py",
    "tests/checkpoint/test_checkpoint_tensors.py",
)
SNAPSHOT, EXPORT = (
    "tests/checkpoint/test_checkpoint_snapshot.py",
    "tests/export/test_checkpoint_export.py",
)
HANGS, LAUNCH, REPLICA = (
    "tests/guard/test_hangs.py",
    "tests/ranks/test_launch.py",
    "tests/model/test_replica.py",
)
ENVIRONMENTS, LOCK = "tests/ranks/test_launcher_environments.py", "tests/training/test_run_lock.py"
SHARED, OPTIMIZER, STEPS = (
    "tests/ranks/test_shared_sum.py",
    "tests/model/test_optimizer.py",
    "tests/step/test_steps.py",
)
OWN_OPTIMIZERS = "tests/model/test_own_optimizers.py"
PUT_BACK = f"{OWN_OPTIMIZERS} -k 'put_back or taken_back'"
DOCTOR, FORMATS = "tests/runs/test_doctor.py", "tests/export/test_export_formats.py"
PROBLEMS, SETTINGS, FORMAT = (
    "tests/settings/test_settings_problems.py",
    "tests/settings/test_settings.py",
    "tests/preflight/test_memory_format.py",
)

MUTATIONS = [
    # data
    Mutation("data/batches/sampler.py", "(rank < num_longer)", "(rank <= num_longer)", SAMPLER),
    Mutation(
        "data/batches/sampler.py",
        "drop_last and self.size >= global_batch",
        "drop_last",
        SAMPLER,
    ),
    Mutation("data/batches/sampler.py", "list(self._orders.items())[-1:]", "[]", SAMPLER),
    Mutation("data/batches/ledger.py", "min([done.step, *later])", "done.step", LEDGER),
    Mutation(
        "data/batches/ledger.py",
        " - sum(i >= len(taken) or taken[i] == 0 for i in left_out)",
        "",
        f"{LEDGER} {FAULTS} -k 'ledger or left_out'",
    ),
    Mutation(
        "data/batches/ledger.py", "if position + count * width > len(raw):", "if False:", LEDGER
    ),
    Mutation(
        "data/batches/ledger.py",
        "of_shards = done.sizes if epoch < done.epoch else done.taken",
        "of_shards = done.sizes",
        LEDGER,
    ),
    Mutation(
        "data/batches/checks.py",
        "~tensor.isfinite() if is_alone else tensor.isnan()",
        "~tensor.isfinite()",
        f"{FAULTS} -k 'number or mask or infin or nan'",
    ),
    Mutation("data/batches/checks.py", "or max(values) >= self.num_classes", "", FAULTS),
    Mutation(
        "data/batches/read_errors.py",
        "following = following.__cause__ or following.__context__",
        "following = None",
        f"{FAULTS} -k 'moment or pass or transient'",
    ),
    Mutation(
        "data/batches/read_errors.py",
        ">= REPORT_EVERY_S",
        ">= 0",
        f"{FAULTS} -k 'told or report or retries or minute'",
    ),
    Mutation("data/batches/images.py", "self.images.shape[1] == 3", "True", DATASETS),
    Mutation("data/batches/images.py", "2 * max_shift + 1", "2 * max_shift", DATASETS),
    Mutation("data/sources/facts.py", "if key not in _PLACES", "", DATASETS),
    Mutation("data/sources/facts.py", 'first if first == second else b"random"', "first", DATASETS),
    Mutation(
        "data/sources/downloads.py",
        "if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:",
        "if False:",
        DOWNLOAD,
    ),
    Mutation(
        "data/sources/downloads.py",
        "0 if after > before else num_idle + 1",
        "num_idle + 1",
        DOWNLOAD,
    ),
    Mutation("data/sources/downloads.py", "fcntl.flock(lock, fcntl.LOCK_EX)", "pass", DOWNLOAD),
    Mutation(
        "data/batches/workers.py",
        "return min(quotas, default=None)",
        "return max(quotas, default=None)",
        f"{LOADER} {DATASETS}",
    ),
    Mutation(
        "data/batches/workers.py",
        "max(1, min(prefetch, room // workers))",
        "prefetch",
        f"{LOADER} {DATASETS}",
    ),
    # ranks
    Mutation(
        "ranks/shared_sum.py",
        "word] >= self._number:\n            return\n        if has_left",
        "word] >= self._number:\n            pass\n        if has_left",
        SHARED,
    ),
    Mutation("ranks/shared_sum.py", "self._slots[self._number % 2]", "self._slots[0]", SHARED),
    Mutation(
        "ranks/seeding.py",
        "value = mix(seed, step, rank)",
        "value = mix(seed, step)",
        f"{STEPS} {SAMPLER} {REPLICA}",
    ),
    Mutation(
        "ranks/seeding.py",
        "    value = mix(seed, epoch, index)\n",
        "    value = mix(seed, index)\n",
        f"{LOADER} {DATASETS}",
    ),
    Mutation("ranks/process.py", " or fields[START_FIELD] != started", "", f"{LOCK} {FILES}"),
    Mutation(
        "ranks/launchers_env.py",
        'nodelist).split(",")[0]',
        'nodelist).split(",")[-1]',
        ENVIRONMENTS,
    ),
    Mutation("ranks/launchers_env.py", "int(match[2] or 1)", "1", ENVIRONMENTS),
    Mutation(
        "ranks/rendezvous.py",
        'store.set(f"{round_id}/refused", json.dumps(conflict))',
        "pass",
        f"{LAUNCH} tests/promises/test_restarts.py",
    ),
    Mutation(
        "ranks/group.py",
        'getattr(errors, other.get("kind", ""), MainRankError)',
        "MainRankError",
        LAUNCH,
    ),
    Mutation(
        "ranks/group.py",
        "if theirs.get(name) != value",
        "if theirs.get(name, value) != value",
        LAUNCH,
    ),
    Mutation(
        "ranks/launch.py",
        'env.setdefault("GLOO_SOCKET_IFNAME", "lo")',
        "pass",
        f"{LAUNCH} {ENVIRONMENTS}",
    ),
    # reporting
    Mutation(
        "reporting/metrics.py",
        "number if math.isfinite(number) else None for",
        "number for",
        REPORTING,
    ),
    Mutation(
        "reporting/metrics.py",
        "if step > 0 and not self._has_restart_record:",
        "if False:",
        REPORTING,
    ),
    Mutation("reporting/sinks.py", "and size and not self._rest and", "and size and", REPORTING),
    Mutation(
        "reporting/sinks.py",
        "self._rest = record[num_written:]",
        'self._rest = b""',
        REPORTING,
    ),
    Mutation("reporting/goodput.py", 'min([attempt["step"], *later])', 'attempt["step"]', GOODPUT),
    Mutation(
        "reporting/goodput.py",
        'down += max(0.0, attempt["began_at"] - attempts[index - 1]["now"])',
        "pass",
        GOODPUT,
    ),
    Mutation(
        "reporting/sinks.py",
        "        aside.replace(path)\n",
        "        path.write_bytes(aside.read_bytes())\n",
        REPORTING,
    ),
    Mutation(
        "reporting/background.py",
        "if self._jobs.qsize() >= _MAX_WAITING:",
        "if False:",
        "tests/reporting/test_trackers.py",
    ),
    # checkpoint
    Mutation("checkpoint/folder.py", "if step not in protected", "", FILES),
    Mutation(
        "checkpoint/disk.py",
        "return time.time() - newest > _FOREIGN_AGE_S",
        "return True",
        FILES,
    ),
    Mutation(
        "checkpoint/disk.py",
        "    disk.rename(aside, path)\n    disk.sync_folder(path.parent)\n",
        "    disk.rename(aside, path)\n",
        f"{CRASHES} {FILES}",
    ),
    Mutation(
        "checkpoint/disk.py",
        "    if not is_real_folder(path):\n        disk.unlink(path)",
        "    if not path.is_dir():\n        disk.unlink(path)",
        HOSTILE,
    ),
    Mutation(
        "checkpoint/folder.py",
        "and path.name != step_folder_name(manifest.step)",
        "and False",
        f"{HOSTILE} {FILES}",
    ),
    Mutation(
        "checkpoint/folder.py",
        "is_open = bool(status.st_mode & stat.S_IWOTH)",
        "is_open = False",
        "tests/checkpoint/test_checkpoint_faults.py",
    ),
    Mutation(
        "checkpoint/folder.py",
        "return type(value) is int and",
        "return isinstance(value, int) and",
        HOSTILE,
    ),
    Mutation("checkpoint/tensors.py", '    text += b" " * (-len(text) % 8)\n', "", TENSORS),
    Mutation(
        "checkpoint/tensors.py",
        "key=lambda name: -tensors[name].element_size()",
        "key=lambda name: name",
        TENSORS,
    ),
    Mutation(
        "checkpoint/store.py",
        "if name in volatile or not tensor.is_cpu]",
        "if not tensor.is_cpu]",
        SNAPSHOT,
    ),
    Mutation(
        "checkpoint/folder.py",
        "best = read_best_step(root) if prefer_best else None",
        "best = None",
        f"{EXPORT} {FILES}",
    ),
    # guard
    Mutation(
        "guard/hang_rules.py",
        "        late = [report for report in late if report.step == first]\n",
        "",
        f"{HANGS} -k 'verdict or blam or decide or told or late or named'",
    ),
    Mutation(
        "guard/hang_rules.py",
        "return max(most_s, timeout_s / 2)",
        "return most_s",
        f"{HANGS} -k 'patience or timeout'",
    ),
    Mutation("guard/slow.py", "and work[rank] - usual > LEAST_S", "", f"{HANGS} -k slow"),
    Mutation(
        "guard/slow.py", "if self._in_a_row[rank] < NUM_REPORTS:", "if False:", f"{HANGS} -k slow"
    ),
    Mutation(
        "guard/divergence.py",
        "if 2 * count > len(everyone)",
        "if 2 * count >= len(everyone)",
        NUMBERS,
    ),
    Mutation(
        "guard/stop.py",
        "(self.folder / STOP_FILE).unlink(missing_ok=True)",
        "pass",
        f"{LAUNCH} tests/promises/test_restarts.py test_ddp_training.py -k 'stop'",
    ),
    # model
    Mutation(
        "model/optimizer_state.py",
        """if option != "params" and not (option in base and _is_same(value, base[option]))""",
        "if option == 'no option'",
        PUT_BACK,
    ),
    Mutation("model/optimizer_state.py", "schedule.restore(_unpack", "(_unpack", PUT_BACK),
    Mutation(
        "step/step.py",
        "            seed_update(seed, step=step, device_type=parts.device.type)",
        "            pass",
        f"{OWN_OPTIMIZERS} -k 'noisy'",
    ),
    Mutation(
        "model/schedule.py", "            group.update(options)", "            pass", PUT_BACK
    ),
    Mutation(
        "data/batches/batch.py",
        "    if batch.read_part is not None:",
        "    if batch is None:",
        "tests/data/test_collate.py",
    ),
    Mutation(
        "model/schedule.py",
        "return peak * (step + 1) / config.warmup_steps",
        "return peak * step / config.warmup_steps",
        OPTIMIZER,
    ),
    Mutation(
        "model/optimizer.py",
        'names = ["momentum_buffer"] if group["momentum"] else []',
        "names = []",
        OPTIMIZER,
    ),
    Mutation(
        "gradients/sums.py",
        "return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)",
        "return math.isfinite(sum(sums))",
        f"{NUMBERS} {REPLICA}",
    ),
    Mutation("model/checksum.py", "torch.dot(part, row[: len(part)])", "part.sum()", NUMBERS),
    Mutation("model/checksum.py", "words.bitwise_xor_(upper).mul_(", "words.mul_(", NUMBERS),
    Mutation("model/checksum.py", "((upper, factors[1]),", "((piece, factors[1]),", NUMBERS),
    Mutation(
        "preflight/memory_format.py",
        "        is_chosen = all(",
        "        is_chosen = any(",
        FORMAT,
    ),
    Mutation(
        "preflight/memory_format.py",
        "return _are_alike(usual, last) or not _are_alike(last, drawn_again)",
        "return _are_alike(usual, last)",
        FORMAT,
    ),
    Mutation(
        "preflight/padding.py",
        "with watching(trial.model, trial.group, refuses=True):",
        "with watching(trial.model, trial.group):",
        "tests/data/test_length_split.py",
    ),
    Mutation(
        "model/torchvision_models.py",
        "mean_weight = first.weight.sum(dim=1, keepdim=True) / channels",
        "mean_weight = first.weight.mean(dim=1, keepdim=True) / channels",
        "tests/model/test_zoo.py",
    ),
    # ddp_runs
    Mutation("ddp_runs/machine.py", "if hard != unlimited and hard < 4096:", "if False:", DOCTOR),
    Mutation("ddp_runs/variables.py", 'if value.startswith("="):', "if False:", DOCTOR),
    Mutation("ddp_runs/software.py", "if number > NEWEST_TRIED_TORCH:", "if False:", DOCTOR),
    # export
    Mutation(
        "export/export.py", "and not (output.is_dir() and not any(output.iterdir()))", "", EXPORT
    ),
    Mutation(
        "export/export.py",
        "same = specs_of(written) == specs_of(weights) and all(",
        "same = all(",
        EXPORT,
    ),
    Mutation("export/export.py", "path.chmod((aside / CARD_NAME).stat().st_mode)", "pass", FORMATS),
    # settings
    Mutation(
        "settings/rules.py",
        "0 < loop.max_steps <= optimizer.warmup_steps",
        "0 < loop.max_steps < optimizer.warmup_steps",
        PROBLEMS,
    ),
    Mutation(
        "settings/schema.py",
        "value < bounds.high if bounds.is_high_open else value <= bounds.high",
        "value <= bounds.high",
        PROBLEMS,
    ),
    Mutation(
        "settings/layers.py",
        'told = str(error).replace("--resume ", "") if is_named else str(error)',
        "told = str(error)",
        f"{PROBLEMS} {SETTINGS}",
    ),
]
