"""States for tests of checkpoints: of every kind, and small ones that say which step they are of.

path = write_step(store, 4)     assert_holds(found_in(store))     reason_of(path)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.checkpoint.tensors import specs_of

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


CALLS = (
    *("make_folder", "create", "write", "flush_early", "sync", "close"),
    *("sync_folder", "rename", "unlink", "remove"),
)


def every_kind() -> dict[str, Tensor]:
    """Make a tensor of every dtype and every layout that a state can hold."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    raw = torch.randint(0, 255, (3, 5, 8), dtype=torch.uint8, generator=generator)
    kinds = {f"dtype.{t}": raw.ne(0) if t is torch.bool else raw.view(t) for t in DTYPES}
    tied = torch.nn.Parameter(noise(7, 3))
    wide = noise(6, 10)
    return kinds | {
        "model.conv.weight": noise(8, 3, 3, 3).to(memory_format=torch.channels_last),
        "model.conv.half": noise(8, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last),
        "model.transposed": wide.t(),
        "model.columns": wide[:, ::3],
        "model.expanded": noise(4, 1).expand(4, 6),
        "model.scalar": torch.tensor(2.5),
        "model.count": torch.tensor(17),
        "model.flag": torch.tensor(True),
        "model.half_scalar": torch.tensor(0.3).bfloat16(),
        "model.empty": torch.empty(0, 3),
        "model.no_columns": torch.empty(5, 0, dtype=torch.int64),
        "model.tied_in": tied,
        "model.tied_out": tied,
        "model.nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "model.conjugate": torch.complex(noise(2, 3), noise(2, 3)).conj(),
        "model.negative": torch.complex(noise(2, 3), noise(2, 3)).conj().imag,
        "optimizer.state.0.exp_avg": noise(1000),
        'odd "name" \\ \u00e9': noise(3),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    assert specs_of(found) == specs_of(expected)
    for name in expected:
        assert bytes_of(found[name]) == bytes_of(expected[name]), name


def bytes_of(tensor: Tensor) -> bytes:
    """Return what a tensor holds, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def small_state(step: int, *, size: int = 300) -> dict[str, Tensor]:
    """Make a state that no other step has."""
    return {
        "model.w": torch.arange(size, dtype=torch.float32) + step,
        "model.b": torch.full((3,), step).bfloat16(),
        "optimizer.step": torch.tensor(step),
    }


def write_step(
    store: CheckpointStore, step: int, *, size: int = 300, best: folder.Best | None = None
) -> Path:
    """Write the small state of a step."""
    state = small_state(step, size=size)
    return store.write(step, tensors=state, meta={"step": step}, best=best)


def found_in(store: CheckpointStore) -> folder.Found:
    """Find the newest checkpoint, which must be there and valid."""
    found, rejected = folder.find_newest(store.root)
    assert found is not None, rejected
    assert rejected == []
    return found


def reason_of(path: Path) -> str:
    """Say why a checkpoint, which must not be valid, is rejected."""
    rejected = folder.verify_checkpoint(path)
    assert isinstance(rejected, folder.Rejected)
    return rejected.reason


def assert_holds(found: folder.Found, *, size: int = 300) -> None:
    """Compare a checkpoint with the small state of its step."""
    tensors, meta = folder.load_checkpoint(found)
    assert_same(tensors, small_state(found.step, size=size))
    assert meta == {"step": found.step}


def disk_with(around: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Any:
    """Make a disk that has around(name, call, arguments) do each of its single calls."""
    disk = Disk()
    for name in CALLS:
        call = getattr(disk, name)
        setattr(disk, name, lambda *args, name=name, call=call: around(name, call, args))
    return disk
