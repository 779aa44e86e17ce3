"""PooledRows: the tokens of a step whose hidden states are pooled."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.pooling import PoolingParams


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The tokens of one pooled request in a step.

    Attributes:
        row: the request's row of the input batch.
        first, end: range of these tokens in the step; ``end`` is exclusive.
        start: position of the first token in the prompt.
        is_last: whether the prompt ends with these tokens.
    """

    request_id: str
    params: PoolingParams
    row: int
    first: int
    end: int
    start: int
    is_last: bool
