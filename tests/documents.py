"""The documents as text: their commands, tables, links, and the parts that are made from code.

    python -m tests.documents      write config.yaml, pictures and generated parts of documents anew

Owns: reading the documents, and their generated parts: causes (from the catalogue of explain),
verdicts (from that of audit), drills (from their list), faults (from docs/PEERS_ON_FAULTS.md), and
the capture of the first run (docs/first_run.txt).
Does not own: whether what they say is true (test_docs.py).
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddp_doctor.audit.catalogue import CATALOGUE
from ddp_doctor.explain.catalogue import BY_CODE, FAMILIES
from ddp_doctor.explain.catalogue.python import BUILT_IN
from ddp_drills.fault import Fault
from ddp_drills.faults import all_faults
from docs.pictures.draw import write_all
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.manual import setting_texts
from hardened_ddp.settings.record import WIDTH, yaml_word
from hardened_ddp.settings.schema import SETTINGS, TITLES, Setting, flatten, names_of
from hardened_ddp.settings.wording import unbroken, wrapped
from tests.harness.processes import ROOT
from tests.marks import sections

README, TROUBLES, CONTRIBUTING = "README.md", "DDP_TROUBLESHOOTING.md", "CONTRIBUTING.md"
GLOSSARY, READING = "docs/GLOSSARY.md", "docs/READING_ORDER.md"
CONCEPTS, DRILLS = "docs/CONCEPTS.md", "docs/DRILLS.md"
OWN_TRAINING, CAUSES = "docs/OWN_TRAINING.md", "docs/CAUSES.md"
AUDIT, MANUAL = "docs/AUDIT.md", "docs/MANUAL.md"
TASKS, STREAMS, PROMISES = "docs/TASKS.md", "docs/STREAMS.md", "docs/PROMISES.md"
WHERE, PEERS = "docs/WHERE_IT_RUNS.md", "docs/PEERS_ON_FAULTS.md"
DOCUMENTS = (
    *(README, TROUBLES, CONTRIBUTING, GLOSSARY, READING, CONCEPTS, DRILLS, AUDIT, OWN_TRAINING),
    *(MANUAL, PROMISES, TASKS, STREAMS, WHERE),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorial").glob("*.md")),
)
GENERATED = {
    README: ("capture: docs/first_run.txt", "generated: faults"),
    CAUSES: ("generated: causes",),
    DRILLS: ("generated: drills",),
    AUDIT: ("generated: verdicts",),
}
"""Which parts of which document are made from code or from measurements."""

_CONFIG_HEAD, *_TABLES = sections(Path(__file__).with_name("documents.txt")).values()
_ROWS = [[line.split(": ", 1) for line in table.splitlines()] for table in _TABLES]
SECTIONS = {section: codes.split() for section, codes in _ROWS[0]}
IN_A_TRACEBACK = dict(_ROWS[1])
FAULTS = {name: told.split(": ") for name, told in _ROWS[2]}

_LONGEST_PHRASE, _NUMBER = 48, "\0"


def causes_table() -> str:
    """Write the catalogue of explain as an index: what stands in the log, and what it means."""
    lines = ["| in the log | cause |", "| --- | --- |"]
    sections = {code: section for section, codes in SECTIONS.items() for code in codes}
    assert sections.keys() <= BY_CODE.keys()
    for family, causes in FAMILIES.items():
        if family == "This suite":
            continue
        lines.append(f"| **{family}** | |")
        if family == "Python":
            types = f"`KeyError` and {len(BUILT_IN) - 1} other types of Python's own"
            lines.append(f"| {types} | named by its type (python-keyerror and so on) |")
        for cause in causes:
            if cause in BUILT_IN.values():
                continue
            said = IN_A_TRACEBACK.get(cause.code) or f"`{spoken(cause.phrases[0])}`"
            section = f", [{sections[cause.code]}]" if cause.code in sections else ""
            cells = (said, f"{cause.title} ({cause.code}{section})")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
    for section in SECTIONS:
        title = re.search(rf"^##+ ({section}[. ].*)$", text_of(TROUBLES), re.MULTILINE)
        assert title, section
        lines.append(f"[{section}]: ../{TROUBLES}#{anchor_of(title[1])}")
    return "\n".join([*lines, ""])


def verdicts_table() -> str:
    """Write verdicts of audit: each code with its severity and its meaning."""
    lines = ["| code | severity | what it means |", "| --- | --- | --- |"]
    lines += [
        f"| `{code}` | {kind.severity} | {kind.meaning} |" for code, kind in CATALOGUE.items()
    ]
    return "\n".join([*lines, ""])


def spoken(phrase: str) -> str:
    """Give a phrase as the log has it: N for a number, ... for other text; cut after a word."""
    text = _example(re._parser.parse(phrase))  # type: ignore[attr-defined]  # Python's own parser
    text = re.sub(rf"{_NUMBER}(?:[., x]*{_NUMBER})*", "N", text)
    text = re.sub(r"\.{4,}", "...", text).strip().replace("`", "'")
    return text if len(text) <= _LONGEST_PHRASE else text[:_LONGEST_PHRASE].rpartition(" ")[0]


def _example(tree: Iterable[Any]) -> str:  # Any: the parser's own types
    """Write what a parsed phrase matches: of alternatives the first, without optional parts."""
    parts = []
    for kind, of in tree:
        match str(kind):
            case "LITERAL":
                parts.append(chr(of))
            case "SUBPATTERN":
                parts.append(_example(of[-1]))
            case "BRANCH":
                parts.append(_example(of[1][0]))
            case "MAX_REPEAT" if of[:2] != (0, 1):
                parts.append(_example(of[2]))
            case "IN" if re.search(r"CATEGORY_DIGIT|RANGE, \(48, 57\)", str(of)):
                parts.append(_NUMBER)
            case "IN" if all(str(one) == "LITERAL" for one, _ in of):
                parts.append(chr(of[0][1]))
            case "ANY" | "IN" | "NOT_LITERAL":
                parts.append("...")
    return "".join(parts)


def faults_table() -> str:
    """Write what each contender lost at each fault, as benchmarks/peer_drills.py measured it."""
    titles, *rows = table_rows(PEERS, cells=7)
    shown = [titles.index(name) for name in titles if name != "Fabric"]
    lines = [f"| {' | '.join(titles[place] for place in shown)} | drill |"]
    lines += ["| --- " * (len(shown) + 1) + "|"]
    for row in rows:
        if row[0].strip("`") in FAULTS:
            label, shown_by = FAULTS[row[0].strip("`")]
            cells = [label, *(row[place] for place in shown[1:])]
            lines.append(f"| {' | '.join(cells)} | `{shown_by}` |")
    return "\n".join([*lines, ""])


def drills_tables() -> str:
    """Write a table for each outcome of a drill: the drills that end so, and what happens."""
    outcomes: dict[str, dict[str, list[Fault]]] = {}
    for fault in all_faults():
        # one row for a signal to a rank, whatever the phase
        is_signal = fault.signal and fault.text.startswith("a rank ")
        whole, _, who = fault.name.rpartition("-")
        is_raise = whole.startswith("raise-") and who in ("one", "some", "all")
        family = fault.name.split("-")[0] if is_signal else whole if is_raise else fault.name
        outcome = fault.verdict.replace(fault.code, "a code") if fault.code else fault.verdict
        outcomes.setdefault(outcome, {}).setdefault(family, []).append(fault)
    lines = []
    for outcome, families in outcomes.items():
        lines += [f"### {outcome[0].upper()}{outcome[1:]}", "", "| drill | what happens |"]
        lines += ["| --- | --- |"]
        for family, faults in families.items():
            others = [fault.name.removeprefix(family) for fault in faults[1:]]
            names = ", ".join(f"`{name}`" for name in (faults[0].name, *others))
            text, code = faults[0].text, faults[0].code
            if len(faults) > 1:
                text = text.replace("one rank raises", "one, some or all ranks raise")
                is_signal = text.startswith("a rank ")
                text = re.split(" (?:while|in|before) ", text)[0] if is_signal else text
            lines.append(f"| {names} | {text}{f': {code}' * bool(code)} |")
        lines.append("")
    return "\n".join(lines)


def rendered(document: str, *, only: str = "") -> str:
    """Give the text of a document with its generated parts made anew."""
    makers = {
        "generated: causes": causes_table,
        "generated: drills": drills_tables,
        "generated: faults": faults_table,
        "generated: verdicts": verdicts_table,
    }

    def part(match: re.Match[str]) -> str:
        what = match[1]
        if not what.startswith(only):
            return match[0]
        if what.startswith("capture: "):
            path = ROOT / what.removeprefix("capture: ")
            if not path.is_file():
                return match[0]
            text = path.read_text(encoding="utf-8").strip()
            # what the epochs between the first and the last one say is the same again
            for same in ("epoch [2-4](?:/5| done)", "trying the model "):
                text = re.sub(rf"(?:^\S+ {same}.*\n)+", "...\n", text, flags=re.MULTILINE)
            made = f"```text\n{text}\n```\n"
        else:
            made = f"\n{makers[what]()}\n"
        return f"<!-- {what} -->\n{made}<!-- end -->"

    places = r"<!-- ((?:generated|capture): [^>]+?) -->\n.*?<!-- end -->"
    return re.sub(places, part, document, flags=re.DOTALL)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def prose_of(document: str) -> str:
    """Give a document without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def table_rows(document: str, *, cells: int = 0) -> list[list[str]]:
    """List the rows of all tables, or of those with so many cells."""
    lines = [line for line in prose_of(document).splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not cells or len(row) == cells]


