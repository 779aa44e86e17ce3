"""Measures the code of each package, and writes the generated parts of pages about the code.

    python -m tools.house            print per package: files, lines, lengths of functions
    python -m tools.house --write    write the generated parts of PAGES: packages, day path, ...
    python -m tools.house --check    find stale parts of these pages; `make check` runs this

Generated protobuf stubs do not count. Lines of functions are counted as in check_layout.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.check_layout import GENERATED, MANY_FILES, PACKAGES, function_lines

MAP = "docs/architecture.md"
DAY_PATH = "docs/day_path.md"
DECISIONS = "docs/adr/README.md"
DAY_PATH_LINES = 6_000  # number of lines that one person can read in a day
# A page is stale if its number of lines differs from the code's by more than this fraction.
TOLERANCE = 0.1
# Marks that begin and end the generated part of a page.
BEGIN, END = "<!-- written by tools/house.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Chapter:
    """A chapter of the day path: files to read together.

    Attributes:
        title: the chapter's title.
        sentence: what a reader of the chapter learns.
        names: a class or function of each file, in reading order; the files are found by these
            names.
    """

    title: str
    sentence: str
    names: tuple[str, ...]


# The day path: every file that decides something about a request that meets no failures.
DAY = (
    Chapter(
        "At the router",
        "The router checks a request, picks a pair of nodes, sends both nodes a command at once, "
        "and merges their answers into one stream.",
        ("Intake", "Dispatcher", "OpenCall", "Attempt"),
    ),
    Chapter(
        "On the two nodes",
        "Each node runs a loop: inbox, one engine step, outbox. The prefill node tracks which KV "
        "blocks may be sent, and the decode node tracks which blocks it has granted.",
        ("PrefillNode", "PushTracker", "DecodeNode", "Reservations", "GrantQueue", "new_request"),
    ),
    Chapter(
        "Between them",
        "Two state machines, one on each node, exchange a few short messages; the state machines "
        "themselves do no I/O.",
        ("Start:kvconnector", "SendMachine", "Transfer", "ReceiveMachine"),
    ),
    Chapter(
        "In the engine",
        "The engine decides how many tokens of each request to compute, and owns the blocks. Both "
        "nodes use the same engine.",
        ("Engine", "Request:engine", "Scheduler", "KVCacheManager", "BlockPool"),
    ),
    Chapter(
        "One step",
        "The code of one step knows no requests: it turns token ids and rows into sampled tokens.",
        ("StepPlan:engine", "ModelRunner"),
    ),
)
# The second day: the forward pass, and types that files of the first day use.
BESIDE = (
    Chapter(
        "The model",
        "The files of this section compute a forward pass, down to the attention of one layer, and "
        "sample a token.",
        ("DecoderForCausalLM", "Attention:models", "AttentionMetadata", "CpuAttention",
         "sample:engine"),
    ),
    Chapter(
        "Passed on the way",
        "A plain request also passes these files: its model's name, its text, the gate, the choice "
        "of nodes, the queues of its tokens and of a node, a prefill node's open commands and its "
        "last blocks, the steps in flight, and the tensors of a step.",
        ("NameTable", "PromptReader", "Call:router", "Admission", "Ticket:router", "Placer",
         "NodePool", "OutputBuffer", "Answers:router", "Inbox:node_runtime", "Jobs:prefill_node",
         "LayerTail", "StepsInFlight", "KVCacheCoordinator", "PreparedStep", "Forward:engine",
         "StepSampler"),
    ),
    Chapter(
        "Carriers",
        "These files pass values on and decide nothing about a request: HTTP, the link between "
        "router and nodes, the I/O thread between nodes, rows and tables of a step.",
        ("CompletionDialect", "Exchange", "Node:router", "NodeLinkService", "PrefillCommand",
         "RouterLink",
         "BlockPush", "Posted:kvconnector", "Sender", "IoLoop", "KVLayout", "SchedulerOutput",
         "Executor:engine", "Worker:engine", "InputBatch", "BlockTable"),
    ),
    Chapter(
        "Beyond the plainest case",
        "The files of this section decide about costs of placements, waiting requests, drafts, the "
        "health of peers, and recovery after failures.",
        ("Cost", "WaitingRoom", "Drafts", "Peers", "Recovery:router", "Quarantine:node_runtime"),
    ),
)  # fmt: skip

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A package, without its subpackages."""

    name: str
    sentence: str
    num_files: int
    num_lines: int
    function_p90: int
    parameters_p90: int


