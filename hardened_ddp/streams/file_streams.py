"""The names of --dataset that read files as a stream: text:GLOB, parquet:GLOB, tar:GLOB.

Owns their --dataset_args. Does not own: the formats (text_shards.py, parquet_shards.py,
tar_shards.py), what they have in common (shard_files.py).
"""

from collections.abc import Callable, Mapping, Sequence

from hardened_ddp.streams.parquet_shards import ParquetFormat
from hardened_ddp.streams.shard_files import NUM_SHARDS, FileStream, open_files
from hardened_ddp.streams.tar_shards import TarFormat
from hardened_ddp.streams.text_shards import TextFormat


def open_text(
    name: str,
    *,
    train: bool,
    test: str = "",
    transform: str = "",
    num_shards: int = NUM_SHARDS,
    num_classes: int = 0,
) -> FileStream | None:
    """Open text files. test: a pattern of the test files. transform: makes a sample of a line."""
    return open_files(
        name,
        TextFormat,
        train=train,
        test=test,
        transform=transform,
        num_shards=num_shards,
        num_classes=num_classes,
    )


def open_parquet(
    name: str,
    *,
    train: bool,
    test: str = "",
    transform: str = "",
    num_shards: int = NUM_SHARDS,
    num_classes: int = 0,
    columns: Sequence[str] = (),
) -> FileStream | None:
    """Open parquet files. columns: only these. transform: makes a sample of a row."""
    return open_files(
        name,
        lambda _: ParquetFormat(columns),
        train=train,
        test=test,
        transform=transform,
        num_shards=num_shards,
        num_classes=num_classes,
    )


def open_tar(
    name: str,
    *,
    train: bool,
    test: str = "",
    transform: str = "",
    num_shards: int = NUM_SHARDS,
    num_classes: int = 0,
    image_size: int = 0,
) -> FileStream | None:
    """Open tar files. image_size: scale images. transform: makes a sample of the members."""
    return open_files(
        name,
        lambda total_bytes: TarFormat(total_bytes, image_size=image_size),
        train=train,
        test=test,
        transform=transform,
        num_shards=num_shards,
        num_classes=num_classes,
    )


FILE_STREAMS: Mapping[str, Callable[..., FileStream | None]] = {
    "text": open_text,
    "parquet": open_parquet,
    "tar": open_tar,
}
