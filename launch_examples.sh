#!/usr/bin/env bash
# Numbered presets: each is one command, and --dry-run shows it.
set -euo pipefail
started_in=$PWD
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"

usage() {
  cat <<'TEXT'
usage: ./launch_examples.sh [--dry-run] PRESET [more arguments for its command]

   1    one GPU, one process (the CPU if there is no GPU)
   2    all GPUs of this node (2 ranks on the CPU if there is none)
   3    4 GPUs, smaller batch (4 ranks on the CPU if there are fewer)
   4    debug: more checks, more log messages
   5    conservative: no workers, and samples that fail are left out
   6    CPU only
   7    mixed precision with gradient accumulation
   8    continue the newest run in one process (on all GPUs: 2 --resume newest)
   9    TensorBoard on all runs
  10    doctor: what is wrong with this machine?
  test  the quick tests, 3 minutes (--all: everything; --hostile, --soak; first --torch 2.15.0)

--dry-run prints the command, quoted for the shell, and does nothing else.
TEXT
}

dry_run=()
words=()
for word in "$@"; do
  if [[ $word == --dry-run ]]; then dry_run=("$word"); else words+=("$word"); fi
done
preset=${words[0]:-}
more=("${words[@]:1}")
setup=(./setup.sh --print_python "${dry_run[@]}")
case $preset in
  [1-9] | 10) ;;
  test)
    setup+=(--dev)
    if [[ ${more[0]:-} == --torch ]]; then
      setup+=("${more[@]:0:2}")
      more=("${more[@]:2}")
    fi
    ;;
  "" | -h | --help)
    usage
    exit 0
    ;;
  *)
    echo "launch_examples.sh: there is no preset '$preset'" >&2
    usage >&2
    exit 2
    ;;
esac

# Count the GPUs that a process started here sees, without importing torch.
count_gpus() {
  local here=0 seen=0 device devices
  if command -v nvidia-smi >/dev/null; then
    here=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
  else
    devices=$(compgen -G '/dev/nvidia[0-9]*') && here=$(wc -l <<<"$devices")
  fi
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} || $here == 0 ]]; then
    echo "$here"
    return
  fi
  IFS=', ' read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
  for device in "${devices[@]}"; do
    # WHY: CUDA takes the list up to the first entry that names no GPU of this machine.
    if [[ $device =~ ^[0-9]+$ ]]; then
      ((10#$device < here)) || break
    elif [[ $device != GPU-* && $device != MIG-* ]]; then
      break
    fi
    seen=$((seen + 1))
  done
  echo "$seen"
}

python=$("${setup[@]}")
if [[ $python == "$(command -v python)" ]]; then
  python=python
elif [[ $python == "$PWD"/.venv*/bin/python ]]; then
  python=${python#"$PWD/"}
fi
# WHY the whole path then: it tells the script that its user is not in this folder.
script=ddp_training.py
if [[ ! $started_in -ef . ]]; then script=$PWD/$script; fi
alone=("$python" "$script")
gpus=$(count_gpus)
ranks=$((gpus > 0 ? gpus : 2))
if [[ $preset == 3 ]]; then ranks=4; fi
# WHY not the torchrun beside that Python: its first line breaks when the folder is moved.
together=("$python" -m torch.distributed.run --standalone "--nproc_per_node=$ranks" "$script")
if ((ranks > 1)) && [[ -z ${OMP_NUM_THREADS:-} ]]; then
  together=(env OMP_NUM_THREADS=1 "${together[@]}") # torchrun also sets 1, but prints a warning
fi

case $preset in
  1) command=("${alone[@]}" --single_gpu --batch_size 32 --epochs 5) ;;
  2) command=("${together[@]}" --batch_size 16 --epochs 5) ;;
  3)
    command=("${together[@]}" --batch_size 16 --epochs 10)
    if ((gpus < 4)); then
      echo "launch_examples.sh: this machine has $gpus GPUs, not 4: starting 4 ranks on its CPU" >&2
      command+=(--cpu_only)
    fi
    ;;
  4) command=("${together[@]}" --debug --log_interval 10 --batch_size 16) ;;
  5)
    command=("${together[@]}" --find_unused_parameters --num_workers 0 --batch_size 8)
    command+=(--continue_on_error)
    ;;
  6) command=("${alone[@]}" --cpu_only --batch_size 8 --epochs 2) ;;
  7)
    # auto chooses the best type for the GPU; on a CPU it would choose none.
    amp=$([[ $gpus == 0 ]] && echo bf16 || echo auto)
    command=("${together[@]}" --amp "$amp" --batch_size 8 --accumulation_steps 4)
    ;;
  8) command=("${alone[@]}" --resume newest) ;;
  9) command=("$python" -m tensorboard.main --logdir runs) ;;
  10) command=("${alone[@]}" doctor) ;;
  test) command=("$python" test_ddp_training.py) ;;
esac
command+=("${more[@]}")

if ((${#dry_run[@]})); then
  printf -v line '%q ' "${command[@]}"
  line=${line% }
  if [[ ! $started_in -ef . ]]; then printf -v line '(cd %q && %s)' "$PWD" "$line"; fi
  echo "$line"
  exit 0
fi
exec "${command[@]}" # WHY exec: a signal to this script reaches the run itself
