#!/usr/bin/env bash
# Install the programs that some tests use: MPI, Slurm, ssh, network namespaces, and Chromium for the
# page of the command report. Best effort: a test whose program is missing is skipped with that
# reason.
set -euo pipefail

packages=(openmpi-bin mpich slurmctld slurmd slurm-client munge iproute2 util-linux
  openssh-server openssh-client)
programs=(mpirun.openmpi mpirun.mpich slurmctld slurmd sbatch munged ip nsenter sshd ssh)
PATH=$PATH:/usr/sbin:/sbin

has_all() {
  local program
  for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || return 1
  done
}

if { has_all && command -v chromium >/dev/null; } || [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends)
{ apt-get update -qq && "${install[@]}" "${packages[@]}"; } \
  >/dev/null 2>&1 || echo "== components: not installed; tests of MPI and Slurm are skipped" >&2
# WHY apart: it is large, and some distributions have it under another name
"${install[@]}" chromium >/dev/null 2>&1 ||
  echo "== components: no Chromium; the test of the report is skipped" >&2