def packages(root: Path) -> list[Package]:
    """Measure all packages; a package comes before its subpackages."""
    return [_package(name, sorted((root / name).glob("*.py"))) for name in package_names(root)]


def package_names(root: Path) -> list[str]:
    """List the folders of all packages."""
    found = []
    for room in PACKAGES.values():
        for folder in sorted({path.parent for path in (root / room).rglob("*.py")}):
            name = folder.relative_to(root).as_posix()
            if name != GENERATED:
                found.append(name)
    return found


def _package(name: str, files: list[Path]) -> Package:
    functions = [
        node for file in files for node in ast.walk(_tree(file)) if isinstance(node, _Function)
    ]
    init = next((file for file in files if file.name == "__init__.py"), None)
    return Package(
        name=name,
        sentence=_first_sentence(init) if init else "",
        num_files=len(files),
        num_lines=sum(_num_lines(file) for file in files),
        function_p90=_p90([function_lines(node) for node in functions]),
        parameters_p90=_p90([_num_parameters(node) for node in functions]),
    )


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _num_parameters(function: _Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(1 for argument in named if argument.arg not in ("self", "cls"))


def _p90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0


def _first_sentence(file: Path) -> str:
    """Return the first paragraph of a module's docstring, as one line."""
    paragraph = (ast.get_docstring(_tree(file)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")


def day_path(root: Path, chapter: Chapter) -> Iterator[tuple[str, str, int]]:
    """Yield path, sentence and lines of a chapter's files; raises ValueError for unknown names."""
    seen = set()
    for name in chapter.names:
        file = _file_of(root, *name.split(":"))
        if file not in seen:
            seen.add(file)
            yield file.relative_to(root).as_posix(), _first_sentence(file), _num_lines(file)


def _file_of(root: Path, name: str, room: str = "") -> Path:
    places = [root / room] if room else [root / folder for folder in PACKAGES.values()]
    files = sorted(file for place in places for file in place.rglob("*.py"))
    defining = [
        file
        for file in files
        # A quick check, because parsing takes long
        if f" {name}" in file.read_text(encoding="utf-8")
        and any(
            isinstance(node, ast.ClassDef | _Function) and node.name == name
            for node in _tree(file).body
        )
        and not file.relative_to(root).as_posix().startswith(f"{GENERATED}/")
    ]
    if len(defining) != 1:
        raise ValueError(f"{name} of the day path is defined in {len(defining)} files")
    return defining[0]


def map_table(root: Path) -> str:
    """Return the table of packages for docs/architecture.md."""
    found = packages(root)
    num_files, num_lines = (sum(p.num_files for p in found), sum(p.num_lines for p in found))
    rows = [f"| `{p.name}` | {p.sentence} | {p.num_files} | {p.num_lines:,} |" for p in found]
    head = ["| package | what it is | files | lines |", "|---|---|---:|---:|"]
    total = (
        f"Together {num_files:,} files, {num_lines:,} lines, without the stubs in `{GENERATED}`."
    )
    return "\n".join([*head, *rows, "", total])


def day_path_tables(root: Path) -> str:
    """Return a table of files for each chapter, in the order in which to read them."""
    day, beside = (
        [(chapter, list(day_path(root, chapter))) for chapter in part] for part in (DAY, BESIDE)
    )
    over = _num_lines_of(day) - DAY_PATH_LINES
    limit = f"{over:,} lines over" if over > 0 else "it fits"
    return "\n\n".join(
        [
            f"The first half has {_size(day)}; the goal is {DAY_PATH_LINES:,} lines: {limit}.",
            *_chapters(day, 1),
            f"The second half has {_size(beside)}.",
            *_chapters(beside, 1 + len(day)),
        ]
    )


_Chapters = list[tuple[Chapter, list[tuple[str, str, int]]]]


def _num_lines_of(chapters: _Chapters) -> int:
    return sum(lines for _, files in chapters for *_, lines in files)


def _size(chapters: _Chapters) -> str:
    num_files = sum(len(files) for _, files in chapters)
    return f"{num_files} files, {_num_lines_of(chapters):,} lines"


def _chapters(chapters: _Chapters, first: int) -> Iterator[str]:
    head = "| file | what it does | files | lines |\n|---|---|---:|---:|\n"
    for number, (chapter, files) in enumerate(chapters, first):
        rows = (f"| `{path}` | {sentence} | 1 | {lines:,} |" for path, sentence, lines in files)
        yield f"## {number}. {chapter.title}\n\n{chapter.sentence}\n\n{head}" + "\n".join(rows)


def decisions(root: Path) -> str:
    """Return a list of links to all decision records, sorted by number."""
    files = sorted((root / DECISIONS).parent.glob("[0-9]*.md"))
    titles = [file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") for file in files]
    return "\n".join(f"* [{title}]({file.name})" for title, file in zip(titles, files, strict=True))


PAGES = {MAP: map_table, DAY_PATH: day_path_tables, DECISIONS: decisions}


def write(root: Path) -> None:
    """Write the generated part of each page."""
    for page, make in PAGES.items():
        before, _, after = _parts(root, page)
        (root / page).write_text(f"{before}\n\n{make(root)}\n\n{after}", encoding="utf-8")


def _parts(root: Path, page: str) -> tuple[str, str, str]:
    """Split a page into the text before, in and after its generated part."""
    text = (root / page).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    written, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place between {BEGIN!r} and {END!r}")
    return before + begin, written, end + after


def findings(root: Path) -> Iterator[str]:
    """List stale lines in the generated parts; numbers of lines may differ by `TOLERANCE`."""
    for page, make in PAGES.items():
        _, written, _ = _parts(root, page)
        old, new = _rows(written), _rows(make(root))
        for name in old.keys() - new.keys():
            yield f"{page}: {name} is not there"
        for name in new.keys() - old.keys():
            yield f"{page}: has no line for {name}"
        for name in old.keys() & new.keys():
            sentence, files, lines = old[name]
            new_sentence, new_files, new_lines = new[name]
            is_same = (sentence, files) == (new_sentence, new_files)
            if not is_same or abs(lines - new_lines) > TOLERANCE * new_lines:
                yield f"{page}: the line for {name} is old; run: make house"


def _rows(written: str) -> dict[str, tuple[str, int, int]]:
    """Read the rows of a generated part: name -> (sentence, number of files, number of lines).

    If the part is a list and not a table, each of its lines is a name without sentence and numbers.
    """
    rows = {
        name: (sentence, int(files), int(lines.replace(",", "")))
        for name, sentence, files, lines in _ROW.findall(written)
    }
    return rows or {line: ("", 0, 0) for line in written.splitlines() if line.startswith("* ")}


def crowded(root: Path) -> Iterator[str]:
    """Yield a line for each package with many files, for people to judge."""
    for p in packages(root):
        num_files = p.num_files - 1  # the package's __init__.py does not count
        if num_files > MANY_FILES:
            yield f"{p.name} has {num_files} files beside each other, more than {MANY_FILES}"


def imported_by_day(root: Path) -> set[Path]:
    """Return the project's files that the day path imports but does not contain."""
    files = {root / path for chapter in DAY for path, *_ in day_path(root, chapter)}
    found: set[Path] = set()
    for node in (node for file in files for node in ast.walk(_tree(file))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = _place_of(root, node.module)
            for name in node.names:
                found |= {file for file in (_file_at(module / name.name), _file_at(module)) if file}
    return found - files


def _place_of(root: Path, module: str) -> Path:
    room, *parts = module.split(".")
    return root.joinpath(PACKAGES.get(room, room), *parts)


def _file_at(place: Path) -> Path | None:
    """Return the file of a module; None: it is not Baton's, or a package without code."""
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)


def show(root: Path) -> None:
    """Print the packages and the length of the day path."""
    table = Table("package", "files", "lines", "function p90", "parameters p90", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for p in packages(root):
        numbers = (p.num_files, p.num_lines, p.function_p90, p.parameters_p90)
        table.add_row(p.name, *map(str, numbers))
    console = Console()
    console.print(table)
    for line in crowded(root):
        console.print(line)
    console.print(map_table(root).splitlines()[-1])
    console.print(day_path_tables(root).splitlines()[0])
    console.print(f"It imports {len(imported_by_day(root))} files that are not on it.")


def main(root: Path, words: list[str]) -> int:
    """Run the command line; return the exit code."""
    if words == ["--write"]:
        write(root)
    elif words == ["--check"]:
        found = sorted(findings(root))
        for finding in found:
            print(finding)
        return 1 if found else 0
    else:
        show(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], sys.argv[1:]))
