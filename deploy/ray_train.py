"""Train on a cluster of Ray: one worker for each rank.

    python deploy/ray_train.py --workers 4 --gpus 1 -- --run_name first --output_dir /shared/runs

Each worker of Ray Train starts hardened-ddp as a process of its own. WHY not in the worker: there
the process group exists already, and the function is no main thread, so it could handle no signal.
A run that was stopped or lost a rank (status 3, 75) raises, and Ray starts it again, --failures
times; so does any other error. Put --output_dir on a disk that all nodes share, or use --mirror.
"""

import argparse
import os
import socket
import subprocess
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="ranks of the run")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each rank")
    parser.add_argument("--failures", type=int, default=3, help="how often to start it again")
    parser.add_argument("words", nargs="*", help="arguments of hardened-ddp, after --")
    asked = parser.parse_args()

    # WHY v2 by name: ray.train.data_parallel_trainer is of v1, and refuses the configs of v2
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        run_one_rank,
        train_loop_config={"words": asked.words},
        scaling_config=ScalingConfig(
            num_workers=asked.workers,
            use_gpu=asked.gpus > 0,
            resources_per_worker={"GPU": asked.gpus} if asked.gpus else None,
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=asked.failures)),
    )
    trainer.fit()


def run_one_rank(config: dict[str, Any]) -> None:
    """Run hardened-ddp as the rank of this worker. Raises RuntimeError unless it finished."""
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    with socket.create_server(("", 0)) as holder:  # a port that is free now, on rank 0's host
        mine = f"{ray.util.get_node_ip_address()}:{holder.getsockname()[1]}"
    address, _, port = broadcast_from_rank_zero(mine).rpartition(":")
    launch = {
        "RANK": context.get_world_rank(),
        "LOCAL_RANK": context.get_local_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    env = os.environ | {name: str(value) for name, value in launch.items()}
    argv = [sys.executable, "-m", "hardened_ddp_command", "--stop_status", "3", *config["words"]]
    status = subprocess.run(argv, env=env, check=False).returncode
    if status != 0:
        raise RuntimeError(f"hardened-ddp ended with status {status} (3: stopped, 75: try again)")


if __name__ == "__main__":
    main()
