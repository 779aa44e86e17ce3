"""Tests that the layout check finds each kind of problem, and none in a correct tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_layout

pytestmark = pytest.mark.medium


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The smallest tree without findings."""
    (tmp_path / "baton" / "v1").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "baton" / "version.py").write_text('"""Version."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## [1.2.3] - unreleased\n")
    (tmp_path / "docs" / "a.md").write_text(
        "[c](../CHANGELOG.md#x) [w](https://e.org/no) [h](#h) `baton/v1/` `baton/version.py` "
        "`baton.version.__version__` `baton.v1.Admin` `engine.step`"
    )
    return tmp_path


def findings(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = check_layout.main(root)
    lines = capsys.readouterr().out.splitlines()
    assert code == (1 if lines else 0)
    return lines


def test_nothing_to_find(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "baton" / "v1" / "stub_pb2.py").write_text("x = 1\n" * 500)
    assert findings(root, capsys) == []


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("kernels/__init__.py", "", "kernels/ must not be a package"),
        ("tests/test_long.py", '"""Long."""\n' + "x = 1\n" * 500, "501 lines"),
        ("models/a/b/c/__init__.py", '"""Deep."""', "models/a/b/c: 3 packages below models"),
        ("tests/test_silent.py", "x = 1\n", "no module docstring"),
        (
            "baton/__init__.py",
            '"""F."""\ndef f():\n' + "    x = 1\n" * 61,
            "baton/__init__.py:2: f has 61 lines",
        ),
        ("docs/b.md", "see [this](gone.md)\n", "gone.md leads nowhere"),
        ("docs/b.md", "`baton/gone.py`\n", "docs/b.md: baton/gone.py is not there"),
        ("docs/b.md", "`baton.version.gone`\n", "docs/b.md: baton.version.gone is not there"),
        ("CHANGELOG.md", "## [1.2.2] - today\n## [1.2.3] - before\n", "is 1.2.2"),
        ("CHANGELOG.md", "nothing\n", "is none"),
    ],
)
def test_each_finding_is_one_line(
    path: str, text: str, words: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    (line,) = findings(root, capsys)
    assert words in line


@pytest.mark.parametrize(
    "source",
    [
        '"""M."""\ndef f(\n' + "".join(f"    a{i},\n" for i in range(70)) + "):\n    return 1\n",
        '"""M."""\ndef f():\n    """D.\n' + "    d\n" * 70 + '    """\n',
        '"""M."""\ndef f():\n    def g():\n' + "        x = 1\n" * 50 + "    x = 1\n" * 20,
    ],
)
def test_what_does_not_count(source: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "baton" / "__init__.py").write_text(source)
    assert findings(root, capsys) == []


def test_a_name_that_another_distribution_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"engine": ["baton-serve", "someone-else"], "models": ["baton-serve"]}
    monkeypatch.setattr(check_layout, "packages_distributions", lambda: owners)
    (line,) = check_layout.names_owned_by_others()
    assert "engine" in line
    assert "someone-else" in line
