"""setup.sh as it is typed: what it takes, makes, leaves alone, and how it gets over a kill.

Environments are real, with venv and pip, but need no network: what is installed are stubs, wheels
of a few hundred bytes under the names of the real packages. CI itself installs the real ones.
"""

import importlib.metadata
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, run_command, start_command

# The modules that setup.sh imports once: what has another name than its package.
MODULES = {
    "scikit-learn": ["sklearn/__init__.py", "sklearn/datasets.py"],
    "PyYAML": ["yaml.py"],
    "safetensors": ["safetensors/__init__.py", "safetensors/torch.py"],
    "torch": [
        "torch/__init__.py",
        *("torch/_dynamo.py", "torch/distributed/run.py", "torch/nn/parallel.py"),
        *("torch/utils/data.py", "torch/utils/tensorboard.py"),
    ],
}
# What a stub does when it is imported: wait for ever, if it is told to.
STUB = "import os\nname = os.environ.get('WAIT_FOR')\nif name:\n    open(name).read()\n"


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX", "PATH"])
def test_an_active_environment_that_has_everything_is_taken(name: str, copied: Path) -> None:
    own = Path(sys.executable).parent
    env = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PATH": "/usr/bin:/bin"}
    env[name] = f"{own}:/usr/bin:/bin" if name == "PATH" else str(own.parent)
    done = run_command([copied / "setup.sh", "--print_python"], timeout_s=20, env=env).ok()
    assert Path(done.stdout.strip()).parent == own
    assert done.stderr == ""
    assert not (copied / ".venv").exists()
    assert all((copied / name).is_dir() for name in ("data", "models", "runs"))


def test_the_checkout_pins_every_version_and_tests_have_those_of_the_extras() -> None:
    pins = {}
    for kind in ("", "-dev", "-extras"):
        lines = (ROOT / f"requirements{kind}.txt").read_text(encoding="utf-8").splitlines()
        words = {line.partition("#")[0].strip() for line in lines} - {"", "-r requirements.txt"}
        assert all(word.count("==") == 1 for word in words)
        pins[kind] = {word: word.partition("==")[0] for word in words}
    extras = pins["-extras"].items()
    tested = {"huggingface_hub", "transformers", "accelerate", "onnx", "onnxscript"}
    assert {name for _, name in extras & pins["-dev"].items()} == tested
    others = {"datasets", "wandb", "mlflow", "peft", "s3fs"}
    assert {name for _, name in extras - pins["-dev"].items()} == others


def test_wrong_options_are_refused(copied: Path) -> None:
    told = {"--fast": "unknown option --fast", "--offline": "needs the folder"}
    for words, what in (told | {"--offline nowhere": "no such folder"}).items():
        done = run_command([copied / "setup.sh", *words.split()], timeout_s=20)
        assert done.status == 2
        assert what in done.stderr
    assert not (copied / "runs").exists()


