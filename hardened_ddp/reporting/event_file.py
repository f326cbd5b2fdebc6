"""TensorBoard's file format: encodes scalars.

Owns the encoding: events are protocol buffers (tensorboard's event.proto and summary.proto), each
framed as a TFRecord (length, checksum, data, checksum). Both formats are public and frozen.
WHY not tensorboard's own writers: they load 160 modules, and cost 5 MiB of memory on rank 0 and up
to half a second of start-up time, for the messages below. Reading the files needs tensorboard.

What goes wrong here: a wrong field number shows nothing in TensorBoard, and raises no error.
The tests read what this writes with tensorboard itself.
"""

import struct
from collections.abc import Mapping
from functools import cache

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CRC32C_POLYNOMIAL = 0x82F63B78
_SESSION_START = 1  # event.proto's SessionLog.SessionStatus


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
