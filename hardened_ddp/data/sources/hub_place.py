"""What stands behind hf:, a folder or a name on the Hugging Face Hub, and whether the Hub answers.

WHY before the libraries look: a folder that was mistyped looks like a name to them, and a Hub that
does not answer is asked again for half a minute.
Does not own: loading (hub_sets.py, hub_stream.py, model/huggingface.py).
"""

import http.client
import importlib
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import HardenedError

PREFIX = "hf:"
_WHAT = "a name after hf:"
ANSWER_S = 3.0
"""How long the Hub may take to answer at all. Downloads may be as slow as they are."""


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


def is_on_disk(place: str) -> bool:
    """Return whether what find_place returned is a folder or a file."""
    return Path(place).exists()


def hub_answers() -> bool:
    """Return whether the Hub, or what HF_ENDPOINT names, answers; False if HF_HUB_OFFLINE is set.

    Whatever it answers counts: what that means is for the libraries.
    """
    settings = _settings()
    if settings.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(settings.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=ANSWER_S).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:  # it did not answer in time, or hung up
        return False
    return True


def is_cached(place: str, file: str) -> bool:
    """Return whether a file of the Hub's repository place is in the cache."""
    hub = import_extra("huggingface_hub", what=_WHAT)
    return isinstance(hub.try_to_load_from_cache(place, file), str)


def no_answer(name: str, *, error: type[HardenedError]) -> HardenedError:
    """Make the error for a name that is neither here nor to be had from the Hub."""
    settings = _settings()
    is_off = settings.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set" if is_off else f"{settings.ENDPOINT} does not answer"
    return error(
        f"{name}: there is no folder {name.removeprefix(PREFIX)} here, the cache of the Hugging "
        f"Face libraries has nothing of that name, and {why}",
        fix="check the name; without network, copy a folder from a machine that has it, written by "
        "save_pretrained() for a model, by save_to_disk() for a dataset: hf:FOLDER",
    )


def _settings() -> ModuleType:
    """Return what the library has read from the environment."""
    import_extra("huggingface_hub", what=_WHAT)
    return importlib.import_module("huggingface_hub.constants")
