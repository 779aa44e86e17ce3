"""Decode steps on a CPU without Python between the ops: the layers' native calls are taped.

Refuses to know: what the layers compute, and which requests there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.dispatch import native_ops
from baton_kernels.native.ops import NativeOps
from baton_kernels.native.tape import Tape, TapeError
from models.base import AttentionStep, ForwardContext

Inputs = Sequence[Tensor]  # each [num_tokens, ...]
Layers = Callable[[Inputs, ForwardContext], Tensor]
# Of all tapes together: a row keeps what all layers compute of it.
MAX_ROWS_KEPT = 64
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Taped:
    """A tape, where its inputs are written to, and where its result is."""

    tape: Tape
    inputs: Inputs
    metadata: tuple[AttentionMetadata, ...]
    result: Tensor  # [num_tokens, hidden_size]


class DecodeTapes:
    """Tapes by the shape of a step. Used by one thread at a time.

    A shape is taped when it comes twice in a row: where batches change with every step, nothing
    is. The tapes used last are kept.

    Args:
        ops: which make the calls.
    """

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._tapes: dict[_Key, _Taped | None] = {}  # None: cannot be taped; used last is last
        self._last_key: _Key | None = None

    @torch.no_grad()
    def run(self, layers: Layers, inputs: Inputs, context: ForwardContext) -> Tensor:
        """Compute ``layers(inputs, context)``, by a tape if there is one or can be."""
        key = _key(inputs, context) if native_ops() is self._ops else None
        repeated, self._last_key = key == self._last_key, key
        if key is None or not (repeated or key in self._tapes):
            return layers(inputs, context)
        if key not in self._tapes:
            # What is recorded is also computed, and then once more: the same into the same places.
            self._tapes[key] = self._record(layers, inputs, context)
            self._forget()
        taped = self._tapes[key] = self._tapes.pop(key)
        if taped is None:
            return layers(inputs, context)
        for place, tensor in zip(taped.inputs, inputs, strict=True):
            place.copy_(tensor)
        for static, (metadata, _) in zip(taped.metadata, _attention(context), strict=True):
            _copy_metadata(static, metadata)
        taped.tape.run()
        return taped.result.clone()

    def _record(self, layers: Layers, inputs: Inputs, context: ForwardContext) -> _Taped | None:
        with torch.inference_mode(mode=False):
            places = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
            statics = tuple(_static(metadata) for metadata, _ in _attention(context))
        groups = tuple(
            (static, backend)
            for static, (_, backend) in zip(statics, _attention(context), strict=True)
        )
        try:
            _plan(groups)
            tape, result = self._ops.record(lambda: layers(places, replace(context, groups=groups)))
        except TapeError:
            _plan(_attention(context))
            return None
        return _Taped(tape, places, statics, result)

    def _forget(self) -> None:
        """Delete the least recently used tapes, until few rows are kept."""
        rows = {key: len(taped.result) for key, taped in self._tapes.items() if taped}
        for key in list(rows)[:-1]:
            if sum(rows.values()) <= MAX_ROWS_KEPT:
                break
            del self._tapes[key], rows[key]


def _key(inputs: Inputs, context: ForwardContext) -> _Key | None:
    """Return what a tape depends on besides its inputs' values; None: not a decode step alone."""
    num_tokens = len(inputs[0])
    groups = context.attention_groups
    if groups is None:  # nothing of a state is taped yet
        return None
    first = groups[0][0]
    if not (first.max_query_len == 1 and first.num_requests == first.num_tokens == num_tokens):
        return None
    if context.after_layer is not None or num_tokens > MAX_ROWS_KEPT:
        return None
    widths = tuple(_width(metadata) for metadata, _ in groups)
    caches = tuple(c.data_ptr() for c in context.layer_caches if isinstance(c, Tensor))
    return (num_tokens, inputs[0].dtype, torch.get_num_threads(), widths, caches)


def _attention(context: ForwardContext) -> tuple[AttentionStep, ...]:
    groups = context.attention_groups
    assert groups is not None, "steps with states have no key"
    return groups


def _plan(groups: tuple[AttentionStep, ...]) -> None:
    for metadata, backend in groups:
        backend.plan(metadata)


def _width(metadata: AttentionMetadata) -> int:
    """Round the columns of a block table up, so that its tape lasts for a while."""
    return int(max(16, 1 << (metadata.block_table.shape[1] - 1).bit_length()))


def _static(metadata: AttentionMetadata) -> AttentionMetadata:
    """Copy the metadata to memory of its own, with room for longer requests."""
    num_requests = metadata.num_requests
    static = replace(
        metadata,
        query_start_loc=metadata.query_start_loc.clone(),
        seq_lens=metadata.seq_lens.clone(),
        block_table=metadata.block_table.new_zeros(num_requests, _width(metadata)),
        slot_mapping=metadata.slot_mapping.clone(),
    )
    _copy_metadata(static, metadata)
    return static


def _copy_metadata(to: AttentionMetadata, metadata: AttentionMetadata) -> None:
    """Copy what changes between two decode steps of as many requests."""
    to.seq_lens.copy_(metadata.seq_lens)
    to.slot_mapping.copy_(metadata.slot_mapping)
    to.block_table[:, : metadata.block_table.shape[1]].copy_(metadata.block_table)
