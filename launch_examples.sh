#!/usr/bin/env bash
# Numbered presets: each is one command, shown with --dry-run.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"

usage() {
  cat <<'TEXT'
usage: ./launch_examples.sh [--dry-run] PRESET [more arguments for the command]

   1     single GPU (the CPU if there is none)
   2     all GPUs of this node (2 ranks on the CPU if there is none)
   3     4 GPUs, smaller batch
   4     debug: torch's safe checks, verbose logs of every rank
   5     conservative: nothing clever, and errors of single samples are left out
   6     CPU only
   7     mixed precision with gradient accumulation
   8     resume the newest run
   9     TensorBoard over all runs
  10     doctor: check this machine
  test   install the test tools and run the tests

--dry-run prints the command and does nothing else.
TEXT
}

dry_run=false
words=()
for word in "$@"; do
  if [[ $word == --dry-run ]]; then dry_run=true; else words+=("$word"); fi
done
if ((${#words[@]} == 0)); then
  usage
  exit 0
fi
preset=${words[0]}
more=("${words[@]:1}")

count_gpus() {
  if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
    local listed=${CUDA_VISIBLE_DEVICES//[^,]/}
    if [[ -z $CUDA_VISIBLE_DEVICES || $CUDA_VISIBLE_DEVICES == -1 ]]; then echo 0; else echo $((${#listed} + 1)); fi
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

case $preset in
  1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10) setup=(--print_python) ;;
  test) setup=(--dev --print_python) ;;
  *)
    echo "launch_examples.sh: there is no preset '$preset'" >&2
    usage >&2
    exit 2
    ;;
esac
if $dry_run; then python=python; else python=$(./setup.sh "${setup[@]}"); fi

gpus=$(count_gpus)
script=(ddp_training.py)
torchrun=("$python" -m torch.distributed.run --standalone)
ranks=$((gpus > 0 ? gpus : 2))
case $preset in
  1) command=("$python" "${script[@]}" --single_gpu --batch_size 32 --epochs 5) ;;
  2) command=("${torchrun[@]}" "--nproc_per_node=$ranks" "${script[@]}" --batch_size 16 --epochs 5) ;;
  3)
    command=("${torchrun[@]}" --nproc_per_node=4 "${script[@]}" --batch_size 16 --epochs 10)
    if ((gpus < 4)); then
      echo "launch_examples.sh: $gpus GPUs here and not 4: running 4 ranks on the CPU" >&2
      command+=(--cpu_only)
    fi
    ;;
  4) command=("${torchrun[@]}" "--nproc_per_node=$ranks" "${script[@]}" --debug --log_interval 10 --batch_size 16) ;;
  5) command=("${torchrun[@]}" "--nproc_per_node=$ranks" "${script[@]}" --find_unused_parameters --num_workers 0 --batch_size 8 --continue_on_error) ;;
  6) command=("$python" "${script[@]}" --cpu_only --batch_size 8 --epochs 2) ;;
  7)
    amp=auto
    if ((gpus == 0)); then amp=bf16; fi
    command=("${torchrun[@]}" "--nproc_per_node=$ranks" "${script[@]}" --amp "$amp" --batch_size 8 --accumulation_steps 4)
    ;;
  8) command=("$python" "${script[@]}" --resume newest) ;;
  9) command=("$python" -m tensorboard.main --logdir runs) ;;
  10) command=("$python" "${script[@]}" doctor) ;;
  test) command=("$python" test_ddp_training.py) ;;
esac
command+=("${more[@]}")

if $dry_run; then
  printf '%q ' "${command[@]}" | sed 's/ $//'
  echo
  exit 0
fi
if [[ ${command[*]} == *torch.distributed.run* ]]; then
  # WHY: torchrun would set this too, and say so in four lines of stars.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
exec "${command[@]}"
