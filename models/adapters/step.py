"""StepSpans: which tokens of the step that is being computed use which adapter.

Refuses to know: layers, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from baton.adapters.digest import AdapterDigest
from models.base import AdapterSpan

T = TypeVar("T")


class StepSpans:
    """The adapters of the current step; all layers share one object, which each step sets anew."""

    spans: tuple[AdapterSpan, ...] = ()

    def found(self, loaded: Mapping[AdapterDigest, T]) -> list[tuple[slice, T]]:
        """Return, for each adapter of this step that changes a layer, its tokens and matrices.

        Args:
            loaded: the matrices of the adapters that change the layer, by adapter digest.
        """
        return [
            (slice(span.first, span.end), part)
            for span in self.spans
            if (part := loaded.get(span.adapter)) is not None
        ]
