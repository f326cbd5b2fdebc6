"""The documents as text: their commands, tables, links, and the parts that are made from code.

    python -m tests.documents      write config.yaml, pictures and generated parts of documents anew

Owns: reading the documents, and their generated parts: settings (from their sections), layout (from
the first line of each file), causes (from the catalogue of explain), faults (from
docs/PEERS_ON_FAULTS.md), and the capture of the first run (docs/first_run.txt).
Does not own: whether what they say is true (test_docs.py).
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddp_doctor.explain.catalogue import FAMILIES
from ddp_doctor.explain.catalogue.python import BUILT_IN, OPERATION, RAISED
from ddp_doctor.explain.catalogue.silent import FINISHED, SILENT
from ddp_doctor.explain.events import Fix
from docs.pictures.draw import write_all
from hardened_ddp.settings.record import names_of, template, yaml_word
from hardened_ddp.settings.schema import SETTINGS, TITLES, limits
from tests.processes import ROOT

README, TROUBLES = "README.md", "DDP_TROUBLESHOOTING.md"
GLOSSARY, READING = "docs/GLOSSARY.md", "docs/READING_ORDER.md"
CAUSES = "docs/CAUSES.md"
CONCEPTS, DRILLS = "docs/CONCEPTS.md", "docs/DRILLS.md"
OWN_TRAINING = "docs/OWN_TRAINING.md"
AUDIT, MANUAL = "docs/AUDIT.md", "docs/MANUAL.md"
SETTINGS_PAGE, LAYOUT, PROMISES = "docs/SETTINGS.md", "docs/LAYOUT.md", "docs/PROMISES.md"
TASKS, STREAMS = "docs/TASKS.md", "docs/STREAMS.md"
PEERS = "docs/PEERS_ON_FAULTS.md"
DOCUMENTS = (
    *(README, TROUBLES, GLOSSARY, READING, CONCEPTS, DRILLS, AUDIT, OWN_TRAINING, MANUAL),
    *(SETTINGS_PAGE, LAYOUT, PROMISES, TASKS, STREAMS),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorial").glob("*.md")),
)
GENERATED = {
    README: ("capture: docs/first_run.txt", "generated: faults"),
    SETTINGS_PAGE: ("generated: settings",),
    LAYOUT: ("generated: layout",),
    CAUSES: ("generated: causes",),
}
"""Which parts of which document are made from code or from measurements."""

# What the tree says of files that can't say it themselves.
ONE_LINERS = {
    "README.md": "What the project does, and how to use it.",
    "DDP_TROUBLESHOOTING.md": "Every error: symptom, cause, fix.",
    "launch_examples.sh": "Numbered presets; without arguments it lists them.",
    "train.slurm": "Trains as a Slurm job: sbatch train.slurm.",
    "setup.sh": "Installs what is missing, into .venv.",
    "config.yaml": "Every setting with its default.",
    "requirements.txt": "What training needs, with versions that fit together.",
    "requirements-dev.txt": "What the tests need in addition.",
    "requirements-extras.txt": "What only some commands need: exports, Hugging Face, wandb.",
    "CONTRIBUTING.md": "The rules of the code, and recipes.",
    "pyproject.toml": "Settings of ruff, mypy and pytest.",
    "Makefile": "make check, quick, test, format.",
    ".ci/run": "What every change must pass: make check.",
    "docs/MANUAL.md": "Launchers, data, resume, drills, exports and the run folder in full.",
    "docs/SETTINGS.md": "Every setting with its default and what it does.",
    "docs/PROMISES.md": "What the project promises, and the test of each promise.",
    "docs/LAYOUT.md": "Every file and what it is for.",
    "docs/TASKS.md": "What a model learns, and what is measured.",
    "docs/STREAMS.md": "Training on data that can only be read from front to back.",
    "docs/BENCHMARKS.md": "Speed, start and memory beside a bare loop and the peers.",
    "docs/PEERS_ON_FAULTS.md": "What bare DDP, the peers and this project lose at each fault.",
    "docs/CAUSES.md": "The causes that explain knows: what stands in the log, and the fix.",
    "docs/AUDIT.md": "audit: what it sees in a DDP program, how, at what cost, and what not.",
    "docs/CONCEPTS.md": "How data parallel training works, for students.",
    ".ci/components.sh": "Installs MPI and Slurm for the tests, where it can.",
    "docs/OWN_TRAINING.md": "Your own optimizer, schedule, parameter groups and batches.",
    "docs/DRILLS.md": "Every fault drill, its result, and the time that it costs.",
    "docs/tutorial/README.md": "Break it, mend it: eight chapters in plain PyTorch.",
    "docs/GLOSSARY.md": "The terms of DDP and of this project.",
    "docs/READING_ORDER.md": "Which file to read first, and six exercises.",
    "docs/first_run.txt": "What the first run prints.",
    "docs/report.png": "A report: a run with a rank killed and a rank that hung, which finished.",
    "docs/pictures/first_run.svg": "The curves of that run.",
    "docs/pictures/lost_at_a_fault.svg": "What is lost at a fault, by whom.",
}
LAYERS = ["settings", "ranks", "reporting", "data", "task", "model", "checkpoint", "guard", "step"]
LAYERS += ["training", "export", "diagnosis"]


def settings_tables() -> str:
    """Write every setting as a Markdown table for each section."""
    lines = []
    for section, title in TITLES.items():
        lines += [f"## {title}", "", "| setting | default | takes | what it does |"]
        lines += ["| --- | --- | --- | --- |"]
        for name in names_of(section):
            setting = SETTINGS[name]
            takes = limits(setting).replace(" | ", ", ")
            if not takes:
                takes = {bool: "true, false", dict: "a mapping"}.get(setting.type, "text")
            default = yaml_word(setting.default)
            lines.append(f"| `{name}` | `{default}` | {takes} | {setting.facts.text} |")
        lines.append("")
    return "\n".join(lines)


def layout_tree() -> str:
    """Write what every file is for, in its own words, as a tree."""
    in_docs = [name for name in ONE_LINERS if name.startswith("docs/")]
    top = ["ddp_training.py", "test_ddp_training.py", "conftest.py", "download.py"]
    top += [name for name in ONE_LINERS if name not in in_docs]
    lines = ["```text", *(entry(name, purpose_of(ROOT / name), 0) for name in top)]
    lines += ["hardened_ddp/", entry("errors.py", purpose_of(ROOT / "hardened_ddp/errors.py"), 1)]
    for layer in LAYERS:
        folder = ROOT / "hardened_ddp" / layer
        lines.append(entry(f"{layer}/", purpose_of(folder / "__init__.py"), 1))
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        lines += [entry(path.name, purpose_of(path), 2) for path in files]
        for part in sorted(p.parent for p in folder.glob("*/__init__.py")):
            lines.append(entry(f"{part.name}/", purpose_of(part / "__init__.py"), 2))
            files = [p for p in sorted(part.rglob("*.py")) if p.name != "__init__.py"]
            lines += [entry(str(p.relative_to(part)), purpose_of(p), 3) for p in files]
    for folder in ("drills", "launchers", "benchmarks", "examples", "docs", "tests"):
        files = [p for p in sorted((ROOT / folder).rglob("*.py")) if p.name != "__init__.py"]
        lines += [f"{folder}/"] * bool(files)
        names = [str(path.relative_to(ROOT / folder)) for path in files]
        lines += [entry(n, purpose_of(p), 1) for n, p in zip(names, files, strict=True)]
    lines.append("docs/")
    lines += [entry(name.removeprefix("docs/"), ONE_LINERS[name], 1) for name in in_docs]
    return "\n".join([*lines, "```", ""])


def causes_table() -> str:
    """Write the catalogue of explain as an index: what stands in the log, and what it means."""
    lines = []
    for family, causes in FAMILIES.items():
        if family == "This suite":
            continue
        lines += [f"### {family}", "", "| in the log | cause | fix | how to confirm it |"]
        lines += ["| --- | --- | --- | --- |"]
        for cause in causes:
            # WHY a dict: two phrases may look alike
            shown = dict.fromkeys(f"`{spoken(phrase)}`" for phrase in cause.phrases)
            said = ", ".join(list(shown)[:2]) or IN_A_TRACEBACK[cause.code]
            cells = (said, f"{cause.title} ({cause.code})", fixes_of(cause.fix), cause.confirm)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def fixes_of(fix: Fix) -> str:
    """Give the fix for plain torch, and those of the frameworks in which it differs."""
    named = {"Lightning": fix.lightning, "Accelerate": fix.accelerate, "Trainer": fix.trainer}
    others = [f"{name}: {text.rstrip('.')}" for name, text in named.items() if text]
    return "<br>".join([fix.plain, *others])


IN_A_TRACEBACK = {cause.code: f"`{name}:`" for name, cause in BUILT_IN.items()}
IN_A_TRACEBACK |= {
    RAISED.code: "another exception, from a `raise` of the program",
    OPERATION.code: "another exception, from a line of the program without `raise`",
    SILENT.code: "torchrun's table: one rank failed that printed no exception; the others lost it",
    FINISHED.code: "torchrun's table: no other failure than lost connections",
}
"""What the log has for a cause that is chosen by the type of an exception."""


def spoken(phrase: str) -> str:
    """Give a phrase as the log has it: N for a number, ... for any other text."""
    text = _example(re._parser.parse(phrase))  # type: ignore[attr-defined]  # Python's own parser
    text = re.sub(rf"{_NUMBER}(?:[., x]*{_NUMBER})*", "N", text)
    return re.sub(r"\.{4,}", "...", text).strip().replace("`", "'")


_NUMBER = "\0"


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


FAULTS = {
    "SIGTERM to rank 1": ("SIGTERM to one rank", "sigterm-forward"),
    "kill -9 of rank 1; the same command again": ("kill -9 of one rank", "kill-forward"),
    "newest checkpoint cut in half, then resume": (
        "newest checkpoint cut in half",
        "torn-checkpoint",
    ),
    "resume on 1 rank instead of 2": ("resume on 1 rank instead of 2", "tests/test_restarts.py"),
    "out of memory in forward on rank 1, once": ("one rank out of memory", "memory-forward"),
    "rank 1 hangs in forward, once; torchrun --max_restarts=1": ("one rank hangs", "hang-forward"),
    "NaN loss on rank 1, once": ("NaN on one rank", "nan-once"),
    "a layer unused on rank 1 from step 34 on": ("a layer becomes unused", "unused-parameter"),
    "kill -9 of torchrun itself": ("kill -9 of torchrun", "torchrun-killed"),
    "kill -9 of a DataLoader worker of rank 1": ("kill -9 of a DataLoader worker", "worker-kill"),
}
"""The tables of docs/PEERS_ON_FAULTS.md that README.md sums up, what it calls them, and the drill
(or test) that shows what this project does."""


def faults_table() -> str:
    """Write what each contender lost at each fault, one row a fault, from the measured tables."""
    names = ("bare", "accelerate", "lightning", "trainer", "ddp_training.py")
    titles = ("fault", "torchrun alone", "Accelerate", "Lightning", "HF Trainer", "this project")
    lines = [f"| {' | '.join(titles)} | drill |", "| --- " * (len(titles) + 1) + "|"]
    for fault, (label, shown_by) in FAULTS.items():
        section = text_of(PEERS).partition(f"### {fault}\n")[2].partition("\n### ")[0]
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
        measured = {name: rest for name, *rest in rows}
        cells = [outcome(*measured[name][:3]) for name in names]
        lines.append(f"| {label} | {' | '.join(cells)} | `{shown_by}` |")
    return "\n".join([*lines, ""])


def outcome(happened: str, steps_lost: str, samples: str) -> str:
    """Say in a few words what docs/PEERS_ON_FAULTS.md says of one contender at one fault."""
    if "lived on" in happened:
        return "ranks train on alone"
    if "NaN" in happened:
        return "weights become NaN"
    if "by itself" in happened:
        return "continues, nothing lost"
    if "-9" in happened:
        return "ranks save and exit"
    ways = [part for part in ("hung", "resumed", "restarted") if part in happened]
    if "resumed" not in ways or re.search("then (ended|hung)", happened):
        return "hangs; no start succeeds" if "hung" in ways else "no start succeeds"
    said = "hangs; " * ("hung" in ways)
    said += "nothing" if samples == "0 / 0" and steps_lost == "0" else f"{steps_lost} steps"
    surplus, missing = samples.split(" / ")
    return said + f"; {surplus} twice, {missing} never" * (samples != "0 / 0")


def rendered(document: str, *, only: str = "") -> str:
    """Give the text of a document with its generated parts made anew."""
    makers = {"generated: settings": settings_tables, "generated: layout": layout_tree}
    makers |= {"generated: causes": causes_table, "generated: faults": faults_table}

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
            text = re.sub(
                r"(?:^\S+ epoch [2-4](?:/5| done).*\n)+", "...\n", text, flags=re.MULTILINE
            )
            text = re.sub(r"(?:^\S+ trying the model .*\n)+", "...\n", text, flags=re.MULTILINE)
            made = f"```text\n{text}\n```\n"
        else:
            made = f"\n{makers[what]()}\n"
        return f"<!-- {what} -->\n{made}<!-- end -->"

    return re.sub(
        r"<!-- ((?:generated|capture): [^>]+?) -->\n.*?<!-- end -->",
        part,
        document,
        flags=re.DOTALL,
    )


def entry(name: str, purpose: str, depth: int) -> str:
    return f"{'  ' * depth + name:<30} {purpose}"


def purpose_of(path: Path) -> str:
    """Give the first line of a Python file's docstring, or what ONE_LINERS says of the file."""
    if path.suffix != ".py":
        return ONE_LINERS[str(path.relative_to(ROOT))]
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0] if text else ""


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
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def has_function(test: str) -> bool:
    """Say whether FILE::NAME or FILE::CLASS::NAME is a function."""
    name, *path = test.split("::")
    if not (ROOT / name).is_file():
        return False
    nodes: list[ast.AST] = list(ast.parse(text_of(name)).body)
    for part in path:
        found = [node for node in nodes if getattr(node, "name", "") == part]
        if not found:
            return False
        nodes = list(ast.iter_child_nodes(found[0]))
    return isinstance(found[0], ast.FunctionDef)


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


if __name__ == "__main__":
    (ROOT / "config.yaml").write_text(template(), encoding="utf-8")
    write_all()
    for document in GENERATED:
        (ROOT / document).write_text(rendered(text_of(document)), encoding="utf-8")
