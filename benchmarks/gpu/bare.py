"""The bare DDP loop on one GPU, as torch's tutorial has it, in bf16: python -m benchmarks.gpu.bare.

What this project is compared with. Fused AdamW, pinned batches from loader workers, channels last
for images: what somebody who knows torch would write.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gpu import meter, works


def main() -> None:
    """Join a process group of one rank, train, leave it."""
    options = _read_options()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    store = dist.FileStore(tempfile.NamedTemporaryFile(delete=False).name, 1)  # noqa: SIM115
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=0, world_size=1)
    meter.install()
    train(options, device)
    dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train for the steps that the meter wants."""
    size = works.sizes(options.small)[options.work]
    num_samples = options.steps * size.batch_size
    samples = works.Samples(
        train=True, work=options.work, small=options.small, num_samples=num_samples
    )
    model = works.model(options.work, small=options.small).to(device)
    is_images = options.work == "resnet50"
    if is_images:
        model = model.to(memory_format=torch.channels_last)
    if options.compile:
        model.compile()
    network = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    sampler: DistributedSampler[int] = DistributedSampler(samples)
    loader = DataLoader(
        samples,
        batch_size=size.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    for inputs, labels in loader:
        inputs, labels = (part.to(device, non_blocking=True) for part in (inputs, labels))
        if is_images:
            inputs = inputs.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = network(inputs)
            loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", required=True, choices=works.SIZES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
