"""The pages' tables have every package and decision, and none that is gone; sizes are measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import check_layout, house

ROOT = Path(__file__).parents[3]
CODE = '"""Ground: says `a | b`.\n\nMore."""\n\n\ndef f(a, b, *, c):\n    """Do."""\n    return a\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A house of two packages, with pages that are written."""
    monkeypatch.setattr(house, "PACKAGES", {"baton": "baton"})
    monkeypatch.setattr(house, "DAY", (house.Chapter("First", "Of all.", ("Reader",)),))
    monkeypatch.setattr(house, "BESIDE", ())
    house._tree.cache_clear()
    (tmp_path / "baton" / "v1").mkdir(parents=True)
    (tmp_path / "baton" / "cli").mkdir()
    (tmp_path / "baton" / "v1" / "a_pb2.py").write_text("generated = 1\n")
    (tmp_path / "baton" / "__init__.py").write_text(CODE)
    (tmp_path / "baton" / "cli" / "__init__.py").write_text('"""Commands."""\n')
    (tmp_path / "baton" / "cli" / "r.py").write_text('"""Reads."""\n\nclass Reader:\n    x = 1\n')
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / "docs" / "adr" / "0001-a.md").write_text("# 0001: First\n")
    for page in house.PAGES:
        (tmp_path / page).write_text(f"# Title\n\n{house.BEGIN}{house.END}\n\nThe rest.\n")
    house.write(tmp_path)
    return tmp_path


def test_what_was_written_is_true(root: Path) -> None:
    assert list(house.findings(root)) == []
    text = (root / house.MAP).read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\n\nThe rest.\n")
    assert "| `baton` | Ground: says `a \\| b`. | 1 | 8 |" in text
    assert "| `baton/cli` | Commands. | 2 | 5 |" in text
    assert "v1" not in text.partition("Together")[0]
    assert "[0001: First](0001-a.md)" in (root / house.DECISIONS).read_text()
    path = (root / house.DAY_PATH).read_text()
    assert "The first half has 1 files, 4 lines; the goal is 6,000 lines: it fits." in path
    assert "## 1. First\n\nOf all.\n" in path
    assert "| `baton/cli/r.py` | Reads. | 1 | 4 |" in path


def test_sizes(root: Path) -> None:
    ground, commands = house.packages(root)
    assert (ground.function_p90, ground.parameters_p90) == (1, 3)
    assert (commands.num_files, commands.num_lines, commands.function_p90) == (2, 5, 0)


@pytest.mark.parametrize(
    ("path", "text", "finding"),
    [
        ("baton/new/__init__.py", '"""New."""\n', "architecture.md: has no line for baton/new"),
        ("baton/cli/other.py", '"""Other."""\n', "architecture.md: the line for baton/cli is old"),
        ("baton/__init__.py", CODE + "x = 1\n" * 3, "architecture.md: the line for baton is old"),
        ("docs/adr/0002-b.md", "# 0002: B\n", "README.md: has no line for * [0002: B](0002-b.md)"),
    ],
)
def test_what_is_not_so_any_more_is_one_line(
    root: Path, path: str, text: str, finding: str
) -> None:
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text(text)
    house._tree.cache_clear()
    (found,) = house.findings(root)
    assert finding in found


def test_a_tenth_of_the_lines_may_change(root: Path) -> None:
    file = root / "baton" / "big.py"
    file.write_text('"""Big."""\n' + "x = 1\n" * 100)
    house._tree.cache_clear()
    house.write(root)
    file.write_text('"""Big."""\n' + "x = 1\n" * 105)
    assert list(house.findings(root)) == []


def test_many_files_beside_each_other_are_reported(root: Path) -> None:
    for number in range(check_layout.MANY_FILES - 1):  # beside r.py
        (root / "baton" / "cli" / f"r{number}.py").write_text('"""One."""\n')
    assert list(house.crowded(root)) == []
    (root / "baton" / "cli" / "more.py").write_text('"""One more."""\n')
    assert list(house.crowded(root)) == ["baton/cli has 15 files beside each other, more than 14"]


def test_files_that_the_day_imports_are_found(root: Path) -> None:
    (root / "baton" / "cli" / "other.py").write_text('"""Other."""\n')
    reader = root / "baton" / "cli" / "r.py"
    imports = "import ast\nfrom baton.cli.other import x\nfrom pathlib import Path\n"
    reader.write_text('"""Reads."""\n' + imports + "class Reader:\n    x = 1\n")
    house._tree.cache_clear()
    assert house.imported_by_day(root) == {root / "baton" / "cli" / "other.py"}


def test_a_page_without_the_place_is_left_as_it_is(root: Path) -> None:
    (root / house.MAP).write_text("no place here\n")
    with pytest.raises(ValueError, match="has no place"):
        house.write(root)
    assert (root / house.MAP).read_text() == "no place here\n"


def test_a_class_of_the_day_path_that_is_gone_is_named(root: Path) -> None:
    with pytest.raises(ValueError, match="Nobody of the day path is defined in 0 files"):
        list(house.day_path(root, house.Chapter("First", "Of all.", ("Nobody",))))


def test_no_file_of_the_day_path_is_in_two_chapters() -> None:
    chapters = (*house.DAY, *house.BESIDE)
    paths = [path for chapter in chapters for path, *_ in house.day_path(ROOT, chapter)]
    assert len(paths) == len(set(paths))


def test_every_package_and_decision_of_this_house_is_on_its_page() -> None:
    """Sizes are left to `make check`: they change every day."""
    text = (ROOT / house.MAP).read_text(encoding="utf-8")
    assert {row[0] for row in house._ROW.findall(text)} == set(house.package_names(ROOT))
    index = (ROOT / house.DECISIONS).read_text(encoding="utf-8")
    files = [file.name for file in (ROOT / "docs" / "adr").glob("[0-9]*.md")]
    assert [name for name in files if f"({name})" not in index] == []


def test_the_life_of_a_request_names_types_that_exist() -> None:
    """Find each station's types in the room that the page names."""
    page = (ROOT / "docs" / "life_of_a_request.md").read_text("utf-8")
    stations = re.findall(r"^\| \d+ \| `(\w+)` \| (.*?) \|", page, re.M)
    assert len(stations) >= 10
    for room, types in stations:
        for name in re.findall(r"`(\w+)`", types):
            assert house._file_of(ROOT, name, room).is_file()
