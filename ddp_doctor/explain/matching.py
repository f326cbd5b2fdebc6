"""Which entries of the catalogue a text matches, fast enough for millions of lines.

Owns the index: each phrase has a piece of literal text that is looked for first, with `in`; the
regular expression is compiled and tried only if that piece is there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from ddp_doctor.explain.events import Cause

# Words that many messages have, and few other lines. WHY so few: each costs a pass over the lines
# that are new.
_WORDS = (
    *(b"rror", b"RROR", b"xception", b"Traceback", b"Exit", b"Interrupt", b"Errno", b'  File "'),
    *(b"ailed", b"ailure", b"FAILED", b"imeout", b"imed out", b"atal", b"illed", b"DDP-"),
    *(b"SIG", b"ignal ", b"exitcode", b"exit code"),
)
_SAME_DIGITS = str.maketrans("0123456789", "0" * 10)
_LONGEST_FORM = 1000
_MAX_FORMS = 20_000
_OLD_FORM = re.compile(r"cuda runtime error \(\d+\) : ")
_compiled = cache(re.compile)


@dataclass(frozen=True, slots=True)
class Match:
    """A cause, and what its phrase found in the text."""

    cause: Cause
    fields: Mapping[str, str]


class Matcher:
    """The catalogue as an index."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self._rules: dict[str, list[tuple[str, Cause]]] = {}
        for cause in causes:
            for phrase in cause.phrases:
                self._rules.setdefault(literal_of(phrase), []).append((phrase, cause))
        self._literals = tuple(self._rules)
        forms = [(literal.translate(_SAME_DIGITS), literal) for literal in self._rules]
        # WHY kept by form: a program writes the same lines again, with other numbers
        self._literals_like = lru_cache(_MAX_FORMS)(
            lambda form: tuple(literal for like, literal in forms if like in form)
        )

    def find(self, text: str) -> list[Match]:
        """List what matches: the lowest tier first, and in it the specific causes."""
        found: dict[str, Match] = {}
        # AMD's words for the same, the driver's (not of a device, which no rank chose), torch 1's
        text = text.replace("HIP ", "CUDA ")
        if "CUDA driver error: invalid device" not in text:
            text = text.replace("CUDA driver error", "CUDA error")
        if "cuda runtime error" in text:
            text = _OLD_FORM.sub("CUDA error: ", text)
        is_long = len(text) > _LONGEST_FORM
        form = text.translate(_SAME_DIGITS)
        for literal in self._literals if is_long else self._literals_like(form):
            if literal in text:
                for phrase, cause in self._rules[literal]:
                    match = _compiled(phrase).search(text)
                    if match and cause.code not in found:
                        fields = {k: v for k, v in match.groupdict().items() if v is not None}
                        found[cause.code] = Match(cause, fields)
        return sorted(found.values(), key=lambda m: (m.cause.tier, m.cause.is_generic))

    def words(self) -> tuple[bytes, ...]:
        """List words such that every line that matches a phrase has one of them."""
        words = list(_WORDS)
        for literal in sorted(self._literals, key=len):
            encoded = literal.encode()
            if not any(word in encoded for word in words):
                words.append(encoded)
        return tuple(words)


def literal_of(phrase: str) -> str:
    """Give the longest text that everything that matches phrase contains, outside of its groups.

    Raises ValueError if it is too short to be looked for.
    """
    parsed = re._parser.parse(phrase)  # type: ignore[attr-defined]  # Python's own parser
    text = "".join(chr(value) if str(op) == "LITERAL" else "\0" for op, value in parsed)
    longest = max(text.split("\0"), key=len)
    if len(longest) < 4:
        raise ValueError(f"no literal text in the phrase {phrase!r}")
    return longest
