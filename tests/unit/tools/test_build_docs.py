"""Pages of the site: what leads out of docs/ leads to copies, and dead links are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import build_docs


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_docs, "ROOT", tmp_path)
    monkeypatch.setattr(build_docs, "BUILD", tmp_path / "build" / "docs")
    monkeypatch.setattr(build_docs, "PAGES", tmp_path / "build" / "docs" / "pages")
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "zensical.toml").write_text("[project]\n")
    (tmp_path / "mermaid.js").write_text("draws\n")
    (tmp_path / "results" / "a.json").write_text("{}\n")
    for name in (*build_docs.ROOT_PAGES, "docs/adr/README.md"):
        (tmp_path / name).write_text("# Page\n")
    return tmp_path


def staged(root: Path, text: str, name: str = "docs/a.md") -> str:
    (root / name).write_text(text)
    build_docs.stage(root / "mermaid.js")
    return (build_docs.PAGES / build_docs.place_of(root / name)).read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [a](../results/a.json)", "see [a](repository/results/a.json)"),
        ("see [all](../results)", "see all"),
        ("see [why](adr)", "see [why](adr/README.md)"),
        ("see [us](../SECURITY.md#who)", "see [us](SECURITY.md#who)"),
        ("see [here](#place) [w](https://e.org/x)", "see [here](#place) [w](https://e.org/x)"),
        ("```\n[a](../gone)\n```", "```\n[a](../gone)\n```"),
        ("words:\n* one\n* two\n", "words:\n\n* one\n* two\n"),
        ("* one\n  more\n* two\n", "* one\n  more\n* two\n"),
    ],
)
def test_a_document_as_a_page(root: Path, text: str, expected: str) -> None:
    assert staged(root, text) == expected


def test_what_is_linked_is_copied(root: Path) -> None:
    staged(root, "[a](../../results/a.json)", "docs/adr/0001-a.md")
    page = (build_docs.PAGES / "adr" / "0001-a.md").read_text()
    assert page == "[a](../repository/results/a.json)"
    assert (build_docs.PAGES / "adr" / page[4:-1]).resolve().read_text() == "{}\n"
    assert (build_docs.PAGES / "assets" / "mermaid.min.js").read_text() == "draws\n"


@pytest.mark.parametrize(
    ("html", "finding"),
    [
        ('<script src="https://unpkg.com/x.js">', "a.html: loads <script"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "a.html: loads <link"),
    ],
)
def test_a_page_that_loads_something_from_elsewhere(
    tmp_path: Path, html: str, finding: str
) -> None:
    (tmp_path / "a.html").write_text(f'<a href="https://e.org">fine</a>{html}')
    (found,) = build_docs.foreign_loads(tmp_path)
    assert finding in found


def test_links_within_the_site(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="#top"><a href="b.html#b"><a href="b.html#c"><a href="c.html">'
    )
    (tmp_path / "b.html").write_text('<h1 id="b">B</h1><a href="mailto:a@b">')
    assert list(build_docs.dead_links(tmp_path)) == [
        "a.html: there is no place b.html#c",
        "a.html: the link to c.html leads nowhere",
    ]
