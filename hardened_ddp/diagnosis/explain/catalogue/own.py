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
_GUIDE = "DDP_TROUBLESHOOTING.md, section {code}"


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
        fix=Fix(plain="see " + _GUIDE.format(code=code), suite="see " + _GUIDE.format(code=code)),
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
        "the job; if it was the scheduler: a longer time limit, or checkpoints and --requeue.",
        suite="python ddp_training.py --resume RUN continues from the last step that was saved",
    ),
    confirm="On its host: dmesg -T | grep -i 'killed process' names the pid: the kernel, for "
    "memory. sacct -j JOB or kubectl describe pod says why: the scheduler. torchrun's last block "
    "says exitcode -9 and neither of them anything: somebody's kill -9. If the process still runs: "
    "it hangs (py-spy dump), or its network is cut",
    source="hardened_ddp/reporting/rank_status.py",
    no_test="it is in no log: it is read from the run folder, which has a test of its own",
)
CAUSES = (KILLED_OUTSIDE, *(_cause(error) for error in _errors()))
