"""How the ranks agree on whether one of them hangs: heartbeats, an alarm, reports, a verdict.

Owns the store keys for this, in rounds. A regular beat says where a rank is. A rank that sees a
reason raises the alarm; then every rank that can reports where it is now; the first verdict made
from these reports holds for all. If no rank hangs, the next round begins.
WHY the store, not a collective: ranks that wait in one collective can't call another.
One thread serves the store. So each rank asks it the more rarely, the more ranks there are, and
what all of them report is one value, which is read with one question.
What goes wrong here: the rank that serves the store hangs. Then each machine judges by itself.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from hardened_ddp.guard.slow import Split
from hardened_ddp.guard.verdict import SILENT, Report, Verdict, decide
from hardened_ddp.ranks.failures import MOST_READ, publish_failure, read_failures
from hardened_ddp.ranks.patient_store import PatientStore, poll_s

log = logging.getLogger(__name__)

LEFT = "left"
COLLECT_S = 4.0
"""How long the other ranks have to report; their threads check for an alarm at each tick."""

NUM_WITNESSES = 2  # ranks that check all others; more of them would only load the store
# The others wait a little longer for a verdict than those who make it wait for reports. WHY: else
# each of a thousand ranks would collect all reports by itself, whenever one of them is silent.
_VERDICT_S = COLLECT_S + 2.0
_BEATS_PER_TICK = 500
_POLL_S = 0.05
_POLL_PER_RANK_S = 5e-4  # all but the witnesses wait for a verdict


class HangConsensus:
    """This rank's part in the consensus. All methods are called from one thread."""

    def __init__(
        self, store: PatientStore | None, *, rank: int, world_size: int, tick_s: float = 1.0
    ) -> None:
        """store: None where there are no other ranks. tick_s: how often beat is called."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.round = 0
        """How many alarms ended without a verdict."""

        self._beats: dict[int, str] = {}
        self._silent_s: dict[int, float] = {}
        self._beat_every = max(1, world_size // _BEATS_PER_TICK)
        self._beat_s = self._beat_every * tick_s
        self._has_beaten = False

    def beat(self, report: Report, number: int, splits: tuple[int, Split]) -> None:
        """Publish where this rank is. number: one more each time. Of many ranks, some at a time."""
        if not self._has_beaten or (number + self._rank) % self._beat_every == 0:
            self._has_beaten = True
            self._put(f"hang/beat/{self._rank}", [number, asdict(report), splits])

    def leave(self) -> None:
        """Publish that this rank no longer takes part."""
        self._put(f"hang/beat/{self._rank}", LEFT)

    def splits(self) -> dict[int, tuple[int, Split]]:
        """Return the newest split of each rank's step time, with its number."""
        beats = {rank: json.loads(text) for rank, text in self._read_beats().items()}
        return {r: (b[2][0], b[2][1]) for r, b in beats.items() if b != LEFT and b[2][1]}

    def watch_beats(self, awake_s: float) -> dict[int, Report]:
        """Return where each rank is by its beat. Silent: no beat for longer than its limit.

        awake_s: since the last call. A rank without a beat so far is left out.
        """
        found = {}
        for rank, text in self._read_beats().items():
            is_new = text != self._beats.get(rank)
            self._silent_s[rank] = 0.0 if is_new else self._silent_s.get(rank, 0.0) + awake_s
            self._beats[rank] = text
            beat = json.loads(text)
            if beat != LEFT:
                report = _report_of(beat[1])
                limit_s = max(report.limit_s, 2 * self._beat_s)
                is_silent = rank != self._rank and self._silent_s[rank] > limit_s
                found[rank] = replace(report, state=SILENT) if is_silent else report
        return found

    def missing(self, reports: Collection[int]) -> list[int]:
        """Return the ranks that neither reported nor left."""
        left = {rank for rank, text in self._read_beats().items() if text == json.dumps(LEFT)}
        return [r for r in range(self._world_size) if r not in reports and r not in left]

    def alarm(self, name: str) -> str:
        """Raise the alarm of this round under a name, or return the name of another rank's alarm.

        An empty name only asks; an empty answer: there is no alarm.
        """
        key = f"hang/{self.round}/alarm"
        if self._store is None:
            return name
        try:
            if name:
                return self._store.claim(key, name)
            return self._store.look_up(key)
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)
            return name

    def judge(
        self,
        mine: Report,
        neighbours: Callable[[], Mapping[int, Report]],
        *,
        is_witness: bool,
        patience_s: float,
    ) -> Verdict | None:
        """Agree with the other ranks on which of them hang; None: no rank does.

        mine: this rank's own report. neighbours: the others of this machine, as seen.
        is_witness: this rank raised the alarm, or would have. Takes COLLECT_S or a little more.
        """
        self.report(mine)
        verdict = None
        if is_witness or mine.rank < NUM_WITNESSES or not self.await_verdict(_VERDICT_S):
            lost = {rank: report for rank, report in neighbours().items() if report.state}
            found = self.collect({mine.rank: mine, **lost}, limit_s=COLLECT_S)
            reports = {**neighbours(), **found}
            missing = self.missing(reports)
            verdict = decide(list(reports.values()), patience_s=patience_s, missing=missing)
        return self.settle(verdict)

    def report(self, report: Report) -> None:
        """Publish where this rank is, for this round's verdict."""
        try:
            if self._store is not None:
                line = json.dumps(asdict(report)) + "\n"
                self._store.append(f"hang/{self.round}/reports", line)
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)

    def collect(self, known: Mapping[int, Report], *, limit_s: float) -> dict[int, Report]:
        """Wait for the reports of all ranks; return them and the known ones.

        A rank that does not report within limit_s is silent, at the place of its last beat.
        """
        found = dict(known)
        end = time.monotonic() + limit_s
        while self._store is not None and len(found) < self._world_size:
            try:
                found.update(self._read_reports(self._store))
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)
                return found
            if time.monotonic() > end:
                last = {r: json.loads(text) for r, text in self._read_beats().items()}
                age_s = max(report.age_s for report in known.values())
                silent = {r: _silent(b[1], age_s) for r, b in last.items() if b != LEFT}
                return {**silent, **found}
            time.sleep(max(_POLL_S, poll_s(self._world_size)))
        return found

    def _read_reports(self, store: PatientStore) -> dict[int, Report]:
        lines = store.look_up(f"hang/{self.round}/reports").splitlines()
        return {report.rank: report for report in map(_report_of, map(json.loads, lines))}

    def settle(self, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict of this round: that of the rank that was first to publish one."""
        mine = json.dumps(None if verdict is None else [verdict.text, verdict.laggards])
        found = json.loads(self._claim(f"hang/{self.round}/verdict", mine))
        if found is None:
            self.round += 1
            return None
        return Verdict(found[0], tuple(found[1]))

    def await_verdict(self, limit_s: float) -> bool:
        """Wait for another rank's verdict; return whether there is one."""
        end = time.monotonic() + limit_s
        while self._store is not None and time.monotonic() < end:
            try:
                if self._store.has(f"hang/{self.round}/verdict"):
                    return True
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)
                return False
            time.sleep(max(_POLL_S, _POLL_PER_RANK_S * self._world_size))
        return False

    def publish(self, verdict: Verdict) -> None:
        """Publish the verdict under the key that a rank reads when it loses another one."""
        # WHY if: the ranks of one verdict would all publish the same
        if not read_failures(self._store, reader=-1):
            for rank in verdict.laggards[:MOST_READ]:
                publish_failure(self._store, rank, verdict.text)

    def await_others(self, *, is_server: bool, limit_s: float) -> None:
        """Publish that this rank is done; the store's server waits for all that reported."""
        prefix = f"hang/{self.round}"
        self._put(f"{prefix}/done/{self._rank}", "")
        try:
            if self._store is not None and is_server:
                reported = self._read_reports(self._store)
                self._store.wait([f"{prefix}/done/{rank}" for rank in reported], limit_s)
        except RuntimeError as error:
            log.debug("not every rank is done: %s", error)

    def _read_beats(self) -> dict[int, str]:
        if self._store is None:
            return {}
        keys = {f"hang/beat/{rank}": rank for rank in range(self._world_size)}
        try:
            return {keys[key]: text for key, text in self._store.read(list(keys)).items()}
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)
            return {}

    def _claim(self, key: str, text: str) -> str:
        try:
            return text if self._store is None else self._store.claim(key, text)
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)
            return text

    def _put(self, key: str, value: object) -> None:
        try:
            if self._store is not None:
                self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)


def _report_of(entry: Mapping[str, Any]) -> Report:  # Any: JSON that asdict made
    return Report(**{**entry, "samples": tuple(entry["samples"])})


def _silent(entry: Mapping[str, Any], age_s: float) -> Report:  # Any: JSON
    return replace(_report_of(entry), state=SILENT, age_s=age_s)
