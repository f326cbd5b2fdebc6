#!/usr/bin/env python3
"""Micro-batches in two parts of similar lengths: how fast is that on the CPU, and when does auto?

    python benchmarks/split_by_length.py                  45 models and batches: about 3 minutes
    python benchmarks/split_by_length.py --only mlp

Each model does whole steps (forward, backward, AdamW) in turns on padded micro-batches and on the
same ones in two parts, on one thread. Samples have 16 to 128 tokens. gain: the ratio of the CPU
times. padding: what the cut leaves out, as a multiple of what `--split_by_length auto` needs for
this model; from 1.0 on it cuts. The exit status is 1 if it then is slower than 0.95 x.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.length_split import LengthSplit
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight.padding import choose_split
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.resources import keep_freed_memory
from hardened_ddp.settings.config import Config
from hardened_ddp.task.tokens import Tokens

CPU = torch.device("cpu")
SHORTEST, LONGEST, VOCABULARY = 16, 128, 64
NUM_BATCHES = 12
_SLOWEST = 0.95
"""WHY not 1: two runs of one model differ by a few percent on a machine in use."""

Sample = tuple[torch.Tensor, torch.Tensor]


class GPT(nn.Module):
    """Two layers of attention to the tokens before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: torch.Tensor = self.head(self.blocks(self.embed(ids), mask=mask, is_causal=True))
        return logits


class Convolutions(nn.Module):
    """Three convolutions over the tokens before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(nn.functional.pad(hidden, (4, 0))).relu()
        logits: torch.Tensor = self.head(hidden.transpose(1, 2))
        return logits


def mlp(width: int) -> nn.Module:
    """Four linear layers for each token."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


MODELS: Mapping[str, Callable[[int], nn.Module]] = {"gpt": GPT, "mlp": mlp, "conv": Convolutions}


def pad(samples: list[Sample]) -> Sample:
    """Pad to the longest."""
    ids, labels = zip(*samples, strict=True)
    pad_sequence = nn.utils.rnn.pad_sequence
    return pad_sequence(list(ids), True), pad_sequence(list(labels), True, -100)


def make_samples(number: int) -> list[Sample]:
    """Make samples of random lengths, the same every time."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(SHORTEST, LONGEST + 1, (number,), generator=generator).tolist()
    found = [torch.randint(VOCABULARY, (size,), generator=generator) for size in sizes]
    return [(ids, (ids + 1) % VOCABULARY) for ids in found]


def needed(model: nn.Module, samples: Sequence[Sample]) -> int:
    """Return the values of padding that auto needs to cut."""
    fetcher = Fetcher(samples, seed=0, collate=pad)
    batch = fetcher.with_parts(fetcher[(0, torch.arange(2))], 0)
    task, nothing = Tokens(), Findings(unused=(), is_varying=False, where="", moving_buffers=())
    task.attach(model, "tokens")
    trial = Trial(model, task, Precision("off", CPU), Group(Launch(), CPU))
    found = choose_split(trial, [batch], nothing, config=Config(), saved=None)
    assert found is not None, "the trial says that padding changes this model's loss"
    return found.least_values


def measure(model: nn.Module, forms: Sequence[Sequence[Sequence[Batch]]], turns: int) -> float:
    """Return how much faster steps are on the second form of the micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(turns + 1):
        for form, found in zip(forms, times, strict=True):
            started_at = time.process_time()
            for batches in form:
                optimizer.zero_grad()
                for batch in batches:
                    logits = model(batch.inputs).flatten(0, 1)
                    loss = nn.functional.cross_entropy(
                        logits, batch.targets.flatten(), reduction="sum"
                    )
                    loss.backward()  # type: ignore[no-untyped-call]  # torch
                optimizer.step()
            found.append(time.process_time() - started_at)
    whole, cut = (min(found[1:]) for found in times)
    return whole / cut


def main() -> int:
    """Measure, print, and say whether the rule held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--turns", type=int, default=3, help="per model and batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory("cpu")
    print(", ".join(f"{name} {value}" for name, value in describe().items()), flush=True)
    is_slower = False
    for name in (name for name in MODELS if options.only in name):
        for width in (8, 16, 32, 64, 128):
            for size in (8, 16, 32):
                torch.manual_seed(0)
                model, samples = MODELS[name](width), make_samples(NUM_BATCHES * size)
                fetcher = Fetcher(samples, seed=0, collate=pad)
                requests = [(0, torch.arange(i, i + size)) for i in range(0, len(samples), size)]
                whole = [[fetcher[request]] for request in requests]
                fetcher.split = LengthSplit(least_values=0)
                cut = [[fetcher[request]] for request in requests]
                cut = [[batch, batch.longer] if batch.longer else [batch] for [batch] in cut]
                left_out = sum(b.inputs.numel() for [b] in whole)
                left_out -= sum(b.inputs.numel() for batches in cut for b in batches)
                share = 2 * left_out / NUM_BATCHES / needed(model, samples)  # 2: labels too
                gain = measure(model, (whole, cut), options.turns)
                is_slower |= share >= 1 and gain < _SLOWEST
                title = f"{name}, width {width}"
                print(f"{title:18}{size:4}  padding {share:6.2f}  gain {gain:.2f}", flush=True)
    return 1 if is_slower else 0


if __name__ == "__main__":
    sys.exit(main())
