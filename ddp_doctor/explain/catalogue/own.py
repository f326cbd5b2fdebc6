"""Causes that this suite names itself: its error codes, as they stand in its logs."""

import re

from ddp_doctor.explain.events import Blame, Cause, Tier

TITLES = {
    "DDP-X01": "base of all our errors: a failure that has a known cause and a next step",
    "DDP-C01": "a setting is unknown, of the wrong type, out of range, or contradicts another one",
    "DDP-C02": "a loop of the user's own does what protect could not make good after a fault",
    "DDP-L01": "the environment that the launcher left is incomplete or contradicts itself",
    "DDP-G01": "the process group could not be formed: a rank is missing, a port is taken, no route",
    "DDP-G02": "ranks run other code, other settings or other data than rank 0",
    "DDP-G03": "work that one rank does for all of them failed there",
    "DDP-G04": "another rank died, or did not answer within the timeout",
    "DDP-G05": "one rank, or all ranks, made no progress for longer than the phase may take",
    "DDP-D01": "the dataset is unknown, missing, unreadable or empty",
    "DDP-D02": "a sample could not be read or has a value that the model can't take",
    "DDP-D03": "a DataLoader worker died, hung or ran out of shared memory",
    "DDP-D04": "more samples or steps were left out than max_errors allows",
    "DDP-M01": "the model is unknown, can't be built, or does not fit the data",
    "DDP-M02": "parameters got no gradient on some rank, so the gradient all-reduce can't finish",
    "DDP-M03": "the optimizer, its parameter groups or its schedule can't be used",
    "DDP-S01": "forward, loss or backward raised on this rank",
    "DDP-S02": "the GPU or the host ran out of memory in this step",
    "DDP-S03": "the loss or the gradient is NaN or infinite",
    "DDP-S04": "the last attempts all failed at the same step, so another attempt would fail there too",
    "DDP-S05": "the ranks' weights differ, and no known good state can replace them",
    "DDP-K01": "no checkpoint can be used, or one can't be written",
    "DDP-K02": "the checkpoint belongs to another model, optimizer or dataset",
    "DDP-K03": "the run folder can't be made, written or used",
    "DDP-X02": "a package that only this command needs is not installed",
    "DDP-X03": "a log that explain was given can't be read",
}
"""The codes of the trainer's errors, as its logs have them, and what each means."""

