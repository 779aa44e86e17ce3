"""DecodeTapes: records the native calls of CPU decode steps, and replays them without Python.

Refuses to know: what the layers compute, requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.adapters.digest import AdapterDigest
from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.native.ops import NativeOps
from baton_kernels.native.tape import Tape, TapeError
from baton_kernels.state_metadata import StateMetadata
from models.base import AdapterSpan, ForwardContext, GroupStep, LayerCache

Inputs = Sequence[Tensor]  # each [num_tokens, ...]; hidden states, cosines, sines
Results = tuple[Tensor, ...]  # each [num_tokens, ...]
Layers = Callable[[Inputs, ForwardContext], Results]
# Maximum number of rows (tokens) of all tapes together: a tape holds the memory of all layers'
# results, for each of its rows.
MAX_ROWS_KEPT = 64
FEW_ROWS, _SOON = 6, 8
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Taped:
    """A tape, with the tensors that its calls read and write."""

    tape: Tape
    inputs: Inputs
    metadata: tuple[AttentionMetadata | StateMetadata, ...]
    results: Results

    @property
    def has_states(self) -> bool:
        """Return whether the step has recurrent states, which recording leaves unchanged."""
        return any(isinstance(metadata, StateMetadata) for metadata in self.metadata)

    def copy_results(self) -> Results:
        """Return copies of the latest results, which the next replay will overwrite."""
        return tuple(result.clone() for result in self.results)


class DecodeTapes:
    """Tapes of decode steps, by the shape of a step. Used by one thread at a time.

    A step is recorded when its shape occurs in two successive steps, so that no time is spent on
    batches whose shape changes with every step. A step of few rows is also recorded if its shape
    occurred a few steps ago, because drafters alternate between few sizes. The most recently used
    tapes are kept.

    Args:
        ops: native ops, whose calls are recorded.
        num_batches: number of batches that take turns (`StepsInFlight.num_stages`). A shape that
            occurs again within this many steps counts as occurring in successive steps.

    Attributes:
        num_batches: the argument, unchanged.
    """

    def __init__(self, ops: NativeOps, num_batches: int = 1) -> None:
        self._ops = ops
        self.num_batches = num_batches
        # least recently used first; None: steps of this shape cannot be recorded
        self._tapes: dict[_Key, _Taped | None] = {}
        self._latest: deque[_Key | None] = deque(maxlen=_SOON)
        # The layers' caches in the latest step, and the caches' addresses.
        self._caches: tuple[tuple[LayerCache, ...], _Key] = ((), ())

    @torch.no_grad()
    def run(
        self, layers: Layers, inputs: Inputs, context: ForwardContext, *, comes_again: bool = False
    ) -> Results:
        """Compute ``layers(inputs, context)``, by replaying a tape if there is one.

        Args:
            comes_again: whether steps of this shape will recur, so that this step is recorded.
        """
        key = self._key(inputs, context)
        if key is None or key not in self._tapes:
            few = len(inputs[0]) <= FEW_ROWS
            repeated = key in (self._latest if few else list(self._latest)[-self.num_batches :])
            self._latest.append(key)
            if key is None or not (repeated or comes_again):
                return layers(inputs, context)
            recorded = self._tapes[key] = self._record(layers, inputs, context)
            self._forget()
            if recorded is not None and not recorded.has_states:
                return recorded.copy_results()  # the step was computed while it was recorded
        taped = self._tapes[key] = self._tapes.pop(key)
        if taped is None:
            return layers(inputs, context)
        for place, tensor in zip(taped.inputs, inputs, strict=True):
            place.copy_(tensor)
        for static, (metadata, _) in zip(taped.metadata, context.groups, strict=True):
            _copy_metadata(static, metadata)
        taped.tape.run()
        return taped.copy_results()

    def _key(self, inputs: Inputs, context: ForwardContext) -> _Key | None:
        """Return the key of the step's tape: all that a tape depends on, except values.

        None: the step is not a plain decode step of one token per request.
        """
        num_tokens = len(inputs[0])
        first = context.groups[0][0]
        assert isinstance(first, AttentionMetadata)
        if not (first.max_query_len == 1 and first.num_requests == first.num_tokens == num_tokens):
            return None
        if context.after_layer is not None or num_tokens > MAX_ROWS_KEPT:
            return None
        widths = tuple(
            _width(metadata) if isinstance(metadata, AttentionMetadata) else metadata.num_segments
            for metadata, _ in context.groups
        )
        if context.layer_caches is not self._caches[0]:
            self._caches = (context.layer_caches, _addresses(context.layer_caches))
        threads, caches = torch.get_num_threads(), self._caches[1]
        return num_tokens, inputs[0].dtype, threads, widths, caches, context.adapters

    def _record(self, layers: Layers, inputs: Inputs, context: ForwardContext) -> _Taped | None:
        with torch.inference_mode(mode=False):
            places = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
            groups = tuple(_static_group(group) for group in context.groups)
        try:
            _plan(groups)
            tape, results = self._ops.record(
                lambda: layers(places, replace(context, groups=groups))
            )
        except TapeError:
            _plan(context.groups)
            return None
        return _Taped(tape, places, tuple(metadata for metadata, _ in groups), results)

    def forget_adapter(self, digest: AdapterDigest) -> None:
        """Delete the tapes of steps that use an adapter, because these tapes hold its memory."""
        for key in list(self._tapes):
            spans: Sequence[AdapterSpan] = key[-1]
            if any(span.adapter == digest for span in spans):
                del self._tapes[key]

    def _forget(self) -> None:
        """Delete the least recently used tapes, until at most `MAX_ROWS_KEPT` rows are kept."""
        rows = {key: len(taped.results[0]) for key, taped in self._tapes.items() if taped}
        for key in list(rows)[:-1]:
            if sum(rows.values()) <= MAX_ROWS_KEPT:
                break
            del self._tapes[key], rows[key]


def _addresses(caches: tuple[LayerCache, ...]) -> _Key:
    """Return the addresses of the layers' caches; this takes as long as a small kernel."""
    return tuple(
        tensor.data_ptr()
        for cache in caches
        for tensor in ((cache,) if isinstance(cache, Tensor) else cache)
    )


