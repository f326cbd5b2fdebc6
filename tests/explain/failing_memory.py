"""Programs that run out of memory, or raise errors of Python's own types."""

import resource

import torch
import torch.distributed as dist

from tests.explain.reproducers import reproduces, throw

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
FULL += "which 1.19 GiB is free."


@reproduces("memory-host")
def memory_host_python() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    bytearray(2**40)


@reproduces("python-keyerror", num_ranks=2, guilty=1)
def python_key_error_on_one() -> None:
    batch = {"image": torch.ones(4)}
    if dist.get_rank() == 1:
        batch["label"]
    dist.all_reduce(batch["image"])


@reproduces("python-indexerror", num_ranks=2)
def python_index_error_on_all() -> None:
    rank = dist.get_rank()
    dist.barrier()  # WHY: else rank 0 may still connect, which fails with other words
    [1, 2][rank + 2]


@reproduces("python-raised", num_ranks=2, guilty=1)
def python_own_class() -> None:
    rank = dist.get_rank()

    class TokenizerDrift(Exception):
        pass

    if rank == 1:
        raise TokenizerDrift("vocabulary has 32001 entries, checkpoint 32000")
    dist.barrier()


@reproduces("python-zerodivisionerror", num_ranks=2, guilty=1)
def python_chained() -> None:
    rank = dist.get_rank()
    if rank == 1:
        try:
            1 / (rank - 1)
        except ZeroDivisionError as error:
            raise RuntimeError("validation failed") from error
    dist.barrier()


@reproduces("DDP-S02")
def own_codes() -> None:
    from hardened_ddp.errors import OutOfMemoryError

    error = OutOfMemoryError("rank 1, step 412, backward, samples [3, 4]", fix="lower --batch_size")
    print(f"08:00:00 [rank 1] ERROR {error}")
    raise SystemExit(1)


reproduces("memory-host")(lambda: torch.empty(2**60, dtype=torch.uint8))
reproduces("memory-gpu")(lambda: throw(torch.OutOfMemoryError(FULL)))