def test_without_a_new_python_it_says_so(copied: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "readlink", "mkdir"):
        (tools / name).symlink_to(str(shutil.which(name)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    env = {"PATH": str(tools), "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    done = run_command([copied / "setup.sh"], timeout_s=20, env=env)
    assert done.status == 1
    assert "no Python 3.11 or newer" in done.stderr
    assert not (copied / ".venv").exists()


@pytest.mark.slow
def test_a_killed_installation_is_made_anew_and_the_next_does_nothing(installed: Path) -> None:
    done = set_up(installed)
    assert done.status == 0
    assert "nothing to install" in done.stderr
    assert not (installed / ".venv" / "unfinished").exists()
    python = set_up(installed, "--print_python").stdout.strip()
    assert Path(python) == installed / ".venv" / "bin" / "python"
    run_command([python, "-I", "-c", "import torch.nn.parallel, yaml"], timeout_s=20).ok()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "torchvision", "is_enough"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.11.0", "0.26.0", True),
        ("2.12.1", "0.28.0", False),
        ("2.10.0", "0.25.0", False),
        ("2.15.0", "0.29.2", True),
        ("2.16.0", "0.31.0", False),
    ],
)
def test_a_torch_that_is_there_stays_if_it_is_new_enough(
    torch: str, torchvision: str, is_enough: bool, installed: Path
) -> None:
    pretend(installed, torch=torch, torchvision=torchvision)
    assert ("would install" in set_up(installed, "--dry-run").stderr) != is_enough


@pytest.mark.slow
def test_another_torch_gets_an_environment_of_its_own(installed: Path) -> None:
    for name, version in (("torch", "2.15.0"), ("torchvision", "0.29.2")):
        wheel(installed / "wheels", name, version)
    told = {"--torch 2.16.0": "2.11.0 to 2.15", "--torch": "2.11.0 to 2.15"}
    for words, what in told.items():
        assert what in set_up(installed, *words.split()).stderr
    assert ".venv-torch-2.15.0" in set_up(installed, "--dry-run", "--torch", "2.15.0").stderr
    done = set_up(installed, "--torch", "2.15.0", "--print_python").ok()
    own = installed / ".venv-torch-2.15.0"
    assert Path(done.stdout.strip()) == own / "bin" / "python"
    for folder, versions in ((own, ("2.15.0", "0.29.2")), (installed / ".venv", None)):
        [site] = folder.glob("lib/python*/site-packages")
        found = {d.name: d.version for d in importlib.metadata.distributions(path=[str(site)])}
        assert (found["torch"], found["torchvision"]) == (versions or ("2.13.0", "0.28.0"))
    assert "nothing to install" in set_up(installed, "--torch", "2.15.0").stderr


@pytest.mark.slow
def test_of_two_set_ups_one_waits_and_only_adds_what_is_missing(installed: Path) -> None:
    pretend(installed, torch="2.12.1", torchvision="0.27.1")
    wheel(installed / "wheels", "extra", "1.0")
    with (installed / "requirements.txt").open("a") as pins:
        pins.write("extra==1.0  # new\n")
    with (installed / ".venv" / "lock").open("a") as lock:
        flock(lock, LOCK_EX)
        argv = [installed / "setup.sh", "--offline", "wheels"]
        with start_command(argv, cwd=installed) as command:
            command.wait_for(
                lambda: "waiting for it" in command.stderr, timeout_s=20, what="its turn"
            )
            assert "installing" not in command.stderr
            lock.close()  # which gives the turn to the other
            done = command.wait(timeout_s=60).ok()
    assert "rebuilding" not in done.stderr
    assert "making" not in done.stderr
    assert "nothing to install" in set_up(installed).stderr
    [site] = (installed / ".venv").glob("lib/python*/site-packages")
    found = {d.name: d.version for d in importlib.metadata.distributions(path=[str(site)])}
    assert (found["torch"], found["extra"]) == ("2.12.1", "1.0")


@pytest.mark.slow
def test_a_package_on_pythonpath_does_not_count_for_venv(installed: Path) -> None:
    with (installed / "requirements.txt").open("a") as pins:
        pins.write("elsewhere==1.0\n")
    with zipfile.ZipFile(wheel(installed / "wheels", "elsewhere", "1.0")) as file:
        file.extractall(installed / "site")
    env = {"PYTHONPATH": str(installed / "site"), "PATH": "/usr/bin:/bin"}
    assert "would install" in set_up(installed, "--dry-run", env=env).stderr


@pytest.mark.slow
def test_a_wheel_that_is_missing_is_told_and_the_way_out(installed: Path) -> None:
    (installed / "requirements.txt").write_text("no-such-package==1.0\n")
    done = set_up(installed)
    assert done.status == 1
    for words in ("no-such-package==1.0", "failed after", "could not install", "--offline"):
        assert words in done.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The script in a folder with a space, content with the environment of this test."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "setup.sh", folder)
    (folder / "requirements.txt").write_text(f"pytest=={pytest.__version__}\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of stubs, whose installation was killed once on its way."""
    folder = tmp_path_factory.mktemp("an environment")
    shutil.copy(ROOT / "setup.sh", folder)
    (folder / "requirements.txt").write_text("")
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            version = version if name.startswith("torch") else "0.0.1"  # so that nobody has it
            wheel(folder / "wheels", name, version)
            with (folder / "requirements.txt").open("a") as pins:
                pins.write(f"{name}=={version}\n")
    nobody_writes = folder / "fifo"
    os.mkfifo(nobody_writes)
    argv = [folder / "setup.sh", "--offline", "wheels"]
    with start_command(argv, cwd=folder, env={"WAIT_FOR": str(nobody_writes)}) as command:
        command.wait_for(
            lambda: "importing" in command.stderr, timeout_s=90, what="the first import"
        )
    assert "would install" in set_up(folder, "--dry-run").stderr
    done = set_up(folder).ok()
    assert "interrupted; rebuilding .venv" in done.stderr
    return folder


@pytest.fixture
def installed(made: Path) -> Iterator[Path]:
    """The same for one test, which may change pins and versions."""
    pins = (made / "requirements.txt").read_text()
    yield made
    (made / "requirements.txt").write_text(pins)
    pretend(made, torch="2.13.0", torchvision="0.28.0")


def set_up(folder: Path, *words: str, env: dict[str, str] | None = None) -> Finished:
    """Run setup.sh of a folder, from above it, with the stubs that lie there."""
    wheels = f"{folder.name}/wheels"
    argv = [folder / "setup.sh", "--offline", wheels, *words]
    # WHY no file: this machine's own may cap the versions
    env = {"PIP_CONFIG_FILE": os.devnull, **(env or {})}
    return run_command(argv, timeout_s=90, cwd=folder.parent, env=env)


def wheel(folder: Path, name: str, version: str) -> Path:
    """Write a package that has nothing in it but what can be imported."""
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as file:
        for module in MODULES.get(name, [f"{name}.py"]):
            file.writestr(module, STUB)
        for part, text in info.items():
            file.writestr(f"{stem}.dist-info/{part}", text)
    return path


def pretend(folder: Path, **versions: str) -> None:
    """Change what is written down of the installed versions."""
    for name, version in versions.items():
        [path] = (folder / ".venv").glob(f"lib/python*/site-packages/{name}-*.dist-info/METADATA")
        path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
