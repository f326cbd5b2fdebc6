"""What each launcher really puts into the environment of its ranks, as recorded from each.

Owns: whole environments, and what a test takes out of one or puts into it.
"""

from collections.abc import Mapping


def variables(text: str) -> dict[str, str]:
    """Read NAME=VALUE words."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)
# torchrun's agent says more: how many agents there are.
AGENT = {**TORCHRUN, **variables("TORCHELASTIC_RUN_ID=job1 GROUP_WORLD_SIZE=2")}
# An operator of Kubernetes, without torchrun: a pod is one rank.
OPERATOR = variables(
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PYTHONUNBUFFERED=1"
)
# TrainJob of Kubeflow Trainer 2.3: two pods with 4 ranks each.
TRAIN_JOB = variables(
    "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=job-master-0 "
    "PET_MASTER_PORT=23456"
)
# PyTorchJob of training-operator 1.9 of two pods with nprocPerNode 4, its second pod.
PYTORCH_JOB = {**OPERATOR, "WORLD_SIZE": "8", **TRAIN_JOB}
# srun --nodes=2 --ntasks-per-node=2 of Slurm 22.05, its last task.
SRUN = variables(
    "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4 "
    "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_STEP_NODELIST=gpu[09-10]"
)
# srun --ntasks-per-node=1: one torchrun on each node.
SRUN_AGENTS = SRUN | variables(
    "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
# What a batch script sees before any srun.
BATCH = variables(
    "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 "
    "SLURM_JOB_NODELIST=gpu[09-10]"
)
# mpirun -np 2 of Open MPI 4.1, its second rank.
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1889533953 PMIX_RANK=1"
)
OPEN_MPI_ON_TWO_HOSTS = OPEN_MPI | variables(
    "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1"
)
# mpirun -np 2 of MPICH 4.0 (Hydra), its second rank.
HYDRA = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")


def changed(env: Mapping[str, str], change: Mapping[str, str | None]) -> dict[str, str]:
    """Give env with a change: a value of None takes the variable away."""
    return {name: value for name, value in {**env, **change}.items() if value is not None}


def by_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on its one node."""
    # WHY the port: each start is a torchrun of its own
    return variables(
        f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={world_size} "
        f"GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
        f"TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3 "
        f"TORCHELASTIC_RUN_ID=tests-{port} TORCHELASTIC_USE_AGENT_STORE=False"
    )
