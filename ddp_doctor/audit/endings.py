"""Judges how a program ended: exceptions, collectives that differ, who is where when it hangs.

Ranks call collectives in one order; the first place where the orders differ is the cause, whatever
it leads to. Also files that several ranks write.
"""

from collections import defaultdict
from collections.abc import Iterator

from ddp_doctor.audit.origins import leaving_line
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict, shown_path

_ECHOES = ("Connection", "peer", "recvValue", "Broken pipe", "timed out", "Socket", "TCPStore")
"""Words of exceptions that another rank's end causes."""


def judge_endings(ranks: Ranks, *, hung: bool, status: int | None = None) -> Iterator[Verdict]:
    """Yield why a program hung or failed, and files that ranks share.

    status: that of the program; None: the audit ended it.
    """
    failures = [(rank, end) for rank in ranks if (end := rank.last("exit")) and end["error"]]
    own = [(r, e) for r, e in failures if not any(word in e["error"] for word in _ECHOES)]
    crashed = bool(status and failures and not own)
    differing = list(_collectives(ranks, hung=hung, failed=bool(failures), crashed=crashed))
    yield from differing
    for rank, end in own[:1]:
        told = f"rank {rank.number} fails: {end['error'].splitlines()[0][:200]}"
        seen, is_echo = f"after {rank.step_count} optimizer steps", bool(differing)
        yield Verdict("exception", told, end["line"], evidence=(seen,), softened=is_echo)
    if failures and not own and not differing:
        yield from _left_alone(ranks, *failures[0])
    lost = [rank for rank in ranks if rank.last("exit") is None]
    if status and lost and not own and not differing and not hung:
        steps = lost[0].all("step")
        told = f"rank {lost[0].number} ends without an exception, as a process does that is killed"
        told += f"; the program's exit status is {status}"
        place = steps[-1]["line"] if steps else ""
        seen = f"after {lost[0].step_count} optimizer steps"
        yield Verdict("exception", told, place, evidence=(seen,))
    if hung and not differing:
        yield from _hang(ranks)
    yield from _shared_files(ranks)


def _left_alone(ranks: Ranks, rank: Rank, end: Record) -> Iterator[Verdict]:
    """Yield a rank that lost its connection to ranks which had come to their end.

    A forward of DDP on one rank alone is no call of the program, and with gloo nobody waits in it.
    """
    others = [other for other in ranks if other is not rank]
    has_finished = bool(others) and all(other.ended_well for other in others)
    if has_finished and {other.step_count for other in others} == {rank.step_count}:
        told = f"rank {rank.number} alone calls a collective, or a forward of DDP, which has "
        told += "collectives of its own: the others have come to their end"
        seen = f"at {_shown(end['line'])}: {end['error'].splitlines()[0][:200]}"
        facts = (seen, f"all ranks made {rank.step_count} steps")
        place = leaving_line(end.get("lines", ())) or end["line"]
        yield Verdict("collectives-differ", told, place, evidence=facts)


def _collectives(ranks: Ranks, *, hung: bool, failed: bool, crashed: bool) -> Iterator[Verdict]:
    by_group: dict[str, dict[int, list[Record]]] = defaultdict(dict)
    for rank in ranks:
        for record in rank.all("collective"):
            calls = by_group[record["group"]]
            for member in record["ranks"] or ranks.by_number:
                calls.setdefault(member, [])
            calls[rank.number].append(record)
    everybody_ended = all(rank.ended_well for rank in ranks)
    for calls in by_group.values():
        if len(calls) < 2 or any(number not in ranks.by_number for number in calls):
            continue
        for place in range(max(map(len, calls.values()))):
            at_place = {n: c[place] if place < len(c) else None for n, c in calls.items()}
            kinds = {(c["op"], c["what"]) for c in at_place.values() if c}
            missing = [number for number, call in at_place.items() if call is None]
            is_sure = len(kinds) > 1 or hung or failed or everybody_ended
            has_failed = not hung and not all(ranks.by_number[n].ended_well for n in missing)
            called = [ranks.by_number[n] for n, call in at_place.items() if call]
            # WHY: gloo aborts a rank whose collective meets another one; the others have gone on
            is_abort = crashed and not any(rank.last("exit") for rank in called)
            is_abort &= all(ranks.by_number[n].step_count >= called[0].step_count for n in missing)
            if missing and not is_abort and (has_failed or not is_sure):
                break
            if missing or len(kinds) > 1:
                yield _differing(ranks, place, at_place)
                return


def _differing(ranks: Ranks, place: int, calls: dict[int, Record | None]) -> Verdict:
    told, parties, late = [], defaultdict[tuple[str, str], list[Record]](list), []
    for number, call in calls.items():
        if call:
            told.append(f"rank {number}: {call['op']} {call['what']} at {_shown(call['line'])}")
            parties[call["op"], call["line"]].append(call)
        else:
            rank = ranks.by_number[number]
            told.append(f"rank {number}: not called; it {_stands(rank)}")
            # WHY: a rank that sleeps or computes is late, and its line is the cause
            late += [stall for stall in (rank.last("stall"),) if stall and not stall["waits"]]
    fewest = min(parties.values(), key=len)[0]  # the smallest party is the odd one out
    code, why = "hang", "one rank does not come to a collective in which others wait"
    if not late:
        code, why = "collectives-differ", "the ranks do not call the same collectives: the "
        why += f"one with number {place + 1} differs"
    return Verdict(code, why, (late or [fewest])[0]["line"], evidence=tuple(told))


def _hang(ranks: Ranks) -> Iterator[Verdict]:
    stalls = [stall for rank in ranks if (stall := rank.last("stall"))]
    busy = [stall for stall in stalls if not stall["waits"]]
    ended = [rank.number for rank in ranks if rank.last("exit")]
    if not stalls:
        why = "native code keeps Python from running, and waits. At the end it may be DDP, if it "
        why += "is the last that holds its group: del model before destroy_process_group()"
    elif ended:
        why = f"rank {ended[0]} has ended, and the others wait for it"
    elif busy:
        why = "one rank does not come, and the others wait for it"
    elif len({stall["line"] for stall in stalls}) > 1:
        why = "the ranks wait at different lines"
    else:
        why = "all ranks wait at one line"
    told, place = f"the program makes no progress: {why}", [*busy, *stalls, {"line": ""}][0]["line"]
    facts = tuple(f"rank {rank.number} {_stands(rank)}" for rank in ranks)
    yield Verdict("hang", told, place, evidence=facts)


def _stands(rank: Rank) -> str:
    """Say where a rank is, from its last stall or its end."""
    end, stall = rank.last("exit"), rank.last("stall")
    if end:
        return "has ended" + (f" with {end['error'].splitlines()[0][:80]}" if end["error"] else "")
    if stall is None:
        return "was not heard of"
    how = "waits" if stall["waits"] or stall["in_backward"] else "stands"
    where = "backward" if stall["in_backward"] else stall["function"]
    return f"{how} in {where} at {_shown(stall['line'])}"


def _shared_files(ranks: Ranks) -> Iterator[Verdict]:
    writers: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for rank in ranks:
        for record in rank.all("write"):
            key = (rank.process["host"], record["path"])
            writers[key].setdefault(rank.number, record)
    for (_, path), by_rank in writers.items():
        if len(by_rank) > 1:
            told = f"{len(by_rank)} ranks write one file: {shown_path(path)}"
            seen = f"ranks {', '.join(map(str, sorted(by_rank)))}"
            yield Verdict("same-file", told, by_rank[min(by_rank)]["line"], evidence=(seen,))


def _shown(place: str) -> str:
    return shown_path(place) if place else "a line of a library"
