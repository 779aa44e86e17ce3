"""Checks of a tokenized prompt, the same at every edge: the router's and the offline engine's."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from baton.errors import InvalidRequestError


def check_prompt(
    token_ids: Sequence[int], *, vocab_size: int, max_model_len: int, field: str = "prompt"
) -> None:
    """Raise InvalidRequestError unless the prompt can be served.

    Args:
        vocab_size: token ids are below it.
        max_model_len: most tokens of prompt and output; the output needs at least one.
    """
    if not token_ids:
        raise InvalidRequestError(field, "must have at least 1 token, got 0")
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            field, f"must have at most {max_model_len - 1} tokens, got {len(token_ids)}"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            field, f"token ids must be 0 to {vocab_size - 1} (the vocabulary), got {wrong}"
        )


def draw_seed() -> int:
    """A seed for a request that came without one."""
    return secrets.randbits(63)
