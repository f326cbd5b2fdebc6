"""How the ranks agree on whether one of them hangs: heartbeats, an alarm, reports, a verdict.

Owns the store keys for this, in rounds. A regular beat says where a rank is. A rank that sees a
reason raises the alarm; then every rank that can reports where it is now; the first verdict made
from these reports holds for all. If no rank hangs, the next round begins.
WHY the store, not a collective: ranks that wait in one collective can't call another.
What goes wrong here: the rank that serves the store hangs. Then each machine judges by itself.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from hardened_ddp.guard.slow import Split
from hardened_ddp.guard.verdict import SILENT, Report, Verdict
from hardened_ddp.ranks.failures import MOST_READ, publish_failure, read_failures
from hardened_ddp.ranks.patient_store import PatientStore

log = logging.getLogger(__name__)

LEFT = "left"


class HangConsensus:
    """This rank's part in the consensus. All methods are called from one thread."""

    def __init__(self, store: PatientStore | None, *, rank: int, world_size: int) -> None:
        """store: None where there are no other ranks."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._round = 0
        self._beats: dict[int, str] = {}
        self._silent_s: dict[int, float] = {}

    def beat(self, report: Report, number: int, splits: tuple[int, Split]) -> None:
        """Publish where this rank is. number: a different one each time."""
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
                is_silent = rank != self._rank and self._silent_s[rank] > report.limit_s
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
        key = f"hang/{self._round}/alarm"
        if self._store is None:
            return name
        try:
            if name:
                return self._store.claim(key, name)
            return self._store.get(key) if self._store.has(key) else ""
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)
            return name

    def report(self, report: Report) -> None:
        """Publish where this rank is, for this round's verdict."""
        self._put(f"hang/{self._round}/report/{report.rank}", asdict(report))

    def collect(self, known: Mapping[int, Report], *, limit_s: float) -> dict[int, Report]:
        """Wait for the reports of all ranks; return them and the known ones.

        A rank that does not report within limit_s is silent, at the place of its last beat.
        """
        prefix = f"hang/{self._round}/report/"
        found = dict(known)
        end = time.monotonic() + limit_s
        while self._store is not None and len(found) < self._world_size:
            keys = [f"{prefix}{rank}" for rank in range(self._world_size) if rank not in found]
            try:
                for key, text in self._store.read(keys).items():
                    found[int(key.removeprefix(prefix))] = _report_of(json.loads(text))
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)
                return found
            if time.monotonic() > end:
                last = {r: json.loads(text) for r, text in self._read_beats().items()}
                age_s = max(report.age_s for report in known.values())
                silent = {r: _silent(b[1], age_s) for r, b in last.items() if b != LEFT}
                return {**silent, **found}
            time.sleep(0.05)
        return found

    def settle(self, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict of this round: that of the rank that was first to publish one."""
        mine = json.dumps(None if verdict is None else [verdict.text, verdict.laggards])
        found = json.loads(self._claim(f"hang/{self._round}/verdict", mine))
        if found is None:
            self._round += 1
            return None
        return Verdict(found[0], tuple(found[1]))

    def await_verdict(self, limit_s: float) -> bool:
        """Wait for another rank's verdict; return whether there is one."""
        end = time.monotonic() + limit_s
        while self._store is not None and time.monotonic() < end:
            try:
                if self._store.has(f"hang/{self._round}/verdict"):
                    return True
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)
                return False
            time.sleep(0.05)
        return False

    def publish(self, verdict: Verdict) -> None:
        """Publish the verdict under the key that a rank reads when it loses another one."""
        # WHY if: the ranks of one verdict would all publish the same
        if not read_failures(self._store, reader=-1):
            for rank in verdict.laggards[:MOST_READ]:
                publish_failure(self._store, rank, verdict.text)

    def await_others(self, *, is_server: bool, limit_s: float) -> None:
        """Publish that this rank is done; the store's server waits for all that reported."""
        prefix = f"hang/{self._round}"
        self._put(f"{prefix}/done/{self._rank}", "")
        try:
            if self._store is not None and is_server:
                reported = self._store.read(
                    [f"{prefix}/report/{r}" for r in range(self._world_size)]
                )
                keys = [key.replace("/report/", "/done/") for key in reported]
                self._store.wait(keys, limit_s)
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
        self._put_text(key, json.dumps(value))

    def _put_text(self, key: str, text: str) -> None:
        try:
            if self._store is not None:
                self._store.set(key, text)
        except RuntimeError as error:
            log.debug("the store does not answer: %s", error)


def _report_of(entry: Mapping[str, Any]) -> Report:  # Any: JSON that asdict made
    return Report(**{**entry, "samples": tuple(entry["samples"])})


def _silent(entry: Mapping[str, Any], age_s: float) -> Report:  # Any: JSON
    return replace(_report_of(entry), state=SILENT, age_s=age_s)
