"""The commands that messages print: each works when it is pasted where the user stands.

That may be outside of the project's folder, in a shell where the environment of setup.sh is not
active, and a path may have a space.
Does not own: which launcher started the ranks, and how (ranks/launchers_env.py); packages that only
some commands need (data/foreign_code.py).
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.errors import MissingPackageError
from hardened_ddp.settings.wording import as_typed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ddp_training.py"
# The command that an installation of the package gives, and the package's own name.
PROGRAM = "hardened-ddp"

# The packages of requirements.txt without which no run starts, by the names to import.
NEEDED = ("torch", "numpy", "yaml", "psutil", "safetensors")


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A command up to where the script's own arguments begin, and the folder it belongs to."""

    words: tuple[str, ...]
    folder: str
    note: str = ""  # what a reader has to know besides; it becomes a comment of the shell

    # It is a program of the user's, with its arguments: it takes none of ours.
    is_whole: bool = False

    def typed(self, *arguments: str | Path) -> str:
        """Write the command with these arguments, for a shell in the working folder."""
        is_elsewhere = self.folder != working_folder() or _is_left()
        given = () if self.is_whole else arguments
        command = _joined((*map(_found, self.words), *given), in_full=is_elsewhere)
        if is_elsewhere:
            command = f"(cd {shlex.quote(self.folder)} && {command})"
        return f"{command}   # {self.note}" if self.note else command


def is_installed() -> bool:
    """Whether the installed command is used, and not the script of a clone."""
    return Path(sys.argv[0]).name == PROGRAM or ROOT.name in ("site-packages", "dist-packages")


def program_words() -> tuple[str, ...]:
    """Give the words that start this program: the installed command, or a clone's script."""
    if not is_installed():
        return (sys.executable, str(SCRIPT))
    for command in (Path(sys.argv[0]), Path(sys.executable).with_name(PROGRAM)):
        if command.name == PROGRAM and command.is_file():
            return (str(command.absolute()),)
    return (sys.executable, "-m", "hardened_ddp_command")


def program_name() -> str:
    """Give the name of this program for its messages."""
    return PROGRAM if is_installed() else SCRIPT.name


def own_command(*arguments: str | Path) -> str:
    """Write a command of this program that one process runs, such as doctor."""
    return StartCommand(program_words(), working_folder()).typed(*arguments)


def config_file() -> str:
    """Name the settings that every start uses: beside a clone's script, else where one stands."""
    return "config.yaml" if is_installed() else as_typed(SCRIPT.with_name("config.yaml"))


def download_command(*arguments: str) -> str:
    """Write what downloads on a machine with internet: a dataset, or weights to models/."""
    if (ROOT / "download.py").is_file():
        return python_command(ROOT / "download.py", *arguments)
    weights = "--pretrained" if "--model" in arguments else "--no_pretrained"
    train = own_command(*arguments, weights, "--cpu_only", "--max_steps", "1")
    return f"mkdir -p models/hub && {train}"


def python_command(*arguments: str | Path) -> str:
    """Write a command of this Python, such as -m tensorboard.main."""
    return StartCommand((sys.executable,), working_folder()).typed(*arguments)


def torchrun_words() -> tuple[str, ...]:
    """Compose the torchrun of this Python; by its name only where the shell finds that one."""
    ours = str(Path(sys.executable).with_name("torchrun"))
    is_found = shutil.which("torchrun") == ours
    return (ours,) if is_found else (sys.executable, "-m", "torch.distributed.run")


def pip_command(requirements: str, package: str = "") -> str:
    """Write how to install what a file of requirements names, or one package of it."""
    path = ROOT / requirements
    if path.is_file():
        if not package:
            return python_command("-m", "pip", "install", "-r", path)
        lines = path.read_text(encoding="utf-8").splitlines()
        wanted = [line.partition("#")[0].strip() for line in lines if line.startswith(package)]
    elif package:
        wanted = [package]
    else:  # an installed package: what it declares
        import importlib.metadata  # WHY here: only a message needs it

        lines = []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a copied folder
            lines = importlib.metadata.requires(PROGRAM) or []
        of_extras = [line for line in lines if ("extra ==" in line) is ("extras" in requirements)]
        wanted = [line.partition(";")[0].strip() for line in of_extras]
    return python_command("-m", "pip", "install", *wanted)


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error to report, or None if the missing package is another one."""
    if error.name not in NEEDED:
        return None
    script = ROOT / ".venv" / "bin" / "activate"
    command = shell_command("source", script)
    if is_installed():
        command = pip_command("requirements.txt")
    elif not script.is_file():
        command = f"{shell_command(ROOT / 'setup.sh')} && {command}"
    return MissingPackageError(
        f"{sys.executable} has no package {error.name}, without which nothing can be trained",
        fix=f"after this the same command again: {command}",
    )


def shell_command(*words: str | Path) -> str:
    """Write a command of the system, or only a Path, as one types it here."""
    return _joined(words, in_full=_is_left())


def look_at(folder: Path) -> str:
    """Write the commands that show why a folder can't be used."""
    return f"{shell_command('ls', '-ld', folder)}; {shell_command('df', '-h', folder)}"


def working_folder() -> str:
    """Give the working folder; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _is_left() -> bool:
    """Whether a launcher has left the user's folder for the project's: see launch_examples.sh."""
    return sys.argv[0] == str(SCRIPT) and working_folder() == str(ROOT)


def _joined(words: Iterable[str | Path], *, in_full: bool) -> str:
    typed: list[str] = []
    for word in words:
        text = str(word)
        if isinstance(word, Path):
            text = os.path.abspath(word) if in_full else as_typed(word)
            if text.startswith("-") or not (typed or "/" in text):  # an option, or not on PATH
                text = f"./{text}"
        typed.append(shlex.quote(text))
    return " ".join(typed)


def _found(word: str) -> str | Path:
    """Give a program by its name if the shell finds it so, else by its path; other words as is."""
    if not (os.path.isabs(word) and os.path.isfile(word)):
        return word
    name = os.path.basename(word)
    return name if shutil.which(name) == word else Path(word)
