"""Report: writes the figures of a part of the GPU suite to a file, one by one.

If the part is stopped or crashes the device, the file has all earlier figures. The module imports
only torch and its requirements.
"""

from __future__ import annotations

import json
from pathlib import Path


class CannotRunError(Exception):
    """A part cannot run on this machine; the message says what the part needs."""


class Report:
    """Figures by name, in the order in which they were added; written to the file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, object] = {}

    def __setitem__(self, name: str, figure: object) -> None:
        self.figures[name] = round(figure, 4) if isinstance(figure, float) else figure
        # If the process is killed now, the previous file stays complete
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(self.figures), encoding="utf-8")
        whole.replace(self._path)
        print(f"{name}: {self.figures[name]}", flush=True)
