"""Outputs: the files that a command writes its result to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.page.page import load_figures, write_page, write_pictures
from loadtest.report.report import check_folder, check_writable, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The paths of the files to write; None: this file is not written."""

    json: Path | None = None
    save_requests: Path | None = None
    html: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Raise ConfigError before the run if a file cannot be written."""
        for name in ("json", "save_requests", "html"):
            path = getattr(self, name)
            if path is not None:
                check_writable(name, path)
        if self.png is not None:
            check_folder("png", self.png)
        if self.html is not None or self.png is not None:
            load_figures()

    def write(self, document: dict[str, Any]) -> None:
        """Write the document to all files except the one of requests; raises ConfigError."""
        if self.json is not None:
            write_json(self.json, document)
        if self.html is not None:
            write_page(self.html, document)
        if self.png is not None:
            write_pictures(self.png, document)