def _plan(groups: tuple[GroupStep, ...]) -> None:
    for metadata, backend in groups:
        if backend is not None:
            assert isinstance(metadata, AttentionMetadata)
            backend.plan(metadata)


def _static_group(group: GroupStep) -> GroupStep:
    """Copy a group's metadata to memory that a tape keeps."""
    metadata, backend = group
    if isinstance(metadata, StateMetadata):
        return _static_states(metadata), None
    assert backend is not None
    return _static(metadata), backend


def _static_states(metadata: StateMetadata) -> StateMetadata:
    """Copy metadata with write slots of -1, so that computing with the copy changes no state.

    Recording computes the step once, and the tape's first run computes it again, but the states
    must advance only once.
    """
    return replace(
        metadata,
        segment_start_loc=metadata.segment_start_loc.clone(),
        read_slots=metadata.read_slots.clone(),
        write_slots=torch.full_like(metadata.write_slots, -1),
        request_start_loc=metadata.request_start_loc.clone(),
    )


def _width(metadata: AttentionMetadata) -> int:
    """Return the number of columns of a tape's block table, with room for longer requests."""
    return int(max(16, 1 << (metadata.block_table.shape[1] - 1).bit_length()))


def _static(metadata: AttentionMetadata) -> AttentionMetadata:
    """Copy metadata to memory that a tape keeps, with room for longer requests."""
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


def _copy_metadata(
    to: AttentionMetadata | StateMetadata, metadata: AttentionMetadata | StateMetadata
) -> None:
    """Copy the values that change from step to step into a tape's metadata."""
    if isinstance(metadata, StateMetadata):
        assert isinstance(to, StateMetadata)
        to.read_slots.copy_(metadata.read_slots)
        to.write_slots.copy_(metadata.write_slots)
        return
    assert isinstance(to, AttentionMetadata)
    to.seq_lens.copy_(metadata.seq_lens)
    to.slot_mapping.copy_(metadata.slot_mapping)
    to.block_table[:, : metadata.block_table.shape[1]].copy_(metadata.block_table)
