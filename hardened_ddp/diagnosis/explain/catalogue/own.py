"""Causes that this suite names itself: its error codes, as they stand in its logs."""

import re

from hardened_ddp import errors
from hardened_ddp.diagnosis.explain.events import Blame, Cause, Fix, Tier

_TIERS = {"DDP-G04": Tier.LOST, "DDP-G05": Tier.TIMEOUT, "DDP-G02": Tier.MISMATCH}
_NAMED = r"\[{code}\] rank (?P<ranks>\d+)(?:,| r| c)(?P<message>.*)"
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
DDP-C01: next help              DDP-L01: clear launch
DDP-G01: port again wait doctor DDP-G02: same doctor again     DDP-G03: traceback again
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


def _cause(error: type[errors.HardenedError]) -> Cause:
    code = error.code
    text = (error.__doc__ or "").splitlines()[0].rstrip(".")
    return Cause(
        code=code,
        title=text[0].lower() + text[1:],
        phrases=_PHRASES.get(code, (_NAMED.format(code=code), rf"\[{code}\] (?P<message>.*)")),
        tier=_TIERS.get(code, Tier.EXCEPTION),
        blame=Blame.NAMED,
        why="{message}",
        fix=Fix(plain="see " + GUIDE.format(code=code)),
        confirm="the log of that rank in logs/ of the run folder",
        source="hardened_ddp/errors.py",
        test="own_codes",
    )


def _errors() -> tuple[type[errors.HardenedError], ...]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return tuple(cls for cls in found if issubclass(cls, errors.HardenedError))


KILLED_OUTSIDE = Cause(
    code="killed-outside",
    title="it ended without a word, so it was likely killed from outside (kernel OOM killer, "
    "scheduler, kill -9)",
    phrases=(),
    tier=Tier.LOST,
    blame=Blame.NAMED,
    why="Its status still says that it runs, while {others}. Its last one: "
    "{last}; pid {pid}. No process can log its own SIGKILL",
    fix=Fix(
        plain="If it was memory: fewer workers, a smaller prefetch_factor, more memory for "
        "the job; if it was the scheduler: a longer time limit, or checkpoints and --requeue."
    ),
    confirm="On its host: dmesg -T | grep -i 'killed process' names the pid: the kernel, for "
    "memory. sacct -j JOB or kubectl describe pod says why: the scheduler. torchrun's last block "
    "says exitcode -9 and neither of them anything: somebody's kill -9. If the process still runs: "
    "it hangs (py-spy dump), or its network is cut",
    source="hardened_ddp/reporting/rank_status.py",
    no_test="it is in no log: it is read from the run folder, which has a test of its own",
)
CAUSES = (KILLED_OUTSIDE, *(_cause(error) for error in _errors()))
