r"""The form in which the causes stand in the modules beside this one.

    [family]
    code (timeout, generic, accuses nobody): title
      /a regular expression, made from the format string of the library/ /another one/
      why: the cause; {name} stands for a named group of the expression
      fix: what to do in plain torch
      lightning: what to do there instead
      case a regular expression => why => fix: in place of these, if the log says that, too

What the fields mean is said in Cause; in brackets stand its tier, whether it is generic, what
it claims at most, and whom it accuses, as far as they are not the defaults. A line that begins
with four blanks continues the one before; one that begins with two and # is a comment.
"""

import re

from ddp_doctor.explain.events import Blame, Cause, Tier

_HEAD = re.compile(r"(?P<code>[\w-]+)(?: \((?P<marks>[\w, ]+)\))?: (?P<title>.+)")
_TIERS = {tier.name.lower(): tier for tier in Tier}
_BLAMES = {f"accuses {blame.name.lower()}": blame for blame in Blame}


def read_families(text: str, **shared: str) -> dict[str, tuple[Cause, ...]]:
    """Read the causes of each family; %NAME% in the text stands for what shared has by that name.

    Raises ValueError, KeyError or TypeError for what is no cause.
    """
    for name, words in shared.items():
        text = text.replace(f"%{name}%", words)
    lines = [line for line in text.splitlines() if line and not line.startswith("  #")]
    families: dict[str, tuple[Cause, ...]] = {}
    family = ""
    for block in re.split(r"\n(?! )", re.sub(r"\n {4}", " ", "\n".join(lines))):
        head, *parts = block.split("\n  ")
        if head.startswith("["):
            family = head[1:-1]
            families[family] = ()
        else:
            families[family] += (_read_cause(head, parts),)
    return families


def _read_cause(head: str, parts: list[str]) -> Cause:
    match = _HEAD.fullmatch(head)
    if match is None:
        raise ValueError(f"no cause begins like this: {head!r}")
    marks = set(match["marks"].split(", ")) if match["marks"] else set()
    if unknown := marks - {*_TIERS, *_BLAMES, "generic", "likely", "unknown"}:
        raise ValueError(f"{match['code']}: nothing is known as {', '.join(sorted(unknown))}")
    cases = [part.removeprefix("case ").split(" => ") for part in parts if part[:5] == "case "]
    fields = dict(part.split(": ", 1) for part in parts if part[:5] != "case " and part[0] != "/")
    return Cause(
        code=match["code"],
        title=match["title"],
        phrases=tuple(p for part in parts if part[0] == "/" for p in part[1:-1].split("/ /")),
        tier=next((_TIERS[mark] for mark in marks & _TIERS.keys()), Tier.EXCEPTION),
        blame=next((_BLAMES[mark] for mark in marks & _BLAMES.keys()), None),
        is_generic="generic" in marks,
        most=next((mark for mark in ("unknown", "likely") if mark in marks), "certain"),
        cases=tuple((said, why, fix) for said, why, fix in cases),
        **fields,
    )
