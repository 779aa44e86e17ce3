"""SamplingParams: how the next token of a request is chosen and when its output ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked when made; a value outside its limit raises InvalidRequestError naming the field.

    Attributes:
        max_tokens: most output tokens, at least 1.
        temperature: 0 is greedy; larger is more random.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        seed: the same seed gives the same tokens whatever the batch or the node; None draws one.
        stop_token_ids: end the output; the token itself is part of it.
        ignore_eos: go on after the model's end-of-sequence token.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InvalidRequestError("temperature", f"must be 0 or more, got {self.temperature!r}")
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequestError("top_p", f"must be in (0, 1], got {self.top_p!r}")
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable):
            raise InvalidRequestError(
                "stop_token_ids", f"must be a list of token ids, got {self.stop_token_ids!r}"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                "stop_token_ids",
                f"must have at most {MAX_STOP_TOKEN_IDS}, got {len(self.stop_token_ids)}",
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(field, f"must be a whole number, got {value!r}")
    if value < low:
        raise InvalidRequestError(field, f"must be {low} or more, got {value}")
    if value > high:
        raise InvalidRequestError(field, f"must be {high} or less, got {value}")
