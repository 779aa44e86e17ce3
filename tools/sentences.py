"""Finds sentences that a stranger probably has to read twice; `make check` runs this.

The docstring of a public function must begin with a verb in the imperative. The docstring of a
class or property, and the line of an attribute, must begin with a verb or a noun. Sentences that
match `OPENERS` or `TURNS` are refused. `OLD` has the number of refused sentences that each folder
may still contain.

    python -m tools.sentences [ROOM ...]     lists the sentences of rooms, old ones included
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Beginnings that leave the reader without a subject, or without a noun.
OPENERS = re.compile(
    r"(of|the same|it|its|that|those|these|this|they|their|there|what|who|whoever|whichever|as|so"
    r"|by what|such|neither|nor|else|otherwise|where (there|it)|in the order)\b",
    re.IGNORECASE,
)
# Expressions that are not good English, each with advice.
TURNS = (
    (re.compile(r"\bguess(es|ed)?\b", re.I), "say draft"),
    (re.compile(r"\bof (which|whom|whose)\b.*\bof (which|whom|whose)\b", re.I), "two 'of which'"),
    (re.compile(r"\b(are|is|was|were) (\w+ ){0,2}there (that|which|who)\b", re.I), "there is ..."),
    (re.compile(r"\bthat there (are|is) not\b", re.I), "say missing or absent"),
    (re.compile(r"\b(so|as) (much|many|long) of it\b", re.I), "name the thing"),
    (re.compile(r"\bor not at all\b|\bthat many\b|\bas it were\b", re.I), "say it plainly"),
)
# Words with which no imperative begins: articles, pronouns, prepositions, adverbs, numbers.
_NO_VERB = re.compile(
    r"(the|an?|all|any|some|one|two|no|each|every\w*|nothing|whether|where|when|how|why|for|from"
    r"|with|without|in|on|at|also|not|only|most|least|numbers? of|rows|times|messages|peers|returns"
    r"|raises|takes|gives|sends|makes|reads|writes|yields|sets)\b",
    re.IGNORECASE,
)
_ATTRIBUTE = re.compile(r"^\s+[\w, ]+: (.+)$")
# Number of refused sentences that each folder may still contain.
OLD = {
    "baton": 0,
    "benchmarks": 0,
    "decode_node": 0,
    "encode_node": 0,
    "engine": 0,
    "examples": 0,
    "kernels": 0,
    "kvconnector": 0,
    "loadtest": 0,
    "models": 0,
    "node_runtime": 0,
    "prefill_node": 0,
    "router": 0,
    "sim_node": 0,
    "tests": 0,
    "tools": 0,
}
_SKIPPED = ("baton/v1/", "tests/clients/")

_Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def main(root: Path, rooms: Sequence[str] = ()) -> int:
    """Print refused sentences of folders that have more than `OLD` allows; return exit code."""
    failed = False
    for room in rooms or sorted(OLD):
        found = list(room_findings(root, room))
        if rooms or len(found) > OLD[room]:
            print(*found, sep="\n")
            print(f"{room}: {len(found)} sentences, of which {OLD.get(room, 0)} may stay")
        failed |= len(found) > OLD.get(room, 0)
    return int(failed)


def room_findings(root: Path, room: str) -> Iterator[str]:
    """Yield a line for each refused sentence in a folder's Python files."""
    for path in sorted((root / room).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_SKIPPED):
            for line, problem in file_findings(path.read_text(encoding="utf-8"), room != "tests"):
                yield f"{name}:{line}: {problem}"


def file_findings(source: str, is_public: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line number and the problem of each refused sentence of a file.

    Args:
        is_public: whether functions without an underscore count as public; false for tests.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
            yield from _docstring_findings(node, text, is_public)
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("# "):
            yield from ((number, problem) for problem in _turns(line))


def _docstring_findings(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str, is_public: bool
) -> Iterator[tuple[int, str]]:
    number = node.body[0].lineno
    first, *rest = text.splitlines()
    is_act = not isinstance(node, ast.ClassDef) and not any(map(_is_value, node.decorator_list))
    if OPENERS.match(first):
        yield number, f"begin with a verb or a noun: {first}"
    elif is_act and is_public and not node.name.startswith("_") and _NO_VERB.match(first):
        yield number, f"begin with a verb: {first}"
    yield from ((number, problem) for problem in _turns(first))
    for index, line in enumerate(rest, 1):
        found = _ATTRIBUTE.match(line)
        if found is not None and re.match(r"(of|the same|else|otherwise)\b", found[1]):
            yield number + index, f"begin with a noun: {line.strip()}"
        yield from ((number + index, problem) for problem in _turns(line))


def _is_value(decorator: ast.expr) -> bool:
    """Return whether a decorator makes a function a property, which a noun may describe."""
    name = getattr(decorator, "attr", getattr(decorator, "id", ""))
    return name in ("property", "cached_property", "fixture")


def _turns(text: str) -> Iterator[str]:
    return (f"{hint}: {text.strip()}" for turn, hint in TURNS if turn.search(text))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], sys.argv[1:]))
