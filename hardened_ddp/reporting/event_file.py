"""TensorBoard's file format: encodes scalars, texts and images, of which it makes one PNG.

Owns the encoding: events are protocol buffers (tensorboard's event.proto and summary.proto), each
framed as a TFRecord (length, checksum, data, checksum). Both formats are public and frozen.
WHY not tensorboard's own writers: they load 160 modules, and cost 5 MiB of memory on rank 0 and up
to half a second of start-up time, for the four messages below. Reading the files needs tensorboard.

What goes wrong here: a wrong field number shows nothing in TensorBoard, and raises no error.
The tests read what this writes with tensorboard itself.
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CRC32C_POLYNOMIAL = 0x82F63B78
_DT_STRING = 7  # tensor_shape.proto's DataType
_SESSION_START = 1  # event.proto's SessionLog.SessionStatus

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


def first_record(*, wall_time: float) -> bytes:
    """Make the first record of a file."""
    return _record(wall_time, 0, _bytes_field(3, b"brain.Event:2"))


def restart_record(step: int, *, wall_time: float) -> bytes:
    """Make the record that discards what earlier files have for step and later steps."""
    return _record(wall_time, step, _bytes_field(7, _int_field(1, _SESSION_START)))


def scalars_record(step: int, values: Mapping[str, float], *, wall_time: float) -> bytes:
    """Make one record of several numbers; NaN and infinity are kept."""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + _key(2, _FIXED32) + _float(number))
        for tag, number in values.items()
    )
    return _record(wall_time, step, _bytes_field(5, summary))


def image_record(
    step: int, tag: str, png: bytes, *, width: int, height: int, wall_time: float
) -> bytes:
    """Make a record of one image, given as an encoded PNG."""
    image = _int_field(1, height) + _int_field(2, width) + _int_field(3, 3) + _bytes_field(4, png)
    value = _bytes_field(1, tag.encode()) + _bytes_field(4, image)
    return _record(wall_time, step, _bytes_field(5, _bytes_field(1, value)))


def text_record(step: int, tag: str, text: str, *, wall_time: float) -> bytes:
    """Make a record of one text, shown as Markdown."""
    plugin = _bytes_field(1, b"text")
    metadata = _bytes_field(1, plugin)
    shape = _bytes_field(2, _int_field(1, 1))
    tensor = _int_field(1, _DT_STRING) + _bytes_field(2, shape) + _bytes_field(8, text.encode())
    value = _bytes_field(1, tag.encode()) + _bytes_field(8, tensor) + _bytes_field(9, metadata)
    return _record(wall_time, step, _bytes_field(5, _bytes_field(1, value)))


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
            _png_chunk(b"IHDR", header),
            _png_chunk(b"IDAT", zlib.compress(rows)),
            _png_chunk(b"IEND", b""),
        )
    )


def crc32c(data: bytes) -> int:
    """Compute the checksum of TFRecord: the Castagnoli CRC, which zlib does not have."""
    table = _crc_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CRC32C_POLYNOMIAL if entry & 1 else 0)
        table.append(entry)
    return tuple(table)


def _record(wall_time: float, step: int, content: bytes) -> bytes:
    """Frame one event."""
    event = _key(1, _FIXED64) + struct.pack("<d", wall_time) + _int_field(2, step) + content
    length = struct.pack("<Q", len(event))
    return b"".join((length, _masked_crc(length), event, _masked_crc(event)))


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _float(number: float) -> bytes:
    try:
        return struct.pack("<f", number)
    except OverflowError:  # above the float32 range
        return struct.pack("<f", float("inf") if number > 0 else float("-inf"))


def _bytes_field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _int_field(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Encode seven bits per byte, lowest first. Negative values are not needed here."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
