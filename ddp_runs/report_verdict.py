"""The first words of a report: how a run went, in a few sentences.

Does not own: the page (report_page.py), the state of a run (run_files.py).
"""

from ddp_runs.run_files import RunView
from ddp_runs.watch_view import duration
from hardened_ddp.reporting.run_json import number_of
from hardened_ddp.settings.wording import counted

_GOOD_SHARE = 0.7
_PARTS = {
    "start_up": "start-up",
    "data_wait": "waiting for data",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "down": "being down between attempts",
    "lost": "steps that were done twice",
}
_STATES = {
    "finished": "Finished",
    "stopped": "Stopped as it was told to, and saved,",
    "running": "Still running,",
    "failed": "Failed",
    "dead": "Ended without a word",
    "unknown": "Not known how it ended,",
}


def sentences_of(run: RunView) -> list[str]:
    """Say whether it finished, how it went, what it survived and lost, and what is unusual."""
    account, total = run.account, run.main.total_steps
    head = f"{_STATES[run.state]} at step {run.step:,}"
    head += f" of {total:,}" if total else ""
    head += f" after {duration(account['wall'])}" if account else ""
    return [part for part in (head, _went(run), _survived(run), _unusual(run)) if part]


def _went(run: RunView) -> str:
    """Say how the loss went, and the best value."""
    words = []
    _, losses = run.curve("loss/train")
    if len(losses) > 1:
        went = "fell" if losses[-1] < losses[0] else "rose" if losses[-1] > losses[0] else "stayed"
        words.append(f"the loss {went} from {losses[0]:.4g} to {losses[-1]:.4g}")
    if "step" in run.best:
        metric = str(run.best.get("metric", "value")).removesuffix("/test")
        words.append(f"best {metric} {number_of(run.best, 'value'):.4g} at step {run.best['step']}")
    text = "; ".join(words)
    return text[:1].upper() + text[1:]


def _survived(run: RunView) -> str:
    """Say which faults it came through, and what that cost."""
    account = run.account
    num_restarts = sum(bool(attempt.get("start_up")) for attempt in run.attempts[1:])
    kinds = [event.kind for event in run.events if event.kind != "hang" or event.level == "ERROR"]
    counts = [(len(run.failures), "failure"), (num_restarts, "restart")]
    counts += [(kinds.count(kind), kind) for kind in ("hang", "rollback")]
    counts.append((kinds.count("retry"), "retried step"))
    told = [counted(number, noun) for number, noun in counts if number]
    if run.left_out:
        told.append(f"{counted(len(run.left_out), 'sample')} left out")
    if not told:
        return "No fault" if run.attempts or run.events else ""
    went_on = "It came through" if run.state in ("finished", "stopped", "running") else "It had"
    restarts = sum(number_of(attempt, "start_up") for attempt in run.attempts[1:])
    gone = account.get("down", 0.0) + account.get("lost", 0.0) + restarts
    share = f" ({gone / account['wall']:.1%})" if gone else ""
    return f"{went_on} {', '.join(told)}; time lost by them: {duration(gone)}{share}"


def _unusual(run: RunView) -> str:
    """Say what a reader should look at."""
    found = []
    account = run.account
    if account and account["goodput"] < _GOOD_SHARE:
        largest = max(_PARTS, key=lambda name: account.get(name, 0.0))
        share = account[largest] / account["wall"]
        found.append(f"goodput is {account['goodput']:.0%}: {_PARTS[largest]} took {share:.0%}")
    steps, losses = run.curve("loss/train")
    bad = [step for step, loss in zip(steps, losses, strict=True) if loss != loss]
    if bad:
        found.append(f"the loss is NaN at step {bad[0]}")
    num_slow = sum(event.kind == "slow" for event in run.events)
    if num_slow:
        found.append(f"{counted(num_slow, 'warning')} of a slow rank")
    if run.problems:
        found.append(
            f"{counted(len(run.problems), 'file')} of its folder can't be read or believed"
        )
    return f"Unusual: {'; '.join(found)}" if found else ""
