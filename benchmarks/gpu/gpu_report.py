"""Report: figures of a part of the GPU suite, written to a file one by one.

The file keeps the figures of a part that is stopped or crashes the device. Imports only packages
that a machine with nothing but torch has.
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
        whole = self._path.with_suffix(".part")  # a kill leaves the previous file complete
        whole.write_text(json.dumps(self.figures), encoding="utf-8")
        whole.replace(self._path)
        print(f"{name}: {self.figures[name]}", flush=True)
