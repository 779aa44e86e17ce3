"""The folder of the demo model, which the repository has."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"
