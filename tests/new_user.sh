#!/usr/bin/env bash
# Do what a new user does with an installation: install, train in an empty folder, be stopped in a
# pod and lose its disk, explain a log where there is no torch. The status is 0 if all of it works.
#
#   tests/new_user.sh WORK PYTHON   WORK: an empty folder; PYTHON: it has torch, setuptools and pip
#
# PYTHON's packages are seen by the new environment, so that torch is not installed again.
set -euo pipefail
clone=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
work=$1
base=$2

check() { # WHAT FILE PATTERN
  grep -qE -- "$3" "$2" && return
  echo "new_user.sh: $1: no line of $2 has: $3" >&2
  cat "$2" >&2
  exit 1
}

# WHY a copy: building leaves files in the folder of the sources.
mkdir "$work/source"
(cd "$clone" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source")
"$base" -m venv --without-pip "$work/with_torch"
"$base" -m venv --without-pip "$work/without_torch"
site=$("$base" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
echo "$site" >"$(echo "$work"/with_torch/lib/python*/site-packages)/torch.pth"
pip=("$base" -m pip --disable-pip-version-check)
"$work/with_torch/bin/python" -m pip install -q --no-build-isolation --disable-pip-version-check \
  "$work/source"
# pip builds with the tools of PYTHON, and installs what it built where there is nothing else.
"${pip[@]}" wheel -q --no-deps --no-build-isolation -w "$work" "$work/source/ddp_doctor"
"${pip[@]}" --python "$work/without_torch/bin/python" install -q "$work"/ddp_doctor-*.whl

mkdir "$work/empty"
cd "$work/empty"
PATH=$work/with_torch/bin:$PATH
hardened-ddp --version >version.txt
check "the version" version.txt '^hardened-ddp [0-9.]+$'
check "torch's version" version.txt '^torch 2\.'
if hardened-ddp --max_stepz 2 >wrong.txt 2>&1; then exit 1; fi
check "a mistake" wrong.txt '^hardened-ddp: error .DDP-C01. 1 problem in the settings'

# A pod that is stopped, and its disk is lost: one process goes on from the mirror.
words=(--cpu_only --run_name pod --epochs 100000 --checkpoint_every_steps 5)
words+=(--mirror "file://$work/mirror")
env KUBERNETES_SERVICE_HOST=10.0.0.1 hardened-ddp --nproc_per_node 2 "${words[@]}" >pod.txt 2>&1 &
for _ in {1..1800}; do
  if grep -q 'is on the mirror' pod.txt || ! kill -0 $! 2>/dev/null; then break; fi
  sleep 0.1
done
kill -TERM $!
status=0
wait $! || status=$?
echo "status $status" >>pod.txt
check "a stop in a pod" pod.txt '^status 3$'
check "two ranks" pod.txt 'resume: +hardened-ddp --nproc_per_node 2 --resume runs/pod$'
mv runs/pod lost
step=$(grep -o '"step": [0-9]*' lost/summary.json | head -n 1 | grep -o '[0-9]*')
hardened-ddp "${words[@]}" --max_steps $((step + 2)) >next.txt 2>&1
check "the mirror" next.txt "fetched the checkpoint of step $step .* from file://"
check "one process" next.txt 'resume: +hardened-ddp --resume runs/pod$'
hardened-ddp explain runs/pod >explained.txt
check "explain" explained.txt finished

if "$work/without_torch/bin/python" -c 'import torch' 2>/dev/null; then exit 1; fi
echo '[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.' >log.txt
"$work/without_torch/bin/ddp-doctor" explain log.txt >explained.txt
check "explain without torch" explained.txt '^Rank 1: the GPU ran out of memory'
if "$work/without_torch/bin/ddp-doctor" explain none.txt 2>wrong.txt; then exit 1; fi
check "a log that is not there" wrong.txt '^ddp-doctor: error: none.txt'