_TIERS = {"DDP-G04": Tier.LOST, "DDP-G05": Tier.TIMEOUT, "DDP-G02": Tier.MISMATCH}
_NAMED = r"\[{code}\] rank (?P<ranks>\d+)(?:,|(?= [rc]))(?P<message>.*)"
_PHRASES = {
    # The rank that prints it lost another one; only its cause names that rank.
    "DDP-G04": (
        r"\[DDP-G04\] (?P<message>.*Cause: rank (?P<ranks>\d+):.*)",
        r"\[DDP-G04\] (?P<message>.*)",
    ),
    "DDP-G02": (r"\[DDP-G02\] (?P<message>.*)",),
}
GUIDE = "DDP_TROUBLESHOOTING.md, section {code}"
_WORDS = {
    "again": "Start it again; it resumes from the newest valid checkpoint: $ {again}",
    "bf16": "Activations take half in 16 bits: $ {again} --amp bf16",
    "checkpointing": "Much less memory, a third more time: $ {again} --gradient_checkpointing",
    "checkpoints": "See whose the files are: $ ls -l {run}/checkpoints",
    "clear": "Clear what a launcher left in this shell: $ unset RANK LOCAL_RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT",
    "clip": "Clip the gradients, in 32 bits: $ {again} --clip_grad_norm 1 --amp off",
    "debug": "With the line of forward for an error in backward: $ {again} --debug",
    "disk": "If the disk is full, make room: $ df -h {run}",
    "doctor": "Check memory, disk, GPUs, network of its machine: $ python ddp_training.py doctor",
    "download": "Without network, fetch the data elsewhere with download.py, and copy them. $ ",
    "ecc": "Test the memory of that rank's machine: $ nvidia-smi -q -d ECC",
    "fewer": "If memory ran out, read with fewer workers: $ {again} --num_workers 1",
    "find": "Let the run find them and retry the step: $ {again} --find_unused_parameters auto",
    "folder": "See who owns it, and whether it may be written: $ ls -ld {run}",
    "gpus": "See what else is on the GPU: $ nvidia-smi",
    "help": "All settings with their values: $ python ddp_training.py --help",
    "kernel": "Ask its host whether memory ran out: $ dmesg -T | grep -i 'killed process'",
    "launch": "Let one launcher start all ranks; examples: $ python ddp_training.py --help",
    "leave": "If a sample is the cause, repair or leave out such: $ {again} --continue_on_error",
    "left": "See what was left out, and why: $ tail -n 20 {run}/skipped_samples.jsonl",
    "log": "Read how the log of the lost rank ends: $ tail -n 20 {log}",
    "longer": "If it was only slow, allow more time: $ {again} --hang_after_s 300",
    "more": "If that many are acceptable, allow more: $ {again} --max_errors 100000",
    "network": "Name the nodes' common network (ip -br addr): $ export NCCL_SOCKET_IFNAME=eth0",
    "next": "Do what the error itself says: $ grep -h 'next: ' {log}",
    "port": "See whether an earlier job holds the port: $ ps -ef | grep '[d]dp_training'",
    "same": "Compare the commit of the code on the named rank's node and on rank 0's. $ ",
    "stack": "Read its stack; the innermost line of its main thread is the place: $ cat {stack}",
    "traceback": "Read its whole traceback: $ grep -n -A 40 Traceback {log}",
    "unused": "If some parameters are always unused: $ {again} --find_unused_parameters on",
    "wait": "If ranks start slowly, wait longer for them: $ {again} --timeout_s 1800",
    "workers": "See where it crashes, without workers: $ {again} --num_workers 0",
}
_STEPS_OF = """
killed-outside: kernel fewer again
DDP-C01: next help              DDP-L01: clear launch          DDP-C02: next
DDP-G01: port network wait doctor   DDP-G02: same doctor again   DDP-G03: traceback again
DDP-G04: log kernel fewer again DDP-G05: stack again longer
DDP-D01: next download          DDP-D02: traceback leave       DDP-D03: doctor workers
DDP-D04: left more              DDP-M01: next help             DDP-M02: find unused
DDP-M03: next help              DDP-S01: traceback debug leave DDP-S02: bf16 checkpointing gpus
DDP-S03: clip again             DDP-S04: leave traceback       DDP-S05: ecc again
DDP-K01: disk checkpoints again DDP-K02: next again            DDP-K03: next folder
DDP-X01: traceback again        DDP-X02: next doctor           DDP-X03: next
"""
STEPS = {
    code: tuple(_WORDS[name].split(" $ ") for name in names.split())
    for code, names in re.findall(r"([\w-]+):((?: [a-z0-9]+)+)", _STEPS_OF)
}
"""Of each error what to do, the best first, and the command for it.

{run} is its folder, {again} the command that resumes it, {log} the log of the guilty rank or all
logs, {stack} the file with the guilty rank's stack.
"""


def _cause(code: str, title: str) -> Cause:
    return Cause(
        code=code,
        title=title,
        phrases=_PHRASES.get(code, (_NAMED.format(code=code), rf"\[{code}\] (?P<message>.*)")),
        tier=_TIERS.get(code, Tier.EXCEPTION),
        blame=Blame.NAMED,
        why="{message}",
        fix="see " + GUIDE.format(code=code),
        confirm="the log of that rank in logs/ of the run folder",
    )


KILLED_OUTSIDE = Cause(
    code="killed-outside",
    title="it ended without a word, so it was likely killed from outside (kernel OOM killer, "
    "scheduler, kill -9)",
    tier=Tier.LOST,
    blame=Blame.NAMED,
    why="Its status still says that it runs, while {others}. Its last one: {last}; pid {pid}. No "
    "process can log its own SIGKILL",
    fix="If it was memory: fewer workers, a smaller prefetch_factor, more memory for the job; if "
    "it was the scheduler: a longer time limit, or checkpoints and --requeue.",
    confirm="On its host: dmesg -T | grep -i 'killed process' (memory); sacct -j JOB or kubectl "
    "describe pod (the scheduler); neither: somebody's kill -9. If it still runs: py-spy dump",
)
CAUSES = (KILLED_OUTSIDE, *(_cause(code, title) for code, title in TITLES.items()))
