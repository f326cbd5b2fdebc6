#!/usr/bin/env bash
# Make the Python environment and the shared folders. Needs no GPU, so it runs on a login node.
# Does only what is left to do: it may be repeated, interrupted, and run by several at once.
set -euo pipefail
started_in=$PWD
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"

usage() {
  cat <<'TEXT'
usage: ./setup.sh [--dev] [--offline WHEELS] [--torch VERSION] [--dry-run] [--print_python]

  --dev              also install what the tests and checks need (requirements-dev.txt)
  --offline WHEELS   install from the folder WHEELS only, without network; fill it on another
                     machine of this kind, with the same Python and from this folder:
                     pip download -r requirements-dev.txt -d WHEELS
  --torch VERSION    any from 2.11 to 2.15, such as 2.15.0, in an environment of its own:
                     .venv-torch-VERSION in this folder
  --dry-run          say what would be done, and change nothing
  --print_python     print the path of the environment's Python on stdout, and nothing else there

Uses the active environment, or the python on PATH, if it has everything in requirements.txt: the
versions pinned there, and any torch from 2.11 to 2.15. Otherwise it makes .venv in this folder.
TEXT
}

venv=$PWD/.venv
requirements="requirements.txt"
wheels=""
torch=""
is_dry_run=false
prints_python=false
while (($#)); do
  case $1 in
    --dev) requirements="requirements-dev.txt" ;;
    --offline)
      if (($# < 2)); then
        echo "setup.sh: --offline needs the folder with the wheels" >&2
        exit 2
      fi
      wheels=$2
      shift
      ;;
    --torch)
      if [[ ! ${2:-} =~ ^2\.1[1-5]\.[0-9]+$ ]]; then
        echo "setup.sh: --torch needs a version from 2.11.0 to 2.15, such as 2.15.0" >&2
        exit 2
      fi
      torch=$2
      venv=$PWD/.venv-torch-$torch
      shift
      ;;
    --dry-run) is_dry_run=true ;;
    --print_python) prints_python=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "setup.sh: unknown option $1" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done
