"""A grid of a few images as one PNG, without an imaging library."""

import struct
import zlib
from dataclasses import dataclass

import torch

MAX_PICTURES = 16
COLUMNS = 4
_SMALLEST_SIDE = 64
"""Smaller images are shown larger: a digit of 8 x 8 pixels can't be seen."""

_LARGEST_SIDE = 128
"""Larger images are subsampled: they only need to be recognisable."""

_GAP = 2
_GAP_GREY = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Pixels in rows from the top, one byte per channel."""

    width: int
    height: int
    channels: int
    """1 (grey) or 3 (red, green, blue)."""

    pixels: bytes


def draw_grid(images: torch.Tensor) -> Picture:
    """Put up to MAX_PICTURES images (N, C, H, W) of any range side by side, COLUMNS in a row.

    Each is stretched from its darkest to its brightest value. Of channels other than 1 or 3 only
    the first is shown.
    """
    shown = images[:MAX_PICTURES].detach()
    if shown.shape[1] not in (1, 3):
        shown = shown[:, :1]
    # WHY subsample first: a float copy of large images would take too much memory.
    every = -(-max(shown.shape[-2:]) // _LARGEST_SIDE)
    shown = shown[..., ::every, ::every].to("cpu", torch.float32).nan_to_num(0.0, 0.0, 0.0)
    low = shown.amin(dim=(1, 2, 3), keepdim=True)
    high = shown.amax(dim=(1, 2, 3), keepdim=True)
    shown = ((shown - low) / (high - low).clamp_min(1e-12)).mul_(255).round_().to(torch.uint8)
    # Each pixel becomes a square where an image is too small to be seen.
    times = max(1, _SMALLEST_SIDE // max(shown.shape[-2:]))
    shown = shown.repeat_interleave(times, dim=-2).repeat_interleave(times, dim=-1)
    count, channels, height, width = shown.shape
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    step_y, step_x = height + _GAP, width + _GAP
    canvas = torch.full(
        (rows * step_y + _GAP, columns * step_x + _GAP, channels), _GAP_GREY, dtype=torch.uint8
    )
    for index, image in enumerate(shown):
        top, left = index // columns * step_y + _GAP, index % columns * step_x + _GAP
        canvas[top : top + height, left : left + width] = image.permute(1, 2, 0)
    pixels = canvas.numpy().tobytes()
    return Picture(width=canvas.shape[1], height=canvas.shape[0], channels=channels, pixels=pixels)


def encode_png(picture: Picture) -> bytes:
    """Make the PNG file of a picture."""
    stride = picture.width * picture.channels
    rows = b"".join(
        b"\0" + picture.pixels[start : start + stride]  # 0: the row as it is, no filter
        for start in range(0, len(picture.pixels), stride)
    )
    colour_type = 2 if picture.channels == 3 else 0
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, colour_type, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(rows)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