def anchors_of(text: str) -> set[str]:
    """Give the anchors that a Markdown reader makes of the headings."""
    return {anchor_of(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def anchor_of(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def promised() -> dict[str, list[str]]:
    """Give each promise with its tests, which are in tests/ or at the top."""
    places = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    found: dict[str, list[str]] = {}
    for promise, tests in table_rows(PROMISES, cells=2):
        file = ""
        for told, name in re.findall(r"`([\w./]*)(::[^`]+)`", tests):
            file = told or file  # the next test of the same file is told without it
            place = places.get(Path(file).name, ROOT / file).relative_to(ROOT).as_posix()
            found.setdefault(promise, []).append(place + name)
    return found


def has_function(test: str) -> bool:
    """Say whether FILE::NAME or FILE::CLASS::NAME is a function."""
    file, *classes, name = test.split("::")
    text = text_of(file) if (ROOT / file).is_file() else ""
    within = "".join(rf"^class {c}\b(?:(?!^\S).|\n)*?" for c in classes)  # up to the next one
    return bool(re.search(rf"{within}^ {{{4 * len(classes)}}}def {name}\(", text, re.MULTILINE))


def commands_of(document: str) -> Iterator[str]:
    """Give a document's commands in order: lines of bash blocks, cells of a column "command"."""
    is_bash, column = False, -1
    last = ""
    for line in map(str.strip, text_of(document).splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("```"):
            is_bash = line == "```bash"
        elif is_bash and line:
            yield line
        elif line.startswith("| ") and not last.startswith("|"):
            column = cells.index("command") if "command" in cells else -1
        elif line.startswith("| ") and column >= 0 and cells[column].startswith("`"):
            yield cells[column].strip("`")
        last = line


def template() -> str:
    """Write config.yaml: every setting with its default and what it does."""
    values = flatten(Config())
    blocks = [_CONFIG_HEAD]
    for section, title in TITLES.items():
        rule = "-" * (WIDTH - len(title) - len("# ---  "))
        blocks.append(f"# --- {title} {rule}\n")
        for name in names_of(section):
            blocks.append(f"{_comment(SETTINGS[name])}{name}: {yaml_word(values[name])}\n")
    return "\n".join(blocks)


def _comment(setting: Setting) -> str:
    """Write what a setting does and takes, as comment lines."""
    taken = [*(["auto"] if setting.has_auto else []), *setting.choices]
    taken += [setting.shape.words] if setting.takes_path else []
    taken += [setting.bounds.words()] if setting.bounds else []
    taken += ["true", "false"] if setting.has_auto and setting.type is bool else []
    # WHY unbroken: a list of choices over two lines is hard to read
    told = f" ({unbroken(' | '.join(taken))})" if taken else ""
    text = setting_texts()[setting.name] + told
    return "".join(f"# {line}\n" for line in wrapped(text, width=WIDTH - len("# ")))


if __name__ == "__main__":
    (ROOT / "config.yaml").write_text(template(), encoding="utf-8")
    write_all()
    for document in GENERATED:
        (ROOT / document).write_text(rendered(text_of(document)), encoding="utf-8")
