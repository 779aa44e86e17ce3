"""The table of supported architectures: name in config.json -> family.

A family's file is imported when it is needed. Refuses to know: torch, the content of families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.checkpoint.families import ARCHITECTURES
from baton.registry import Registry

if TYPE_CHECKING:
    from models.family import Family, TextPart

MODELS: Registry[Family | TextPart] = Registry(
    "model architecture", ARCHITECTURES, plugin_group="baton.architectures"
)
