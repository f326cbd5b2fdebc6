"""What mutate.py takes away, one at a time, and the tests that should notice it."""

from collections.abc import Iterator
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


# fmt: off
BY_FILE: dict[str, list[tuple[str, str, str]]] = {
    "data/batches/sampler.py": [
        ("(rank < num_longer)", "(rank <= num_longer)", "sampler"),
        ("drop_last and length >= global_batch", "drop_last", "sampler"),
        ("lru_cache(maxsize=2)", "lru_cache(maxsize=1)", "sampler")],
    "ddp_runs/ledger_check.py": [
        ("np.maximum(counts[without], 1)", "counts[without]",
         "ledger data_faults -k 'ledger or left_out'"),
        ("of_shards = done.sizes if epoch < done.epoch else done.taken", "of_shards = done.sizes",
         "ledger"),
        ("min([done.step, *later])", "done.step", "ledger"),
        ("if position + count * width > len(raw):", "if False:", "ledger")],
    "data/batches/checks.py": [
        ("~tensor.isfinite() if is_alone else tensor.isnan()", "~tensor.isfinite()",
         "data_faults -k 'number or mask or infin or nan'"),
        ("or max(values) >= self.num_classes", "", "data_faults")],
    "data/batches/read_errors.py": [
        ("cause = cause and (cause.__cause__ or cause.__context__)", "cause = None",
         "data_faults -k 'moment or pass or transient'"),
        ("2 * self._num_reads", "0", "data_faults -k doubled")],
    "data/batches/images.py": [
        ("self.images.shape[1] == 3", "True", "datasets"),
        ("2 * max_shift + 1", "2 * max_shift", "datasets")],
    "data/sources/facts.py": [
        ("if key not in _PLACES", "", "datasets"),
        ('content if content == _bytes_of(second) else b"random"', "content", "datasets")],
    "data/sources/downloads.py": [
        ("if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:", "if False:", "download"),
        ("0 if size > before else num_idle + 1", "num_idle + 1", "download"),
        ("fcntl.flock(lock, fcntl.LOCK_EX)", "pass", "download")],
    "data/batches/workers.py": [
        ("return quota / period if quota >= 0", "return quota / period if True", "datasets"),
        ("max(1, min(prefetch, room // workers))", "prefetch", "loader datasets")],
    "ranks/shared_sum.py": [
        ("counters[index] >= number:\n                    return\n                if has_left",
         "counters[index] >= number:\n                    pass\n                if has_left",
         "shared_sum"),
        ("self._slots[self._number % 2]", "self._slots[0]", "shared_sum")],
    "ranks/seeding.py": [
        ("value = mix(seed, step, rank)", "value = mix(seed, step)", "steps sampler replica"),
        ("seed_all(mix(seed, epoch, index))", "seed_all(mix(seed, index))", "loader datasets")],
    "ranks/process.py": [(" or fields[START_FIELD] != started", "", "run_lock checkpoint_files")],
    "ranks/launchers_env.py": [
        ('nodelist).split(",")[0]', 'nodelist).split(",")[-1]', "launcher_environments"),
        ("int(times or 1)", "1", "launcher_environments")],
    "ranks/rendezvous.py": [
        ('if me["facts"] != current["facts"]', "if False", "launch"),
        ('first["token"] != me["token"]', "False", "launch")],
    "ranks/group.py": [
        ('getattr(errors, other.get("kind", ""), errors.MainRankError)', "errors.MainRankError",
         "launch"),
        ("if theirs.get(name) != value", "if theirs.get(name, value) != value", "launch")],
    "ranks/launch.py": [
        ('env.setdefault("GLOO_SOCKET_IFNAME", "lo")', "pass", "launch launcher_environments")],
    "reporting/metrics.py": [
        ("number if math.isfinite(number) else None for", "number for", "reporting"),
        ("if step > 0:  # discard", "if False:  # discard", "reporting")],
    "reporting/sinks.py": [
        ("        aside.replace(path)\n", "        path.write_bytes(aside.read_bytes())\n",
         "reporting"),
        ("and size and not self._rest and", "and size and", "reporting"),
        ("self._rest = record[num_written:]", 'self._rest = b""', "reporting"),
        ("if self._jobs.qsize() >= _MAX_WAITING:", "if False:", "trackers")],
    "reporting/goodput.py": [
        ('min([attempt["step"], *later])', 'attempt["step"]', "goodput"),
        ('down += max(0.0, attempt["began_at"] - attempts[index - 1]["now"])', "pass", "goodput")],
    "checkpoint/folder.py": [
        ("and path.name != step_folder_name(manifest.step)", "and False",
         "checkpoint_faults checkpoint_files"),
        ("best = read_best_step(root) if prefer_best else None", "best = None",
         "export_formats checkpoint_files"),
        ("if step not in kept", "", "checkpoint_files"),
        ("return type(value) is int and", "return isinstance(value, int) and",
         "checkpoint_faults")],
    "checkpoint/disk.py": [
        ("        self.rename(aside, path)\n        self.sync_folder(path.parent)\n",
         "        self.rename(aside, path)\n", "checkpoint_crashes checkpoint_files"),
        ("return time.time() - newest > _FOREIGN_AGE_S", "return True", "checkpoint_files"),
        ("if is_real_folder(path):", "if path.is_dir():", "checkpoint_faults")],
    "checkpoint/tensors.py": [
        ("key=lambda name: -tensors[name].element_size()", "key=lambda name: name",
         "checkpoint_files"),
        ("self.pieces(begin, begin + data", "self.pieces(0, data", "checkpoint_snapshot"),
        ('    text += b" " * (-len(text) % 8)\n', "", "checkpoint_files")],
    "checkpoint/store.py": [
        ("not in DISK_FULL_ERRORS or not self._make_room()", "not in ()", "checkpoint_crashes")],
    "guard/hang_rules.py": [
        ("        late = [report for report in late if report.step == first]\n", "",
         "hangs -k 'verdict or blam or decide or told or late or named'"),
        ("return max(most_s, timeout_s / 2)", "return most_s", "hangs -k 'patience or timeout'")],
    "guard/slow.py": [
        ("and work[rank] - usual > LEAST_S", "", "hangs -k slow"),
        ("if self._in_a_row[rank] < NUM_REPORTS:", "if False:", "hangs -k slow")],
    "guard/divergence.py": [
        ("if 2 * count > len(everyone)", "if 2 * count >= len(everyone)", "numbers")],
    "guard/stop.py": [("(self.folder / STOP_FILE).unlink(missing_ok=True)", "pass",
         "launch restarts test_ddp_training.py -k 'stop'")],
    "step/step.py": [("            seed_update(seed, step=step, device_type=parts.device.type)",
         "            pass", "own_optimizers -k 'noisy'")],
    "model/schedule.py": [
        ('if option != "params" and not (option in base and _is_same(value, base[option]))',
         "if option == 'no option'", "own_optimizers -k 'put_back or taken_back'"),
        ("            group.update(options)", "            pass",
         "own_optimizers -k 'put_back or taken_back'"),
        ("return peak * (step + 1) / config.warmup_steps",
         "return peak * step / config.warmup_steps", "optimizer"),
        ("schedule.restore(unpack", "(unpack", "own_optimizers -k 'put_back or taken_back'")],
    "data/batches/batch.py": [
        ("    if batch.read_part is not None:", "    if batch is None:", "collate")],
    "model/optimizer.py": [
        ('names = ["momentum_buffer"] if group["momentum"] else []', "names = []", "optimizer")],
    "gradients/sums.py": [
        ("return math.isfinite(total) or all(bool(g.isfinite().all()) for g in gradients)",
         "return math.isfinite(total)", "numbers replica")],
    "model/checksum.py": [
        ("int(words.dot(low[: len(words)]))", "int(words.sum())", "numbers"),
        ("words.bitwise_xor_(upper.bitwise_and_(", "words.add(upper.bitwise_and_(", "numbers"),
        ("int(upper.dot(high[: len(words)]))", "int(words.dot(high[: len(words)]))", "numbers")],
    "preflight/memory_format.py": [
        ("config.model.compile and all(", "config.model.compile and any(", "memory_format")],
    "model/zoo.py": [("mean_weight = first.weight.sum(dim=1, keepdim=True) / channels",
         "mean_weight = first.weight.mean(dim=1, keepdim=True) / channels", "datasets -k grey")],
    "ddp_runs/machine.py": [
        ("if problems:", "if False:", "doctor"),
        ("if strange:", "if False:", "doctor")],
    "ddp_runs/cluster.py": [
        ("if rate < _SLOW_SHARE * usual:", "if False:", "cluster"),
        ("elif rate < _LINK_SHARE * nominal:", "elif False:", "cluster"),
        ('abs(m["ahead_s"]) > _CLOCK_S', "False", "cluster")],
    "ddp_runs/software.py": [("if version > newest:", "if False:", "doctor")],
    "export/export.py": [
        ("and not (output.is_dir() and not any(output.iterdir()))", "", "export_formats"),
        ("hexdigest() != written:", "hexdigest() == 0:", "export_formats"),
        ("path.chmod((aside / CARD_NAME).stat().st_mode)", "pass", "export_formats")],
    "settings/layers.py": [("0 < loop.max_steps <= optimizer.warmup_steps",
         "0 < loop.max_steps < optimizer.warmup_steps", "settings_problems")],
    "settings/config.py": [
        ("value < self.high if self.is_high_open else value <= self.high", "value <= self.high",
         "settings_problems")],
}
# fmt: on
"""For each file: what stands there, what takes its place, and the tests: hangs are those of
test_hangs.py in a folder of tests/."""


def _mutations() -> Iterator[Mutation]:
    root = Path(__file__).parents[1]
    places = {path.stem: str(path.relative_to(root)) for path in root.glob("tests/*/test_*.py")}
    for file, entries in BY_FILE.items():
        for old, new, tests in entries:
            names, *words = tests.partition(" -k ")
            files = [places.get(f"test_{name}", name) for name in names.split()]
            yield Mutation(file, old, new, "".join([" ".join(files), *words]))


MUTATIONS = [*_mutations()]
