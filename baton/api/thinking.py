"""Thinking: the thought before an answer, and its limits in tokens.

The opening and closing mark of a thought are token ids, which code that has a tokenizer fills in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.api.errors import InvalidRequestError

MAX_BUDGET_TOKENS = 2**31 - 1
MAX_MARK_TOKENS = 32
MAX_MARKS = 8
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Settings of the thought before an answer; a wrong value raises InvalidRequestError.

    A ``structured_output`` begins after the closing mark; the thought itself is unconstrained.

    Attributes:
        budget_tokens: maximum number of tokens between opening and closing mark; after these the
            closing mark is forced. 0 closes a thought at once. None: no limit.
        close_token_ids: tokens of the closing mark. If empty, `engine.LLM` and the router fill in
            all fields but ``budget_tokens`` and ``must_open``, from the checkpoint's chat template
            and the prompt.
        open_marks: the possible opening marks, each a sequence of tokens.
        is_open: whether the prompt has already opened the thought.
        must_open: whether the output must begin with a thought, of at least one token unless the
            budget is 0; False: the model chooses.
        may_reopen: whether a later opening mark continues the thought, within the remaining
            budget.
        behind_token_ids: tokens forced after the closing mark if a ``structured_output`` follows.
        gap_token_ids: tokens of which at most one may come between the closing mark and the
            ``structured_output``.
    """

    budget_tokens: int | None = None
    close_token_ids: tuple[int, ...] = ()
    open_marks: tuple[tuple[int, ...], ...] = ()
    is_open: bool = False
    must_open: bool = False
    may_reopen: bool = False
    behind_token_ids: tuple[int, ...] = ()
    gap_token_ids: tuple[int, ...] = ()

    @property
    def closes_by_token(self) -> bool:
        """Return whether a single token closes the thought and no token is forced after it."""
        return len(self.close_token_ids) == 1 and not self.behind_token_ids

    def __post_init__(self) -> None:
        if self.budget_tokens is not None:
            check_budget("thinking.budget_tokens", self.budget_tokens)
        for field in ("close_token_ids", "behind_token_ids", "gap_token_ids"):
            object.__setattr__(self, field, _token_ids(field, getattr(self, field)))
        marks = tuple(_token_ids("open_marks", mark) for mark in self.open_marks)
        if len(marks) > MAX_MARKS or not all(marks):
            raise InvalidRequestError(
                "thinking.open_marks", f"must be at most {MAX_MARKS} marks of 1 token or more"
            )
        object.__setattr__(self, "open_marks", marks)


def check_budget(field: str, value: object) -> None:
    """Raise InvalidRequestError unless a value is a valid number of thought tokens."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_BUDGET_TOKENS:  # type: ignore[operator]  # a number
        raise InvalidRequestError(
            field, f"must be a whole number from 0 to {MAX_BUDGET_TOKENS}, got {value!r}"
        )


def _token_ids(field: str, value: Iterable[int]) -> tuple[int, ...]:
    token_ids = tuple(value)
    if len(token_ids) > MAX_MARK_TOKENS:
        raise InvalidRequestError(
            f"thinking.{field}", f"must have at most {MAX_MARK_TOKENS} tokens, got {len(token_ids)}"
        )
    for token_id in token_ids:
        if not isinstance(token_id, int) or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise InvalidRequestError(f"thinking.{field}", f"must be token ids, got {token_id!r}")
    return token_ids
