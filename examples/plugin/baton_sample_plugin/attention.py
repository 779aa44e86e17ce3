"""An attention backend: Baton's reference backend under another name."""

from __future__ import annotations

from baton_kernels.attention.reference import ReferenceAttention


class SampleAttention(ReferenceAttention):
    """Computes attention as `ReferenceAttention` does."""
