"""Reads safetensors files with torch alone, where a lent machine lacks the package.

gpu_report.py puts this folder on PYTHONPATH there; no other program sees it.
"""

import json
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import torch


class SafetensorError(Exception):
    """A file is no safetensors file."""


class safe_open:  # the package's name
    """What the trainer uses of the class of the same name."""

    def __init__(self, path: str | Path, framework: str, device: str = "cpu") -> None:
        self._content = bytearray(Path(path).read_bytes())
        try:
            (length,) = struct.unpack("<Q", self._content[:8])
            self._header: dict[str, Any] = json.loads(self._content[8 : 8 + length])  # Any: JSON
        except (struct.error, ValueError) as error:
            raise SafetensorError(f"{path}: {error}") from error
        self._header.pop("__metadata__", None)
        self._begin = 8 + length

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Keep nothing open: the file was read as a whole."""

    def keys(self) -> list[str]:
        """Name the tensors."""
        return list(self._header)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, a view of the bytes that were read."""
        # WHY here: that module imports this one
        from hardened_ddp.checkpoint.tensors import DTYPE_CODES

        entry = self._header[name]
        dtype = next(dtype for dtype, code in DTYPE_CODES.items() if code == entry["dtype"])
        first, last = entry["data_offsets"]
        if first == last:
            return torch.empty(entry["shape"], dtype=dtype)
        whole = memoryview(self._content)[self._begin + first : self._begin + last]
        return torch.frombuffer(whole, dtype=torch.uint8).clone().view(dtype).view(entry["shape"])
