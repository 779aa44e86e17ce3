"""A real browser, headless: the page that it makes of a file, and what it complains about."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--enable-logging=stderr",
    "--window-size=1100,3000",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenedPage:
    """Attributes:
    dom: the document after loading, as HTML.
    complaints: lines of the browser's console.
    """

    dom: str
    complaints: list[str]


def open_page(path: Path, profile: Path) -> OpenedPage:
    """Open a file from the disk.

    Args:
        profile: an empty folder, for the browser alone.
    """
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return OpenedPage(done.stdout, complaints)
