"""Random paged layouts for tests: permuted block tables over a poisoned, block-major cache.

Refuses to know: how backends and models compute.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.testing.attention import make_cache, make_metadata, make_tables
from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from models.base import ForwardContext

__all__ = ["make_cache", "make_context", "make_metadata", "make_tables"]


def make_context(
    positions: Tensor,
    metadata: AttentionMetadata,
    backend: AttentionBackend,
    cache: Tensor,
    after_layer: Callable[[int], None] | None = None,
) -> ForwardContext:
    """A step over one KV cache group with all layers in it; ``backend`` has planned it."""
    return ForwardContext(
        positions=positions,
        groups=((metadata, backend),),
        layer_groups=(0,) * cache.shape[1],
        layer_caches=cache.unbind(1),
        after_layer=after_layer,
    )