if [[ -n $wheels ]]; then
  # WHY: a relative path is relative to the caller's folder, which this script has left.
  [[ $wheels == /* ]] || wheels=$started_in/$wheels
  if [[ ! -d $wheels ]]; then
    echo "setup.sh: --offline $wheels: there is no such folder" >&2
    exit 2
  fi
fi

say() { echo "setup: $*" >&2; }

# Print what is done, do it, and print how long it took.
stage() {
  local what=$1 before=$SECONDS
  shift
  printf 'setup: %s ... ' "$what" >&2
  if ! "$@" >&2; then
    echo "failed after $((SECONDS - before)) s" >&2
    return 1
  fi
  echo "$((SECONDS - before)) s" >&2
}

# Print the pins that the Python $1 should have; status 0 if it has them, 3 if not. It reads only
# the metadata of packages: importing torch alone takes a second.
compare() {
  "$@" - "$requirements" "$torch" <<'PYTHON'
import importlib.metadata
import pathlib
import sys


def pins(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r"):
            yield from pins(path.parent / line[2:].strip())
        elif line:
            yield line.split("==")


def installed(name):
    try:
        return (importlib.metadata.version(name) or "").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def minor(version, major):
    """Give 13 for (2.13.0, 2), and 0 for another major version or none."""
    parts = version.split(".")
    return int(parts[1]) if parts[0] == major else 0


if sys.version_info < (3, 11):
    sys.exit(1)
wanted = dict(pins(pathlib.Path(sys.argv[1])))
found = {name: installed(name) for name in wanted}
version = sys.argv[2] or found.get("torch", "")
torch = minor(version, "2")
if 11 <= torch <= 15:
    # An installed torch is kept, with the torchvision that matches it.
    wanted["torch"] = version
    # From 0.29.1 on a torchvision works with later ones of torch, too.
    matching = min(torch + 15, 29)
    fits = minor(found["torchvision"], "0") == matching
    wanted["torchvision"] = found["torchvision"] if fits else f"0.{matching}.*"
for name, version in wanted.items():
    print(f"{name}=={version}")
sys.exit(0 if wanted == found else 3)
PYTHON
}

# Was an installation into .venv interrupted after it had changed something?
is_half_installed() {
  local folder
  [[ -e $venv/unfinished ]] || return 1
  for folder in "$venv"/lib/python*/site-packages; do
    [[ -d $folder && $folder -ot $venv/unfinished ]] || return 0
  done
  return 1
}

has_all() {
  local python=$1 options=()
  [[ -n $python && -x $python ]] || return 1
  if [[ ${python%/*} -ef $venv/bin ]]; then
    ! is_half_installed || return 1
    options=(-I) # WHY: .venv must be complete by itself, also without PYTHONPATH
  fi
  compare "$python" "${options[@]}" >/dev/null 2>&1
}

# Print the Python of an environment that has everything.
find_environment() {
  local python
  if [[ -n $torch ]]; then # only its own
    has_all "$venv/bin/python" && echo "$venv/bin/python"
    return
  fi
  for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
    "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$venv/bin/python"; do
    if has_all "$python"; then
      echo "$python"
      return
    fi
  done
  # WHY last: on many machines this is a wrapper that takes half a second.
  for python in python python3; do
    python=$(command -v "$python") || continue
    if has_all "$python"; then
      echo "$python"
      return
    fi
  done
  return 1
}

# Print the Python to make .venv with.
find_python() {
  local name lacks_pip=""
  for name in python3.13 python3.12 python3.11 python3 python; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      command -v "$name"
      return
    fi
    lacks_pip=${lacks_pip:-$name}
  done
  if [[ -n $lacks_pip ]]; then
    say "$lacks_pip can't make environments: it has no ensurepip. Install the package of your"
    say "system that has it (on Debian and Ubuntu: $lacks_pip-venv), then run ./setup.sh again"
  else
    say "no Python 3.11 or newer was found; install one, then run ./setup.sh again"
  fi
  return 1
}

# If two set-ups run at once, the second waits for the first. Without flock neither waits.
take_turn() {
  mkdir -p "$venv"
  exec 9>>"$venv/lock"
  command -v flock >/dev/null || return 0
  if ! flock --nonblock --conflict-exit-code 75 9; then
    say "another set-up is working on ${venv##*/}; waiting for it"
    flock 9 || true
  fi
}

make_environment() {
  local base=$1 pins pip note="" before=$SECONDS
  if is_half_installed; then
    say "the last installation was interrupted; rebuilding ${venv##*/}"
  fi
  if is_half_installed || ! "$venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf {} +
    touch "$venv/unfinished"
    stage "making ${venv##*/} with $("$base" --version)" "$base" -m venv "$venv"
  fi
  touch "$venv/unfinished" # WHY again: files that change from here on are newer than this one
  mapfile -t pins < <(compare "$venv/bin/python" -I)
  compgen -G "$venv/lib/python*/site-packages/torch" >/dev/null || note=" (torch is large)"
  # WHY --no-compile: Python compiles a file when it first imports it. All of them at once take as
  # long as the installation.
  pip=("$venv/bin/python" -I -m pip install -qq --no-input --disable-pip-version-check
    --no-compile)
  if [[ -n $wheels ]]; then
    pip+=(--no-index --find-links "$wheels")
  fi
  if ! PIP_USER=0 stage "installing $requirements$note" "${pip[@]}" "${pins[@]}"; then
    say "pip could not install $requirements; its error is above. To try again: ./setup.sh"
    say "Without network: ./setup.sh --offline WHEELS   (./setup.sh --help says how to fill it)"
    return 1
  fi
  # This also compiles what every run imports, once and not by all ranks at the same time
  # (torch._dynamo: DDP and the optimizers import it at their first use).
  if ! stage "importing it for the first time" "$venv/bin/python" -I -c "$first_import"; then
    say "what was installed can't be imported; the last line above says why"
    return 1
  fi
  rm "$venv/unfinished"
  say "ready in $((SECONDS - before)) s; to type commands yourself: source ${venv##*/}/bin/activate"
}
first_import="
import psutil, safetensors.torch, sklearn.datasets, yaml
import torch._dynamo, torch.distributed.run, torch.nn.parallel, torch.utils.data
import torch.utils.tensorboard
"

if python=$(find_environment); then
  $prints_python || say "nothing to install: $python has all of $requirements"
elif $is_dry_run; then
  say "would install $requirements into ${venv##*/}"
  python=$venv/bin/python
else
  trap 'echo >&2; say "interrupted; ./setup.sh continues from here"; exit 130' INT TERM
  base=$(find_python)
  take_turn
  python=$venv/bin/python
  has_all "$python" || make_environment "$base"
fi
$is_dry_run || mkdir -p data models runs
if $prints_python; then
  echo "$python"
fi
