"""Grammar: the tokens that a request's output may continue with, derived from the output alone.

A grammar may begin after a thought (reasoning text), whose tokens are unconstrained up to its
closing mark.

Refuses to know: requests, queues, tensors; `engine/sampling/grammar_compiler.py` makes the states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.api.sampling_params import SamplingParams
from baton.text.grammars import one_line
from baton.text.thoughts.state import NO_LIMIT, Phase, ThoughtState

_STUCK = "structured_output: no token is left that the grammar, the bans and the limits allow"

# Longest mean processor time of a grammar's masks, in seconds; a request with a slower grammar
# fails, because all requests share the processors. Masks take 0.01 to a few milliseconds, but some
# grammars slow down as the output grows. Time spent waiting for a busy processor does not count.
_MAX_MEAN_S = 0.005
# Processor time, in seconds, that a grammar may take beyond the mean, for work done once, such as
# the first masks.
_MAX_EXTRA_S = 0.2


class GrammarState:
    """One request's progress through its thought (reasoning text) and its grammar.

    Only one thread at a time may use a state: the engine's thread, or a thread that computes the
    state's mask.

    Args:
        matcher: the grammar library's matcher, at the grammar's beginning, which no other state
            uses; None: only a thought constrains the output.
        params: the request's sampling parameters, which have the banned tokens and the marks of the
            thought.
        vocab_size: number of logits; ids that the tokenizer lacks are never allowed.
        end_token_ids: tokens that end an output. In a thought before a grammar, an end token is
            replaced by the thought's closing mark.

    Attributes:
        problem: why no token can follow; empty while a token can follow.
        num_accepted: output tokens that the grammar has accepted.
        has_mask: whether the mask of the next token is computed, so that a token can be sampled.
        mask_s: processor time that the latest mask took; 0 before the first.
        thought: progress through the thought; None: there is no thought, so the grammar begins at
            once.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        params: SamplingParams,
        vocab_size: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.problem = ""
        self.num_accepted = 0
        self.has_mask = False
        self.mask_s = 0.0
        self.thought: ThoughtState | None = None
        if params.thinking is not None:
            self.thought = ThoughtState(params.thinking, guides_answer=matcher is not None)
        self._matcher = matcher
        self._permitted = _permitted_bits(params, vocab_size)
        self._end_token_ids = end_token_ids.difference(params.stop_token_ids)
        # The mask of the next token, then the masks after each draft given to `look_ahead`; None in
        # place of a mask: any token is allowed.
        self._masks: list[NDArray[np.uint8] | None] = []
        self._spent_s = 0.0
        self._num_masks = 0

    @property
    def num_free(self) -> int:
        """Return how many of the next output tokens need no mask, whichever tokens are sampled."""
        if self.problem or self.thought is None:
            return NO_LIMIT if self._matcher is None and not self.problem else 0
        return self.thought.num_free

    def needs_masks(self, num_pending: int, num_ahead: int) -> bool:
        """Return whether a step needs grammar masks for the tokens that it samples.

        Args:
            num_pending: number of tokens that the step in flight will sample before this step.
            num_ahead: number of drafts in the step, at most as many as `look_ahead` returned.
        """
        if num_ahead:
            return any(mask is not None for mask in self._masks[: 1 + num_ahead])
        return self.num_free <= num_pending

    def corrected(self, token_id: int) -> int:
        """Return the token, or the closing mark if an end token comes before the thought's end."""
        if token_id in self._end_token_ids and self._must_go_on:
            assert self.thought is not None
            return self.thought.closing_token_id
        return token_id

    def compute_mask(self) -> None:
        """Compute the mask of the next token, unless it is computed already; releases the GIL."""
        if not self.has_mask:
            self._masks = [self._next_bits()]
            self.has_mask = True

    def fail(self, problem: str) -> None:
        """Allow no further token, for a reason that does not come from the grammar library."""
        self.problem = f"structured_output: {one_line(problem)}"
        self._masks, self.has_mask = [np.full_like(self._permitted, 0xFF)], True

    def look_ahead(self, token_ids: Sequence[int], limit_s: float) -> int:
        """Compute the mask after each of these drafts; return after how many drafts masks are
        known.

        Stops at a draft that the grammar forbids, or after ``limit_s`` seconds of processor time.
        """
        self.compute_mask()
        del self._masks[1:]
        thought, began_at = self.thought, time.thread_time()
        if thought is not None:
            self.thought = thought.copy()
        num_ahead = num_consumed = 0
        for token_id in token_ids:
            if self.problem or time.thread_time() - began_at >= limit_s:
                break
            if self.corrected(token_id) != token_id or not self._may_come(token_id):
                break
            if self._is_of_answer(token_id) and self._matcher is not None:
                if not self._matcher.try_consume_tokens([token_id]):
                    break
                num_consumed += 1
            num_ahead += 1
            self._masks.append(self._next_bits())
        self.thought = thought
        if num_consumed:
            assert self._matcher is not None
            self._matcher.rollback(num_consumed)
        if num_ahead and self.problem == _STUCK:  # a draft is stuck, but may still be rejected
            self.problem = ""
        return num_ahead

    def allowed_bits(self, num_ahead: int = 0) -> list[NDArray[np.uint8]]:
        """Return the bit mask of the next token, then one per token given to `look_ahead`.

        Each array has one bit per token, low bits first: `[ceil(vocab_size / 8)]`. If no token is
        allowed, all bits are set, `problem` says why, and `accept` refuses every token.

        Args:
            num_ahead: number of drafts after which to return masks, at most as many as `look_ahead`
                returned.
        """
        self.compute_mask()
        masks = self._masks[: 1 + num_ahead]
        return [self._permitted if mask is None else mask for mask in masks]

    def accept(self, token_id: int) -> bool:
        """Advance by an output token; return False if grammar or thought forbid the token."""
        if self.problem:
            return False
        thought = self.thought  # most requests have only a thought and no grammar
        if thought is not None and not self._may_come(token_id):
            self.problem = f"structured_output: token {token_id} is no part of the thought's form"
        elif (thought is None or not thought.accept(token_id)) and self._matcher is not None:
            began_at = time.thread_time()
            if not self._matcher.consume_token(token_id):
                self.problem = f"structured_output: {one_line(self._matcher.get_error())}"
            self._spent_s += time.thread_time() - began_at
        self.has_mask = False
        self.num_accepted += 1
        if thought is not None and self.num_free:
            self.compute_mask()  # costs nothing here: any token is allowed
        return not self.problem

    @property
    def is_terminated(self) -> bool:
        """Return whether the grammar is complete, so that no token can follow."""
        if self.problem or self._matcher is None:
            return False
        is_over = self.thought is None or self.thought.phase is Phase.OVER
        return is_over and self._matcher.is_stopped()

    @property
    def _must_go_on(self) -> bool:
        """Return whether the output is within a thought that an answer must follow."""
        thought = self.thought
        return self._matcher is not None and thought is not None and thought.phase is Phase.OPEN

    def _may_come(self, token_id: int) -> bool:
        """Return whether the thought allows this token next."""
        thought = self.thought
        if thought is None or thought.num_free or thought.may_answer:
            return True
        if thought.must_begin:
            bits = self._beginning_bits(thought)
            return token_id < 8 * len(bits) and bool(bits[token_id // 8] >> token_id % 8 & 1)
        return token_id in thought.choices

    def _is_of_answer(self, token_id: int) -> bool:
        """Advance the thought, if any, by an output token.

        Return True if the token is not part of the thought, but of the answer.
        """
        return self.thought is None or not self.thought.accept(token_id)

    def _next_bits(self) -> NDArray[np.uint8] | None:
        """Compute the mask of the next token; None if any token is allowed."""
        thought = self.thought
        if thought is not None:
            if self.num_free:
                return None
            if thought.must_begin:
                return self._beginning_bits(thought)
        bits = np.zeros_like(self._permitted)
        if self._matcher is not None and (thought is None or thought.may_answer):
            self._add_grammar_bits(self._matcher, bits)
        if thought is not None:
            for token_id in thought.choices:
                if token_id < 8 * len(bits):
                    bits[token_id // 8] |= np.uint8(1 << token_id % 8)
            bits &= self._permitted
        if not self.problem and not bits.any():
            self.problem = _STUCK
        return np.full_like(bits, 0xFF) if self.problem else bits

    def _beginning_bits(self, thought: ThoughtState) -> NDArray[np.uint8]:
        """Return the mask of a thought's first token, which must not end the thought."""
        bits = self._permitted.copy()
        for token_id in (thought.closing_token_id, *self._end_token_ids):
            if token_id < 8 * len(bits):
                bits[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return bits if bits.any() else self._permitted

    def _add_grammar_bits(self, matcher: LLMatcher, bits: NDArray[np.uint8]) -> None:
        """Set the bits of the tokens that the grammar allows next in the mask ``bits``."""
        self._num_masks += 1
        if self._spent_s > self._num_masks * _MAX_MEAN_S + _MAX_EXTRA_S:
            self._fail_for_time()
        if self.problem:
            return
        began_at = time.thread_time()
        found = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        self.mask_s = time.thread_time() - began_at
        self._spent_s += self.mask_s
        if matcher.is_error():
            self.problem = f"structured_output: {one_line(matcher.get_error())}"
            return
        found = found[: len(bits)]
        bits[: len(found)] = found & self._permitted[: len(found)]

    def _fail_for_time(self) -> None:
        mean_ms = 1000 * self._spent_s / self._num_masks
        self.problem = (
            f"structured_output: the grammar takes {mean_ms:.1f} ms a token of the time that all "
            f"requests share, more than {1000 * _MAX_MEAN_S:g} ms"
        )


class MaskMaker(Protocol):
    """Computes grammars' masks between steps, and limits how long a step waits for its masks.

    Only the engine's thread calls these methods.
    """

    def start(self) -> None:
        """Prepare for the first mask; raises RuntimeError if the system allows no threads."""

    def begin_mask(self, grammar: GrammarState) -> None:
        """Begin to compute a mask; callers must not use the state until `has_mask` is True."""

    def wait(self) -> None:
        """Wait, a few milliseconds at most, for all masks that were begun since the last call."""

    def wait_for_any(self) -> None:
        """Wait, a few milliseconds at most, until some mask that is being computed is ready."""


class MasksAtOnce:
    """A `MaskMaker` that computes each mask in the calling thread."""

    def start(self) -> None:
        """Return at once: no thread is needed."""

    def begin_mask(self, grammar: GrammarState) -> None:
        """Compute the mask at once, in this thread."""
        grammar.compute_mask()

    def wait(self) -> None:
        """Return at once: no mask is missing."""

    def wait_for_any(self) -> None:
        """Return at once: no mask is missing."""


def allowed_bits(
    grammars: Mapping[str, tuple[GrammarState, int]],
) -> dict[str, list[NDArray[np.uint8]]]:
    """Return the masks of each request of a step: of its next token and after each of its drafts.

    Args:
        grammars: by request id, the grammar state and the request's number of drafts in the step.
    """
    return {
        request_id: grammar.allowed_bits(num_ahead)
        for request_id, (grammar, num_ahead) in grammars.items()
    }


def _permitted_bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint8]:
    """Return a mask with one bit per token, set unless the request's parameters ban the token."""
    permitted = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        permitted[:] = False
        permitted[list(params.allowed_token_ids)] = True
    permitted[list(params.banned_token_ids)] = False
    return np.packbits(permitted, bitorder="little")
