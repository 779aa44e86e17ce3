"""ThoughtState: follows an output's tokens through the thought before its answer.

    opening     an opening mark may or must come first
    open        any tokens, until the closing mark comes or the budget is used up
    behind      fixed tokens between the closing mark and the answer
    gap         the answer begins, perhaps after a newline
    over        the answer, or no thought at all

Knows no grammar, no vocabulary and no request.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from enum import Enum

from baton.api.thinking import Thinking

NO_LIMIT = sys.maxsize


class Phase(Enum):
    """Phases of an output with a thought, in their order."""

    OPENING = 0
    OPEN = 1
    BEHIND = 2
    GAP = 3
    OVER = 4


class ThoughtState:
    """The position of one output in its thought.

    Args:
        thinking: parameters of the thought, with the marks filled in.
        guides_answer: whether a grammar constrains the answer. If so, tokens before the answer must
            have the right form; if not, only budget and `Thinking.must_open` constrain them.

    Attributes:
        phase: phase of the next token.
        num_tokens: number of tokens in the thought so far, including tokens that may begin the
            closing mark.
    """

    def __init__(self, thinking: Thinking, *, guides_answer: bool) -> None:
        assert thinking.close_token_ids, "the marks are not filled in"
        assert thinking.is_open or thinking.open_marks
        self.phase = Phase.OPEN if thinking.is_open else Phase.OPENING
        self.num_tokens = 0
        self._guides_answer = guides_answer
        self._thinking = thinking
        self._budget = NO_LIMIT if thinking.budget_tokens is None else thinking.budget_tokens
        self._place = 0  # number of accepted tokens of the current mark or fixed tokens
        self._chosen: tuple[tuple[int, ...], ...] = thinking.open_marks

    def copy(self) -> ThoughtState:
        """Return a copy that changes independently of this state."""
        return copy.copy(self)

    @property
    def must_begin(self) -> bool:
        """Return whether the thought has no token yet but must have one."""
        is_empty = self.phase is Phase.OPEN and not self.num_tokens
        return self._thinking.must_open and is_empty and self._budget > 0

    @property
    def num_free(self) -> int:
        """Number of following tokens that need no mask."""
        if self.must_begin:
            return 0
        left = max(self._budget - self.num_tokens, 0)
        if self._guides_answer:
            return min(left, 1) if self.phase is Phase.OPEN else 0
        match self.phase:
            case Phase.OPEN:
                return left
            case Phase.OPENING if self._thinking.must_open:
                return 0
            case Phase.OPENING:
                return min(map(len, self._chosen)) - self._place + left
            case _ if self._thinking.may_reopen:
                return min(map(len, self._thinking.open_marks)) - self._place + left
            case _:
                return NO_LIMIT

    @property
    def choices(self) -> Sequence[int]:
        """Tokens that may come next; empty: all tokens may."""
        thinking = self._thinking
        match self.phase:
            case Phase.OPENING:
                return [mark[self._place] for mark in self._chosen]
            case Phase.OPEN if self.num_tokens >= self._budget:
                return [self.closing_token_id]
            case Phase.BEHIND:
                return [thinking.behind_token_ids[self._place]]
            case Phase.GAP:
                return thinking.gap_token_ids
            case _:
                return []

    @property
    def closing_token_id(self) -> int:
        """The next token of the closing mark."""
        return self._thinking.close_token_ids[self._place]

    @property
    def may_answer(self) -> bool:
        """Return whether the answer may begin with the next token."""
        if self.phase is Phase.OPENING:
            return not (self._place or self._thinking.must_open)
        return self.phase in (Phase.GAP, Phase.OVER)

    def accept(self, token_id: int) -> bool:
        """Add a token to the output; return False if the token belongs to the answer."""
        match self.phase:
            case Phase.OPENING:
                return self._accept_opening(token_id)
            case Phase.OPEN:
                self._accept_thought(token_id)
            case Phase.BEHIND:
                self._place += 1
                if self._place == len(self._thinking.behind_token_ids):
                    self._begin(Phase.GAP)
            case Phase.GAP:
                self.phase = Phase.OVER
                return token_id in self._thinking.gap_token_ids
            case _ if self._guides_answer:
                return False
            case _ if self._thinking.may_reopen:
                marks = self._thinking.open_marks
                self._place = max(_matched(mark, self._place, token_id) for mark in marks)
                if self._place in map(len, marks):
                    self._begin(Phase.OPEN)
        return True

    def _accept_opening(self, token_id: int) -> bool:
        place = self._place
        going_on = tuple(mark for mark in self._chosen if mark[place] == token_id)
        if not going_on:
            self._begin(Phase.OVER)
            return False
        self._chosen, self._place = going_on, place + 1
        if any(len(mark) == self._place for mark in going_on):
            self._begin(Phase.OPEN)
        return True

    def _accept_thought(self, token_id: int) -> None:
        close = self._thinking.close_token_ids
        self.num_tokens += 1
        self._place = _matched(close, self._place, token_id)
        if self._place < len(close):
            return
        self.num_tokens -= len(close)
        if not self._guides_answer:
            self._begin(Phase.OVER)
        else:
            self._begin(Phase.BEHIND if self._thinking.behind_token_ids else Phase.GAP)

    def _begin(self, phase: Phase) -> None:
        self.phase, self._place = phase, 0


def _matched(mark: tuple[int, ...], num_matched: int, token_id: int) -> int:
    """Return how many first tokens of a mark the output ends with, after a new token.

    Args:
        num_matched: how many first tokens of the mark the output ended with before this token.
    """
    if num_matched < len(mark) and mark[num_matched] == token_id:
        return num_matched + 1
    tail = (*mark[:num_matched], token_id)
    for length in range(min(len(mark), num_matched), 0, -1):
        if tail[-length:] == mark[:length]:
            return length
    return 0
