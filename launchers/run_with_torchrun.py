#!/usr/bin/env python3
"""Run a script under torchrun, and first show its ranks.

    torchrun --nproc_per_node=2 launchers/run_with_torchrun.py
    torchrun --nproc_per_node=2 launchers/run_with_torchrun.py ddp_training.py --epochs 2
    torchrun --nproc_per_node=2 launchers/run_with_torchrun.py --inspect

torchrun starts --nproc_per_node copies of this file on each machine, and sets their environment
variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It also watches
them: if one dies it ends the others, and with --max_restarts=3 it starts all of them again.

This file shows what these variables say (rank, local rank, world size, and the rendezvous at
MASTER_ADDR:MASTER_PORT), calls each collective once (lesson.py), and then runs the script in
the same processes. It reads nothing of torchrun that the script itself does not read.
"""

import os
import sys
from pathlib import Path

# WHY: Python adds only the folder of this file; hardened_ddp is in the parent folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.errors import HardenedError
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.ranks.launchers_env import command_words, with_arguments
from launchers.running import begin_rank, make_parser, read_arguments, run_script


def main(argv: list[str]) -> None:
    parser = make_parser("run_with_torchrun.py", __doc__)
    parser.add_argument("--inspect", action="store_true", help="only show the ranks; run no script")
    parser.add_argument("--no_lesson", action="store_true", help="only run the script")
    options, words = read_arguments(parser, argv)

    # Everything that torchrun tells a rank is in the environment.
    launch = read_launch(os.environ)
    if launch.launcher == "none":
        sys.exit(
            "run_with_torchrun.py: this process was not started by torchrun (RANK is not set)\n"
            f"  next: {with_arguments(command_words('torchrun', 2, env={}))}"
        )
    begin_rank(launch, words, with_lesson=not options.no_lesson)
    if not options.inspect:
        run_script(words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HardenedError as error:
        print(f"run_with_torchrun.py: error {error}", file=sys.stderr)
        sys.exit(error.exit_status)
