"""Causes that this suite names itself: its error codes, as they stand in its logs."""

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
_TRACEBACK = ("Read its whole traceback:", "grep -n -A 40 Traceback {log}")
_NEXT = ("Do what the error itself says:", "grep -h 'next: ' {log}")
_AGAIN = ("Start it again; it resumes from the newest valid checkpoint:", "{again}")
_LEAVE_OUT = (
    "If a sample is the cause, repair it, or leave such samples out:",
    "{again} --continue_on_error",
)
_DOCTOR = (
    "Check the machine: memory, shared memory, disk, GPUs, network:",
    "python ddp_training.py doctor",
)
STEPS = {
    "killed-outside": (
        (
            "Ask the kernel of its host whether memory ran out:",
            "dmesg -T | grep -i 'killed process'",
        ),
        ("If it did, read with fewer workers:", "{again} --num_workers 1"),
        (
            "Else ask the scheduler why it ended the job. Start again; what was saved is kept:",
            "{again}",
        ),
    ),
    "DDP-C01": (
        _NEXT,
        ("All settings with their values:", "python ddp_training.py --help"),
    ),
    "DDP-L01": (
        (
            "Clear what an earlier launcher left in this shell:",
            "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT",
        ),
        (
            "Let one launcher start all ranks:",
            "torchrun --standalone --nproc_per_node=2 ddp_training.py",
        ),
    ),
    "DDP-G01": (
        (
            "See whether processes of an earlier job hold the port, and end them by id:",
            "ps -ef | grep '[d]dp_training'",
        ),
        ("On one node --standalone takes a free port:", "{again}"),
        ("If ranks start slowly, wait longer for them:", "{again} --timeout_s 1800"),
        _DOCTOR,
    ),
    "DDP-G02": (
        (
            "Compare code and packages of the named rank's node with those of rank 0's, on both:",
            "git rev-parse HEAD; python ddp_training.py doctor",
        ),
        ("When code, packages, settings and data are equal:", "{again}"),
    ),
    "DDP-G03": (_TRACEBACK, _AGAIN),
    "DDP-G04": (
        ("Read how the log of the lost rank ends:", "tail -n 20 {log}"),
        (
            "If it says nothing, ask the kernel of its host whether memory ran out:",
            "dmesg -T | grep -i 'killed process'",
        ),
        ("If it did, read with fewer workers:", "{again} --num_workers 1"),
        _AGAIN,
    ),
    "DDP-G05": (
        (
            "Read the stack of that rank; the innermost line of its main thread is the place:",
            "cat {stack}",
        ),
        _AGAIN,
        ("If it was only slow, allow more time:", "{again} --hang_after_s 300"),
    ),
    "DDP-D01": (
        _NEXT,
        ("Without network, fetch the data on another machine:", "python download.py --help"),
    ),
    "DDP-D02": (_TRACEBACK, _LEAVE_OUT),
    "DDP-D03": (_DOCTOR, ("See where it crashes, without workers:", "{again} --num_workers 0")),
    "DDP-D04": (
        ("See what was left out, and why:", "tail -n 20 {run}/skipped_samples.jsonl"),
        ("If that many are acceptable, allow more:", "{again} --max_errors 100000"),
    ),
    "DDP-M01": (_NEXT,),
    "DDP-M02": (
        (
            "Let the run find unused parameters and retry the step:",
            "{again} --find_unused_parameters auto --step_retry on",
        ),
        ("If some are always unused:", "{again} --find_unused_parameters on"),
    ),
    "DDP-M03": (_NEXT,),
    "DDP-S01": (
        _TRACEBACK,
        ("With the line of forward that an error in backward belongs to:", "{again} --debug"),
        _LEAVE_OUT,
    ),
    "DDP-S02": (
        ("Activations take half in 16 bits:", "{again} --amp bf16"),
        ("Much less memory, a third more time:", "{again} --gradient_checkpointing"),
        ("See what else is on the GPU:", "nvidia-smi"),
    ),
    "DDP-S03": (
        (
            "Lower the learning rate, or clip the gradients, in 32 bits:",
            "{again} --clip_grad_norm 1 --amp off",
        ),
    ),
    "DDP-S04": (_LEAVE_OUT, _TRACEBACK),
    "DDP-S05": (
        ("Test the memory of that rank's machine:", "nvidia-smi -q -d ECC"),
        ("Start without it; any number of ranks will do:", "{again}"),
    ),
    "DDP-K01": (
        ("If the disk is full, make room:", "df -h {run}"),
        ("See whose the files are:", "ls -l {run}/checkpoints"),
        _AGAIN,
    ),
    "DDP-K02": (("Resume with the settings of that run: give no others:", "{again}"),),
    "DDP-K03": (
        _NEXT,
        ("See who owns it, and whether it may be written:", "ls -ld {run}"),
    ),
    "DDP-X01": (_TRACEBACK, _AGAIN),
    "DDP-X02": (_NEXT,),
    "DDP-X03": (_NEXT,),
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
