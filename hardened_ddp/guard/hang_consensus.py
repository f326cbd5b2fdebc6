"""How the ranks agree on whether one of them hangs: beats, an alarm, reports, a verdict.

A regular beat in the store says where a rank is. A rank that sees a reason raises the alarm; then
every rank that can reports where it is now; the first verdict made from these reports
(hang_rules.py) holds for all. If no rank hangs, the next round begins.
WHY the store, not a collective: ranks that wait in one collective can't call another. If the store
does not answer, each machine judges by itself.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from hardened_ddp.guard.hang_rules import SILENT, Hang, Report, decide
from hardened_ddp.guard.slow import Split
from hardened_ddp.ranks.store import MOST_READ, RunStore, poll_s, publish_failure, read_failures

LEFT = "left"
# How long the other ranks have to report; their threads check for an alarm at each tick.
COLLECT_S = 4.0
NUM_WITNESSES = 2  # ranks that check all others; more of them would only load the store
# WHY longer: else every rank would collect all reports by itself, whenever one of them is silent.
_VERDICT_S = COLLECT_S + 2.0
_BEATS_PER_TICK = 250
_POLL_S = 0.05
_POLL_PER_RANK_S = 5e-4  # all but the witnesses wait for a verdict


class HangConsensus:
    """This rank's part in the consensus. All methods are called from one thread."""

    def __init__(self, store: RunStore, *, rank: int, world_size: int, tick_s: float = 1.0) -> None:
        """tick_s: how often beat is called, by each rank."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.round = 0  # how many alarms ended without a verdict
        self._beats: dict[int, Any] = {}
        self._silent_s: dict[int, float] = {}
        # WHY fewer beats of many ranks: the store must stay free for the questions of all of them
        self._beat_every = max(1, world_size // _BEATS_PER_TICK)
        self._silent_after_s = 2 * self._beat_every * tick_s

    def beat(self, report: Report, number: int, splits: tuple[int, Split]) -> None:
        """Publish where this rank is. number: one more each time."""
        if (number + self._rank) % self._beat_every == 0:
            self._publish_beat([number, asdict(report), splits])

    def leave(self) -> None:
        self._publish_beat(LEFT)

    def splits(self) -> dict[int, tuple[int, Split]]:
        splits = {rank: beat[2] for rank, beat in self._read_beats()[0].items()}
        return {rank: (number, split) for rank, (number, split) in splits.items() if split}

    def watch_beats(self, awake_s: float) -> dict[int, Report]:
        """Return where each rank is by its beat; silent: none for longer than its limit."""
        found = {}
        for rank, beat in self._read_beats()[0].items():
            is_new = beat != self._beats.get(rank)
            self._silent_s[rank] = 0.0 if is_new else self._silent_s.get(rank, 0.0) + awake_s
            self._beats[rank] = beat
            report = _report_of(beat[1])
            limit_s = max(report.limit_s, self._silent_after_s)
            is_silent = rank != self._rank and self._silent_s[rank] > limit_s
            found[rank] = replace(report, state=SILENT) if is_silent else report
        return found

    def alarm(self, name: str) -> str:
        """Raise the alarm of this round; return its name. Without a name only ask; empty: none."""
        key = f"hang/{self.round}/alarm"
        return self._store.claim(key, name) if name else self._store.look_up(key)

    def agree(
        self,
        mine: Report,
        neighbours: Callable[[], Mapping[int, Report]],
        *,
        is_witness: bool,
        wait_limit_s: float,
    ) -> Hang | None:
        """Agree with the other ranks on which of them hang; None: no rank does.

        mine: this rank's own report. neighbours: the others of this machine, as seen.
        is_witness: this rank raised the alarm, or would have. Takes COLLECT_S or a little more.
        """
        self._store.append(self._key("reports"), json.dumps(asdict(mine)) + "\n")
        hang = None
        if is_witness or mine.rank < NUM_WITNESSES or not self._await_verdict():
            lost = {rank: report for rank, report in neighbours().items() if report.state}
            reported = self._collect({mine.rank: mine, **lost})
            # WHY asked again, and only now: one may have left during the wait
            reports = {**neighbours(), **reported}
            known = {*reports, *self._read_beats()[1]}
            missing = [rank for rank in range(self._world_size) if rank not in known]
            hang = decide(list(reports.values()), wait_limit_s=wait_limit_s, missing=missing)
        # The verdict that is published first holds for all ranks.
        text = json.dumps(None if hang is None else [hang.text, hang.ranks])
        found = json.loads(self._store.claim(self._key("verdict"), text))
        if found is None:
            self.round += 1
            return None
        return Hang(found[0], tuple(found[1]))

    def publish(self, hang: Hang) -> None:
        """Publish the verdict under the key that a rank reads when it loses another one."""
        # WHY if: the ranks of one verdict would all publish the same
        if not read_failures(self._store, reader=-1):
            for rank in hang.ranks[:MOST_READ]:
                publish_failure(self._store, rank, hang.text)

    def await_others(self, *, is_server: bool, limit_s: float) -> None:
        """Publish that this rank is done; the store's server waits for all that reported."""
        self._store.set(self._key(f"done/{self._rank}"), "")
        if is_server:
            done = [self._key(f"done/{rank}") for rank in self._read_reports()]
            self._store.wait(done, limit_s)

    def _key(self, name: str) -> str:
        return f"hang/{self.round}/{name}"

    def _await_verdict(self) -> bool:
        """Wait for another rank's verdict; return whether there is one."""
        end = time.monotonic() + _VERDICT_S
        store, key = self._store, self._key("verdict")
        while not (text := store.look_up(key)) and not store.is_gone and time.monotonic() < end:
            time.sleep(max(_POLL_S, _POLL_PER_RANK_S * self._world_size))
        return bool(text)

    def _collect(self, known: Mapping[int, Report]) -> dict[int, Report]:
        """Wait for all reports; a rank that sends none is silent, at the place of its last beat."""
        found = dict(known)
        end = time.monotonic() + COLLECT_S
        while len(found) < self._world_size:
            found.update(self._read_reports())
            if self._store.is_gone:
                break
            if time.monotonic() > end:
                age_s = max(report.age_s for report in known.values())
                beats, _ = self._read_beats()
                silent = {
                    rank: replace(_report_of(beat[1]), state=SILENT, age_s=age_s)
                    for rank, beat in beats.items()
                }
                return {**silent, **found}
            time.sleep(max(_POLL_S, poll_s(self._world_size)))
        return found

    def _read_reports(self) -> dict[int, Report]:
        lines = self._store.look_up(self._key("reports")).splitlines()
        return {report.rank: report for report in map(_report_of, map(json.loads, lines))}

    def _read_beats(self) -> tuple[dict[int, Any], list[int]]:
        """Return the last beat of each rank: its number, report and split; and who has left."""
        keys = {f"hang/beat/{rank}": rank for rank in range(self._world_size)}
        read = self._store.read(list(keys))
        beats = {keys[key]: json.loads(text) for key, text in read.items()}
        left = [rank for rank, beat in beats.items() if beat == LEFT]
        return {rank: beat for rank, beat in beats.items() if beat != LEFT}, left

    def _publish_beat(self, value: object) -> None:
        self._store.set(f"hang/beat/{self._rank}", json.dumps(value))


def _report_of(entry: Mapping[str, Any]) -> Report:  # Any: JSON that asdict made
    return Report(**{**entry, "samples": tuple(entry["samples"])})
