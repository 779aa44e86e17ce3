"""Lists the source files that name a model family: ``python -m tools.families NAME...``.

Only a family's own file and the registry may name the family. Any other file whose code names it
makes the exit code 1. Comments and docstrings may name families as examples. Two tables may also
contain a family's name, because their entries have such names: formats of tool calls, and splitters
of text before tokenization.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from baton.checkpoint.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "baton", "decode_node", "encode_node", "engine", "kernels", "kvconnector", "models",
    "node_runtime", "prefill_node", "router", "sim_node",
)  # fmt: skip
REGISTRY = "baton/checkpoint/families.py"
OTHER_TABLES = ("router/intake/parsers/families.py", "baton/checkpoint/gguf/pre_tokenizers.py")
TESTS = "tests"


def main(names: list[str]) -> int:
    """Print the files that name each family; return 1 if an unexpected file names one."""
    if not names or not set(names) <= set(FAMILIES):
        print(f"known families: {', '.join(FAMILIES)}")
        return 2
    source, tests = words_by_file(ROOMS), words_by_file((TESTS,))
    is_spread = False
    for name in names:
        expected = (f"models/families/{name}.py", REGISTRY)
        found = files_naming(name, source)
        others = [path for path in found if path not in (*expected, *OTHER_TABLES)]
        groups = {
            "in another table": [path for path in found if path in OTHER_TABLES],
            "ALSO IN": others,
            "tests": files_naming(name, tests),
        }
        print(f"{name}: {', '.join(path for path in found if path in expected)}")
        for title, paths in groups.items():
            if paths:
                print(f"  {title}: {', '.join(paths)}")
        is_spread = is_spread or bool(others)
    return int(is_spread)


def files_naming(name: str, source: Mapping[str, set[str]]) -> list[str]:
    """Return the files whose code contains the name of a family."""
    pattern = re.compile(name.replace("_", "[-_]?"), re.IGNORECASE)
    return [path for path, found in source.items() if any(map(pattern.search, found))]


def words_by_file(folders: tuple[str, ...], root: Path = ROOT) -> dict[str, set[str]]:
    """Return, for each Python file in these folders, the words in its code."""
    return {
        str(path.relative_to(root)): set(words(path.read_text(encoding="utf-8")))
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    }


def words(source: str) -> Iterator[str]:
    """Yield the names and strings of code, without docstrings."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in prose:
                yield node.value
            continue
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
