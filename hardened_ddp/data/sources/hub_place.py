"""What stands behind hf:, a folder or a name on the Hugging Face Hub.

WHY before the libraries look: a folder that was mistyped looks like a name to them.
Does not own: loading (hub_sets.py, hub_stream.py, model/huggingface.py).
"""

from pathlib import Path

from hardened_ddp.errors import HardenedError

PREFIX = "hf:"


def find_place(name: str, *, error: type[HardenedError]) -> str:
    """Return the folder or the Hub's name behind hf:. Raises error for a folder that is missing."""
    place = name.removeprefix(PREFIX)
    path = Path(place).expanduser()
    if path.exists():
        return str(path)
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        above = next(parent for parent in path.absolute().parents if parent.is_dir())
        raise error(
            f"{name}: there is no such folder; the last part of its path that exists is {above}",
            fix="check the path; a name on the Hub is NAME or OWNER/NAME",
        )
    return place
