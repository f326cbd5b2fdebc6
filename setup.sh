#!/usr/bin/env bash
# Make the Python environment and the shared folders. Safe to repeat, and after an interruption;
# needs no GPU, so it runs on a login node. Skips what is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'TEXT'
usage: ./setup.sh [--dev] [--offline WHEELS] [--print_python]

  --dev              also install what the tests and checks need
  --offline WHEELS   install from the folder WHEELS only, without network; fill it on another
                     machine with: pip download -r requirements-dev.txt -d WHEELS
  --print_python     print the path of the environment's Python on stdout, and nothing else there

Uses the active environment if it satisfies requirements.txt, else .venv in this folder.
TEXT
}

requirements=requirements.txt
offline=""
print_python=false
while (($#)); do
  case $1 in
    --dev) requirements="requirements-dev.txt" ;;
    --offline)
      if (($# < 2)); then
        echo "setup.sh: --offline needs the folder with the wheels" >&2
        exit 2
      fi
      offline=$2
      shift
      ;;
    --print_python) print_python=true ;;
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
if [[ -n $offline && ! -d $offline ]]; then
  echo "setup.sh: --offline $offline: there is no such folder" >&2
  exit 2
fi

say() { echo "setup: $*" >&2; }

# Compare what is installed with the pins, without importing anything heavy. Any torch from 2.11 to
# 2.13 will do, with whatever torchvision came with it.
satisfies() {
  "$1" - "$requirements" <<'PYTHON' 2>/dev/null
import importlib.metadata
import pathlib
import sys


def pins(path):
    for line in pathlib.Path(path).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            yield from pins(line[3:].strip())
        elif line:
            yield line.split("==")


if sys.version_info < (3, 11):
    sys.exit(1)
for name, wanted in pins(sys.argv[1]):
    try:
        found = importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        sys.exit(1)
    if name == "torch":
        if not (2, 11) <= tuple(int(part) for part in found.split(".")[:2]) <= (2, 13):
            sys.exit(1)
    elif name != "torchvision" and found != wanted:
        sys.exit(1)
PYTHON
}

find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3 python; do
    if command -v "$name" >/dev/null && "$name" -c \
      'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "no Python 3.11 or newer was found; install one, then run ./setup.sh again"
  exit 1
}

make_environment() {
  local started=$SECONDS
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
  fi
  say "installing $requirements into .venv (about a minute; torch is large)"
  local source=()
  if [[ -n $offline ]]; then
    source=(--no-index --find-links "$offline")
  fi
  # WHY --no-compile: Python compiles what is imported when it is; all of it would take as long
  # again as the installation itself.
  if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    "${source[@]}" -r "$requirements" >&2; then
    say "pip could not install $requirements (its reason is above)."
    say "Without network: ./setup.sh --offline WHEELS, with the wheels from another machine"
    exit 1
  fi
  say "installed in $((SECONDS - started)) s"
}

mkdir -p data models runs

python=""
for candidate in "$(command -v python || true)" "$PWD/.venv/bin/python"; do
  if [[ -n $candidate && -x $candidate ]] && satisfies "$candidate"; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  make_environment
  python=$PWD/.venv/bin/python
elif ! $print_python; then
  say "$python has all of $requirements"
fi
if $print_python; then
  echo "$python"
fi
