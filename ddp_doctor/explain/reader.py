"""Reading a log of any size: only the lines that may say something about a failure.

Owns the bytes: blocks of bounded size, a search for words that every message of the catalogue
has (so that training output costs next to nothing per line), lines of any length, broken bytes,
UTF-16.
"""

import codecs
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from ddp_doctor.explain.collector import Collector

_BLOCK_BYTES = 1024 * 1024
_MAX_LINE_BYTES = 64 * 1024
"""What is kept of a longer line: its start; messages stand there."""

SAMPLE_BYTES = 64 * 1024
"""What is read of a file first, to see what its lines look like."""

_SAME_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_MAX_FORMS = 200_000
_MAX_FORM_BYTES = 16 * 1024 * 1024
_END_BYTES = 4096


class Search:
    """Finds the lines that have one of some words, or one that differs from it in digits only.

    A program writes the same few lines again and again with other numbers. So a form, which is a
    line with 0 for each digit, is searched once: that is one pass over it for each word whose
    longest part without a space has come up by now, of 400 words.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        alike = sorted({word.translate(_SAME_DIGITS) for word in words})
        self._part_of = {word: max(word.split(), key=len) for word in alike}
        self._parts: set[bytes] = set()
        self._tokens: set[bytes] = set()
        self._has_word: dict[bytes, bool] = {}
        self._size = 0

    def line_starts(self, block: bytes) -> list[int]:
        """List where in the block these lines start, in order."""
        forms = block.translate(_SAME_DIGITS).split(b"\n")
        hits = self._forms_with_a_word(set(forms))
        starts, at = [], 0
        if hits:
            for form in forms:
                if form in hits:
                    starts.append(at)
                at += len(form) + 1
        return starts

    def _forms_with_a_word(self, forms: set[bytes]) -> set[bytes]:
        if self._size > _MAX_FORM_BYTES or len(self._has_word) > _MAX_FORMS:
            self._has_word.clear()
            self._tokens.clear()
            self._size = 0
        new = forms - self._has_word.keys()
        self._has_word.update(dict.fromkeys(new, False))
        text = b"\n".join([*new, b""])
        self._size += len(text)
        tokens = set(text.split()) - self._tokens
        self._tokens |= tokens
        new_text = b" ".join(tokens)
        self._parts |= {part for part in self._part_of.values() if part in new_text}
        for word in (word for word, part in self._part_of.items() if part in self._parts):
            at = text.find(word)
            while at >= 0:
                end = text.find(b"\n", at)
                self._has_word[text[text.rfind(b"\n", 0, at) + 1 : end]] = True
                at = text.find(word, end)
        return {form for form in forms if self._has_word[form]}


def decoder_of(sample: bytes) -> str:
    """Say how a file is encoded: PowerShell redirects to UTF-16."""
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    has_nulls = sample[1::2].count(0) > len(sample) // 4
    return "utf-16-le" if has_nulls else "utf-8"


def read_lines(
    file: BinaryIO, collector: Collector, search: Search, *, first: bytes
) -> tuple[int, str]:
    """Give collector the lines that search finds, and those that it wants.

    All lines of a short file: one that no entry knows may be worth a quotation. Return the number
    of all lines, and the end of the text.
    """
    number, end = 0, b""
    for block in _whole_lines(file, first):
        is_short = len(first) < SAMPLE_BYTES
        number = _read_block(block, collector, None if is_short else search, number)
        end = (end + block[-_END_BYTES:])[-_END_BYTES:]
    return number, end.decode("utf-8", "replace")


def _whole_lines(file: BinaryIO, first: bytes) -> Iterator[bytes]:
    """Cut a file into blocks of UTF-8 that end with a line. A huge line is shortened."""
    encoding = decoder_of(first)
    decoder = codecs.getincrementaldecoder(encoding)("replace")

    def decoded(block: bytes) -> bytes:
        return block if encoding == "utf-8" else decoder.decode(block).encode()

    rest = decoded(first)
    while block := decoded(file.read(_BLOCK_BYTES)):
        if b"\n" not in block and len(rest) > _BLOCK_BYTES:
            rest = rest[:_MAX_LINE_BYTES] + block[-_MAX_LINE_BYTES:]
            continue
        rest += block
        if cut := rest.rfind(b"\n") + 1:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _read_block(block: bytes, collector: Collector, search: Search | None, number: int) -> int:
    """Read one block of whole lines; number is that of the last line before it."""
    if not block.endswith(b"\n"):
        block += b"\n"  # of the file's last line
    hits = iter(search.line_starts(block)) if search is not None else None
    position = 0
    while position < len(block):
        if hits is not None and not collector.wants_more:
            hit = next((at for at in hits if at >= position), None)
            if hit is None:
                break
            number += block.count(b"\n", position, hit)
            position = hit
        end = block.find(b"\n", position)
        number += 1
        line = block[position:end]
        if len(line) > 2 * _MAX_LINE_BYTES:
            line = line[:_MAX_LINE_BYTES] + b" " + line[-_MAX_LINE_BYTES:]
        for part in line.decode("utf-8", "replace").rstrip("\r").split("\r"):
            if part or collector.wants_more:  # a blank line ends a message
                collector.take(part, number)
        before = block[max(0, position - _END_BYTES) : position]
        if b"Traceback (most" in line:
            collector.before_traceback = (number - 1, before)
        evidence = collector.evidence
        if evidence.waits and evidence.before_wait is None:
            evidence.before_wait = before.decode("utf-8", "replace")
        position = end + 1
    return number + block.count(b"\n", position)
