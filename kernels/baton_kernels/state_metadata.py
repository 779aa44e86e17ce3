"""StateMetadata: the input of one step for kernels that carry a state from token to token.

Convolutions over the last tokens and linear recurrences (Mamba2, gated delta net) keep one state
per sequence, not keys and values per token. States are in slots, which are the blocks of a
KV cache group: slot j of a sequence holds the state after the last computed token in block j.

    tokens of a request, blocks of 4    0 1 2 3 | 4 5 6 7 | 8 9
    computed before: 2 tokens           slot a
    this step computes 2 to 8           [ 2 3 ]   [4 5 6 7]  [8]       three segments
    read_slots                            a          a         b
    write_slots                           a          b         c

Refuses to know: schedulers, requests, models, and how any kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The tokens that one step computes, divided into segments at the places where states are kept.

    A segment is a run of tokens of one request within one block. Segments of a request are in
    order, and requests follow one another. A segment begins with the state in its read slot, and
    writes the state after its last token to its write slot, which may be its read slot. A segment
    may read the state that the previous segment wrote, so a request's segments are computed in
    order.

    If a step is padded to the size of a captured CUDA graph, tokens after the last segment and
    segments without tokens (read and write slot -1) are padding. ``num_segments`` and
    ``num_tokens`` then include padding, and ``segment_lens`` are those of the largest step of this
    size. Results of padding tokens are zeros.
    """

    num_segments: int
    num_tokens: int
    segment_start_loc: Tensor  # [num_segments + 1] int32, first token of each segment
    read_slots: Tensor  # [num_segments] int32, state to begin with; -1: all zeros
    # [num_segments] int32, slot for the new state; -1: none, as for padding.
    write_slots: Tensor
    request_start_loc: Tensor  # [num_requests + 1] int32, first segment of each request
    segment_lens: tuple[int, ...]  # number of tokens of each segment, on the host
