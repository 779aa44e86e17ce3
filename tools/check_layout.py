"""Checks rules about the repository's layout that no linter knows; `make check` runs this.

Each finding is printed as one line. The length of source files has no limit; `make house` reports
packages with many files. A function's limit is for lines of code. Its signature does not count,
because the options of a command are a table; neither do its docstring, and functions inside it,
which are counted separately.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

DISTRIBUTION = "baton-serve"
# Import name of a package -> its folder.
PACKAGES = {
    "baton": "baton",
    "router": "router",
    "prefill_node": "prefill_node",
    "decode_node": "decode_node",
    "encode_node": "encode_node",
    "node_runtime": "node_runtime",
    "sim_node": "sim_node",
    "loadtest": "loadtest",
    "engine": "engine",
    "kvconnector": "kvconnector",
    "models": "models",
    "baton_kernels": "kernels/baton_kernels",
}
GENERATED = "baton/v1"
# Folders that must not be packages, because they would hide other projects' packages of these names
# (Hugging Face `kernels`, `proto-plus`).
NO_PACKAGE = ("kernels", "proto", "tests", "benchmarks", "deploy", "docs", "examples")
MANY_FILES = 14  # packages with more files are reported; sub-packages and __init__.py do not count
MAX_DEPTH = 2  # how many levels a package may be below its top-level folder
DATED = ("CHANGELOG.md", "log.md")  # pages about the past, which may name what no longer exists
MAX_TEST_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_PATH = re.compile(r"`([\w-]+/[\w./-]*\w)/?`")
_MODULE = re.compile(r"`([a-z_]+(?:\.\w+){2,})`")
_CHANGELOG_VERSION = re.compile(r"^## \[?(\d+\.\d+\.\d+[^\]\s]*)", re.MULTILINE)
_VERSION = re.compile(r'^__version__ = "(.+)"', re.MULTILINE)


def main(root: Path) -> int:
    """Print every finding; returns the exit code."""
    findings = [
        *folders_that_are_packages(root),
        *package_findings(root),
        *source_findings(root),
        *names_owned_by_others(),
        *broken_links(root),
        *unknown_places(root),
        *version_findings(root),
    ]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def folders_that_are_packages(root: Path) -> Iterator[str]:
    """Find folders that must not be packages, but can be imported as packages."""
    for name in NO_PACKAGE:
        path = root / name / "__init__.py"
        if path.exists():
            yield f"{path.relative_to(root)}: {name}/ must not be a package"


def package_findings(root: Path) -> Iterator[str]:
    """Find packages that are too many levels below their top-level folder."""
    for room in PACKAGES.values():
        for init in sorted((root / room).rglob("__init__.py")):
            depth = len(init.parent.relative_to(root / room).parts)
            if depth > MAX_DEPTH:
                name = init.parent.relative_to(root).as_posix()
                yield f"{name}: {depth} packages below {room}, at most {MAX_DEPTH}"


def source_findings(root: Path) -> Iterator[str]:
    """Check lengths of functions and test files, and module docstrings; skip generated stubs."""
    for folder in (*PACKAGES.values(), "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(f"{GENERATED}/"):
                yield from _file_findings(name, path.read_text(encoding="utf-8"))


def _file_findings(name: str, source: str) -> Iterator[str]:
    num_lines = len(source.splitlines())
    if name.startswith("tests/") and num_lines > MAX_TEST_FILE_LINES:
        yield f"{name}: {num_lines} lines, at most {MAX_TEST_FILE_LINES}"
    tree = ast.parse(source, filename=name)
    if ast.get_docstring(tree) is None:
        yield f"{name}: no module docstring; say the file's one job"
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (lines := function_lines(node)) > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            )


def function_lines(function: _Function) -> int:
    """Count the lines of a function's code, without inner functions, signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    inner = [node for node in body if isinstance(node, _Function)]
    return _num_lines(body[0], body[-1]) - sum(_num_lines(node, node) for node in inner)


def _num_lines(first: ast.stmt, last: ast.stmt) -> int:
    return (last.end_lineno or last.lineno) - first.lineno + 1


def names_owned_by_others() -> Iterator[str]:
    """Find installed distributions that have a package with the name of one of Baton's."""
    owners = packages_distributions()
    for name in PACKAGES:
        for owner in sorted(set(owners.get(name, [])) - {DISTRIBUTION}):
            yield f"{name}: the installed distribution {owner} has a package of this name too"


def broken_links(root: Path) -> Iterator[str]:
    """Find relative links in documents whose file does not exist."""
    for path in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))):
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        for target in _LINK.findall(text):
            relative = target.partition("#")[0]
            if not relative or ":" in relative:  # an anchor on the same page, or a URL
                continue
            if not (path.parent / relative).exists():
                yield f"{path.relative_to(root)}: the link to {target} leads nowhere"


def unknown_places(root: Path) -> Iterator[str]:
    """Find paths and modules that a page names in backticks, but that do not exist.

    Pages with dates (decisions, log, changes) may name what existed then. Names with one dot are
    skipped, because they may be an attribute of an object (`engine.step`).
    """
    for path in (*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))):
        if path.name in DATED:
            continue
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        for name in _PATH.findall(text):
            is_ours = name.partition("/")[0] in (*PACKAGES, *NO_PACKAGE, "tools")
            if is_ours and not (root / name).exists():
                yield f"{path.relative_to(root)}: {name} is not there"
        for name in _MODULE.findall(text):
            room, *parts = name.split(".")
            if room in PACKAGES and not _is_defined(root / PACKAGES[room], parts):
                yield f"{path.relative_to(root)}: {name} is not there"


def _is_defined(place: Path, parts: Sequence[str]) -> bool:
    """Return whether the dotted name is a module, or a name in the text of a module."""
    for part in parts:
        if place.name == "v1":  # a protobuf package, whose names are not Python files
            return True
        if not place.is_dir():
            text = place.read_text(encoding="utf-8") if place.exists() else ""
            return re.search(rf"\b{part}\b", text) is not None
        place = place / part if (place / part).is_dir() else place / f"{part}.py"
    return place.exists()


def version_findings(root: Path) -> Iterator[str]:
    """Compare the changelog's newest version with the version in the code."""
    code = _VERSION.search((root / "baton" / "version.py").read_text(encoding="utf-8"))
    changelog = root / "CHANGELOG.md"
    newest = (
        _CHANGELOG_VERSION.search(changelog.read_text(encoding="utf-8"))
        if changelog.exists()
        else None
    )
    says, is_at = (match[1] if match else "none" for match in (newest, code))
    if says != is_at:
        yield f"CHANGELOG.md: newest version is {says}, baton/version.py has {is_at}"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
