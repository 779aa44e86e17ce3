"""What a part of the GPU suite has found so far, kept in a file from the first figure on.

A part that is stopped or that crashes the device leaves what it had found. Imports nothing that a
bare machine with torch might lack.
"""

from __future__ import annotations

import json
from pathlib import Path


class Report:
    """Figures by name, in order of arrival; each is written to the file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, object] = {}

    def __setitem__(self, name: str, figure: object) -> None:
        self.figures[name] = round(figure, 4) if isinstance(figure, float) else figure
        whole = self._path.with_suffix(".part")  # whoever is killed now leaves the last whole one
        whole.write_text(json.dumps(self.figures), encoding="utf-8")
        whole.replace(self._path)
        print(f"{name}: {self.figures[name]}", flush=True)
