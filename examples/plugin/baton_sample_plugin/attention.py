"""An attention backend: the reference under another name. A real one computes faster."""

from __future__ import annotations

from baton_kernels.attention.reference import ReferenceAttention


class SampleAttention(ReferenceAttention):
    """Computes as `ReferenceAttention` does."""
