#!/usr/bin/env python3
"""Which planted sample does replay show first, and does bisect prove? A table by kind of poison.

    python benchmarks/replay_poison.py               eleven kinds, 20 plantings each; some minutes
    python benchmarks/replay_poison.py --num 5       fewer
    python benchmarks/replay_poison.py --kind token  only the kinds with this word

A small model is trained for some steps by the trainer itself; then, for each planting, a sample of
one of the next steps is poisoned, and what the commands replay and bisect do is done within the
process: the samples of that step sorted by loss and by their weight, and the trials without steps
and samples, from a few steps before until the condition holds. Plantings that do no harm, by that
condition, are drawn again.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # WHY: started by its path, Python looks beside this file only

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import ddp_training  # noqa: E402
from ddp_runs.replay_rank import Condition, Replay, blame, in_order  # noqa: E402
from hardened_ddp.training.run import Ending, Run  # noqa: E402

BATCH, DIM, WARM, HORIZON = 16, 20, 60, 4
SHARDS, TOKENS, LENGTH = 4, 32, 13


@dataclass(frozen=True)
class Kind:
    """A kind of poison: the condition that it makes true, and what it is planted in."""

    when: str
    norm: bool = False
    form: str = "points"


KINDS = {
    "an input 1,000 times as large": Kind("loss > 1"),
    "the same, with BatchNorm": Kind("loss > 0.9", norm=True),
    "a wrong label": Kind("loss > 0.42"),
    "a wrong label, with BatchNorm": Kind("loss > 0.4", norm=True),
    "an outlier that spoils the statistics": Kind("loss > 0.6", norm=True),
    "an input of NaN": Kind("nan in loss"),
    "two wrong labels, of which one is not enough": Kind("loss > 0.55"),
    "NaN in the loss, steps later": Kind("nan in loss"),
    "a damaged file, 4 bytes of it": Kind("loss > 1", form="files"),
    "an outlier in a stream": Kind("loss > 1", form="stream"),
    "tokens that mean nothing": Kind("loss > 0.75", form="tokens"),
}


class Samples(Dataset[tuple[torch.Tensor, Any]]):
    """Points of four classes, of which some can be poisoned while they are used."""

    num_classes, in_memory = 4, True

    def __init__(self, size: int = 2000) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(4, (size,), generator=generator)
        self.points = torch.randn(size, DIM, generator=generator)
        self.points[:, 16:] = 0  # of rare features, which only poison has
        self.points[:, :4] += 3 * nn.functional.one_hot(self.labels, 4)
        self.poison: dict[int, tuple[torch.Tensor, Any]] = {}

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return self.poison.get(index) or (self.points[index], int(self.labels[index]))


class Files(Samples):
    """The same, each point in a file of its own."""

    in_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.files = [f"{self.folder.name}/{index}" for index in range(len(self))]
        for index in range(len(self)):
            self.write(index)

    def write(self, index: int, damage: bytes = b"", at: int = 0) -> None:
        raw = self.points[index].numpy().tobytes()
        Path(self.files[index]).write_bytes(raw[:at] + damage + raw[at + len(damage) :])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        point = np.fromfile(self.files[index], dtype=np.float32)
        return torch.from_numpy(point), int(self.labels[index])


class Sequences(Samples):
    """Tokens that count up by 1, 2 or 3; the label of each is the one after it."""

    def __init__(self) -> None:
        super().__init__()
        steps = 1 + self.labels % 3
        self.points = (7 * self.labels + self.points[:, 5].mul(9).long()).unsqueeze(1)
        self.points = (self.points + steps.unsqueeze(1) * torch.arange(LENGTH)) % TOKENS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        tokens = self.poison[index][0] if index in self.poison else self.points[index]
        return tokens[:-1], tokens[1:]


class Stream:
    """The points in shards, to be read in order."""

    num_shards, num_classes, uses_randomness = SHARDS, 4, False

    def __init__(self, data: Samples) -> None:
        self.data, self.sizes = data, [len(data) // SHARDS] * SHARDS

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[tuple[torch.Tensor, Any]]:
        return map(self.data.__getitem__, range(shard, len(self.data), SHARDS))


DATA: list[Samples] = []
"""What the run reads: poison is planted in it."""


def samples(train: bool, form: str) -> Samples | Stream | None:
    if not train:
        return None
    DATA[:] = [{"files": Files, "tokens": Sequences}.get(form, Samples)()]
    return Stream(DATA[0]) if form == "stream" else DATA[0]


class Next(nn.Module):
    """The token after each, from it and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 32), nn.Linear(64, TOKENS)
        self.near = nn.Conv1d(32, 64, 2, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        near = self.near(self.embed(tokens).mT)[:, :, : tokens.shape[1]]
        return self.head(near.relu().mT)


def model(num_classes: int = 4, norm: bool = False, form: str = "points") -> nn.Module:
    if form == "tokens":
        return Next()
    middle = [nn.BatchNorm1d(32)] if norm else []
    parts = [nn.Linear(DIM, 32), *middle, nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(32, num_classes))


def plant(kind: str, data: Samples, ids: list[int], rng: np.random.Generator) -> set[int]:
    """Poison samples of a step; return which."""
    first, second = (int(i) for i in rng.choice(ids, 2, replace=False))
    point, label = data.points[first].clone(), int(data.labels[first])
    other = (label + 1 + int(rng.integers(3))) % 4
    match kind.partition(",")[0]:
        case "an input 1" | "the same":
            point = torch.from_numpy(rng.standard_normal(DIM)).float() * 1000
        case "a wrong label":
            label = other
        case "an outlier that spoils the statistics":
            point = point * 30
        case "an outlier in a stream":
            point, label = point * 30, other
        case "an input of NaN":
            point[int(rng.integers(DIM))] = float("nan")
        case "two wrong labels":
            data.poison[second] = data.points[second], (int(data.labels[second]) + 1) % 4
            label = other
        case "NaN in the loss":
            # it makes the weights large; three steps later a loss is not finite
            point, label = point * float(10 ** rng.uniform(3, 12)), other
        case "tokens that mean nothing":
            point = torch.from_numpy(rng.integers(TOKENS, size=LENGTH))
        case "a damaged file":
            assert isinstance(data, Files)
            data.write(first, rng.bytes(4), at=4 * int(rng.integers(DIM)) + int(rng.integers(4)))
    data.poison[first] = point, label
    return {*data.poison}


def heal(data: Samples) -> None:
    """Take all poison out again."""
    for index in data.poison if isinstance(data, Files) else ():
        assert isinstance(data, Files)
        data.write(index)
    data.poison.clear()


def measure(run: Run, kind: str, num: int) -> list[Counter[str]]:
    """Plant so often, and count what was found. It takes the place of the trainer's own loop."""
    when = KINDS[kind].when
    plan: dict[str, Any] = {"when": when, "tries_from": None, "debug": False}
    plan |= {"left_out": [], "limits": {}, "given_up": []}
    replay, condition = Replay(run, plan), Condition.parse(when)
    run.stepper.records.close()
    for window, batches in run.windows():
        if run.progress.step >= WARM:
            break
        assert window is not None
        replay.do(window, batches, (), looks=False)
    clean, data = replay.state(), DATA[0]
    found, tries = Counter[str](), 0
    base = run.progress
    ids = run.parts.sampler.next_ids(base.epoch, base.cursor)
    rng = np.random.default_rng(0)
    while found["planted"] < num and tries < 40 * num:
        tries += 1
        heal(data)
        planted = plant(kind, data, ids, rng)
        steps = replay.trial(clean, WARM + HORIZON)
        held = next((s["step"] for s in steps if condition.holds(s)), None)
        if held != WARM + 3 * kind.startswith("NaN in the loss"):
            continue
        if len(planted) > 1:  # neither of them may do it alone
            alone = [replay.trial(clean, held, at=WARM, gone=[i]) for i in planted]
            if any(condition.holds(s) for each in alone for s in each):
                continue
        found["planted"] += 1
        rows = replay.trial(clean, WARM, looks=WARM)[-1]["rows"]
        by_loss = sorted(rows, key=lambda row: -np.nan_to_num(row["loss"], nan=np.inf))
        for name, order in (("loss", by_loss), ("weight", in_order(rows))):
            found[name] += {row["sample"] for row in order[: len(planted)]} == planted
        suspects = range(WARM, held + 1)
        blamed = blame(replay, clean, suspects, 2 * held - WARM + 1)
        proved = {*blamed["samples"]}
        found["proved"] += blamed["step"] == WARM and planted <= proved
        found["named"] += len(proved)
        found["trials"] += blamed["trials"]
    found["tries"] = tries
    return [found]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=20, help="plantings of each kind")
    parser.add_argument("--kind", default="", help="only kinds with this word")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.modules["replay_poison"] = sys.modules[__name__]
    print("| planted | of | largest loss | weighs most | bisect proves it | it names | trials |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in [name for name in KINDS if options.kind in name]:
        norm, form = KINDS[kind].norm, KINDS[kind].form
        results: list[Counter[str]] = []

        def fit(run: Run, kind: str = kind, into: list[Any] = results) -> Ending:
            into += measure(run, kind, options.num)
            return Ending.STOPPED

        ddp_training.fit = fit
        log = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(log), redirect_stdout(log):
            args = "--cpu_only --dataset replay_poison:samples --model replay_poison:model "
            args += f"--batch_size {BATCH} --num_workers 0 --epochs 3 --eval_every 0 --digests off "
            args += "--no_check_inputs --optimizer sgd --learning_rate 0.1 --momentum 0.0 "
            args += "--weight_decay 0 --lr_schedule constant --tracker none --step_retry off"
            words = [*args.split(), "--model_args", json.dumps({"norm": norm, "form": form})]
            words += ["--dataset_args", json.dumps({"form": form})]
            if form == "tokens":
                words += ["--task", "tokens", "--optimizer", "adamw", "--learning_rate", "0.01"]
            status = ddp_training.main([*words, "--output_dir", folder])
        if not results:
            print(log.getvalue(), file=sys.stderr)
            return status or 1
        n = results[0]
        named, mean = (n[name] / max(1, n["planted"]) for name in ("named", "trials"))
        print(
            f"| {kind} | {n['planted']} | {n['loss']} | {n['weight']} | {n['proved']} | "
            f"{named:.1f} | {mean:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
