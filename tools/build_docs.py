"""Builds the documentation site of docs/ into build/docs/site; `make docs` runs this.

Pages in docs/ link to other files of the repository. So the site also gets copies of the linked
files, and pages made from `ROOT_PAGES`, the documents beside README.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
PAGES = BUILD / "pages"
# Documents outside of docs/ that become pages of the site.
ROOT_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Folder of the site for copies of the repository's other files.
FILES = "repository"
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# GitHub accepts a list right after a line of text; Python's Markdown needs an empty line between
# text and list.
_ITEM_BEHIND_TEXT = re.compile(r"^(?![ \t#|]|(?:[*-]|\d+\.) )(.+)\n(?=(?:[*-]|1\.) )", re.MULTILINE)
# Elements that load files from other servers; pages must not contain such elements.
_FOREIGN = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]*"
)


def main(zensical: str, mermaid: str) -> int:
    """Stage the pages, build the site, and check it; return the exit code.

    Args:
        zensical: path of the program that builds the site.
        mermaid: path of the JavaScript library that draws diagrams, which the site serves itself.
    """
    stage(Path(mermaid))
    # The path is not resolved, because it may be a link into a virtual environment
    program = Path(zensical).absolute()
    done = subprocess.run([program, "build", "--clean", "--strict"], cwd=BUILD, check=False)
    if done.returncode:
        return done.returncode
    findings = [*foreign_loads(BUILD / "site"), *dead_links(BUILD / "site")]
    for finding in findings:
        print(finding)
    print(f"{len(list((BUILD / 'site').rglob('*.html')))} pages: {BUILD / 'site' / 'index.html'}")
    return 1 if findings else 0


def stage(mermaid: Path) -> None:
    """Copy the sources of the site to the folder in which it is built."""
    shutil.rmtree(BUILD, ignore_errors=True)
    (PAGES / "assets").mkdir(parents=True)
    shutil.copy(ROOT / "zensical.toml", BUILD)
    shutil.copy(mermaid, PAGES / "assets" / "mermaid.min.js")
    sources = [*sorted((ROOT / "docs").rglob("*")), *(ROOT / name for name in ROOT_PAGES)]
    for source in sources:
        target = PAGES / place_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(page(source), encoding="utf-8")
        elif source.is_file():
            shutil.copy(source, target)


def place_of(source: Path) -> str:
    """Return the path, in the site, of a file of the repository."""
    relative = source.relative_to(ROOT)
    if relative.parts[0] == "docs":
        return relative.relative_to("docs").as_posix()
    return relative.as_posix() if str(relative) in ROOT_PAGES else f"{FILES}/{relative.as_posix()}"


def page(source: Path) -> str:
    """Convert a document to a page: make its links lead into the site, and correct its lists."""

    def moved(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        linked = (source.parent / target).resolve()
        if linked.is_dir():
            if not (linked / "README.md").is_file() or "docs" not in linked.parts:
                return words[1:-1]
            linked /= "README.md"
        place = place_of(linked)
        if place.startswith(FILES):
            (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, PAGES / place)
        up = "../" * place_of(source).count("/")
        return f"{words}({up}{place}{anchor})"

    parts = _CODE.split(source.read_text(encoding="utf-8"))
    return "".join(
        part if index % 2 else _ITEM_BEHIND_TEXT.sub(r"\1\n\n", _LINK.sub(moved, part))
        for index, part in enumerate(parts)
    )


def foreign_loads(site: Path) -> Iterator[str]:
    """List the files that pages would fetch from other servers."""
    for path in sorted(site.rglob("*.html")):
        for found in _FOREIGN.findall(path.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in found:
                yield f"{path.relative_to(site)}: loads {found}"


def dead_links(site: Path) -> Iterator[str]:
    """List the links within the site whose file or anchor is missing."""
    anchors = {
        path: set(re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")))
        for path in site.rglob("*.html")
    }
    for path in sorted(anchors):
        for target in re.findall(r'<a\b[^>]*?href="([^"]+)"', path.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if ":" in target or path.name == "404.html":
                continue
            linked = (path.parent / name).resolve() if name else path
            if not linked.exists():
                yield f"{path.relative_to(site)}: the link to {target} leads nowhere"
            elif anchor and linked in anchors and anchor not in anchors[linked]:
                yield f"{path.relative_to(site)}: there is no place {target}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
