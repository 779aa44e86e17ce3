"""Tests of the layout: no package shadows another, and every file states its job."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages of these names would shadow PyPI's (`kernels`, `proto`) or each other's.
NO_PACKAGE = ["kernels", "proto", "tests", "benchmarks", "deploy", "docs", "examples"]
PACKAGES = [
    "baton", "router", "prefill_node", "decode_node", "encode_node", "node_runtime", "engine",
    "kvconnector", "models",
    "kernels/baton_kernels",
]  # fmt: skip


def source_files() -> list[Path]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in found if path.parent != ROOT / "baton" / "v1"]  # generated


@pytest.mark.parametrize("name", NO_PACKAGE)
def test_a_project_folder_is_not_a_package(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()


def test_no_test_folder_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.medium
def test_transformers_can_be_imported_from_the_root_of_the_repository() -> None:
    """Where modules are looked for, tests have the root before whatever is installed."""
    installed = next(place for place in sys.path if place.endswith("site-packages"))
    assert sys.path.index(str(ROOT)) < sys.path.index(installed)
    assert importlib.import_module("transformers.models.qwen3.modeling_qwen3").Qwen3ForCausalLM


def test_every_package_says_that_it_is_typed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [name for name in packages if not (ROOT / name / "py.typed").exists()] == []


@pytest.mark.medium
@pytest.mark.parametrize("missing", ["numpy", "torch"])
def test_without_the_extra_the_engine_says_which_one_it_needs(missing: str) -> None:
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "try: from baton import LLM\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"{missing} is not installed; the engine needs: pip install 'baton-serve[node]'\n"
    )


def test_every_package_has_files() -> None:
    for package in PACKAGES:
        assert any(ROOT / package in path.parents for path in source_files()), package


def test_every_file_begins_with_one_line_that_says_its_job() -> None:
    silent = []
    for path in source_files():
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        if not re.match(r'""".{10,}', first_line):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_no_object_that_may_be_false_is_replaced_by_a_default() -> None:
    """With ``inbox or Inbox()``, an empty inbox that the caller made would be thrown away."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in source_files()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    may_be_false = {
        node.name
        for _, node in nodes
        if isinstance(node, ast.ClassDef)
        and any(getattr(item, "name", "") in ("__bool__", "__len__") for item in node.body)
    }
    assert "Inbox" in may_be_false
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in nodes
        if isinstance(node, ast.BoolOp)
        and isinstance(node.op, ast.Or)
        and any(
            isinstance(value, ast.Call) and ast.unparse(value.func) in may_be_false
            for value in node.values[1:]
        )
    ]
    assert found == []


def test_structs_are_decoded_by_decoders_made_at_import() -> None:
    """Two threads that decode a struct for the first time at once crash msgspec 0.22.

    The router prepares each ``kind`` of request before it serves.
    """
    call = re.compile(
        r"msgspec\.(?:msgpack|json)\.decode\((?:[^()]|\([^()]*\))*\btype=(?!list|tuple|dict|kind)"
    )
    found = [path for path in source_files() if call.search(path.read_text(encoding="utf-8"))]
    assert found == []
