"""StepSpans: which tokens of the step being computed have which adapter.

Refuses to know: layers, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from baton.adapters.digest import AdapterDigest
from models.base import AdapterSpan

T = TypeVar("T")


class StepSpans:
    """The adapters of one step; one object for all layers, set before each step."""

    spans: tuple[AdapterSpan, ...] = ()

    def found(self, loaded: Mapping[AdapterDigest, T]) -> list[tuple[slice, T]]:
        """Return, for each adapter that changes a layer, its tokens and its matrices.

        Args:
            loaded: the layer's matrices, by adapter.
        """
        return [
            (slice(span.first, span.end), part)
            for span in self.spans
            if (part := loaded.get(span.adapter)) is not None
        ]
