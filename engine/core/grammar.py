"""Grammar: which tokens a request's output may go on with. Its state follows from the output alone.

Knows no request, no queue and no tensor; `engine/sampling/grammar_compiler.py` makes the states.
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

_STUCK = "structured_output: no token is left that the grammar, the bans and the limits allow"

# Grammars whose steps grow with their outputs take ever more of the processors that all requests
# of the engine share; of processor time, for a busy machine is not their fault. A mask takes some
# hundredths of a millisecond, up to some milliseconds.
_MAX_MEAN_S = 0.005
# So much beside it: what is used once, the first masks above all.
_MAX_EXTRA_S = 0.2


class GrammarState:
    """Where one request's output is in its grammar.

    One thread at a time may use a state: the engine's thread, or a thread that computes its mask.

    Args:
        matcher: at the beginning; this one's own.
        params: whose bans hold as well.
        vocab_size: of the logits; tokens that the tokenizer does not have are never allowed.

    Attributes:
        problem: why no token can follow; empty while one can.
        num_accepted: tokens of the output that the grammar has accepted.
        has_mask: whether the mask of the next token is computed, so that a token can be sampled.
        mask_s: processor time that the latest mask took; 0 before the first.
    """

    def __init__(self, matcher: LLMatcher, params: SamplingParams, vocab_size: int) -> None:
        self.problem = ""
        self.num_accepted = 0
        self.has_mask = False
        self.mask_s = 0.0
        self._matcher = matcher
        self._permitted = _permitted_bits(params, vocab_size)
        self._masks: list[NDArray[np.uint8]] = []  # for the next token, then behind each draft
        self._spent_s = 0.0
        self._num_masks = 0

    def compute_mask(self) -> None:
        """Compute which tokens may come next, unless already done; releases the GIL."""
        if not self.has_mask:
            self._masks = [self._next_bits()]
            self.has_mask = True

    def fail(self, problem: str) -> None:
        """Allow no token any more, for a reason from outside the library."""
        self.problem = f"structured_output: {one_line(problem)}"
        self._masks, self.has_mask = [np.full_like(self._permitted, 0xFF)], True

    def look_ahead(self, draft_token_ids: Sequence[int], limit_s: float) -> int:
        """Compute the masks behind drafts, and return how many drafts have a mask.

        Stops at a draft that the grammar does not allow, and when the masks have taken ``limit_s``
        of processor time.
        """
        self.compute_mask()
        del self._masks[1:]
        began_at = time.thread_time()
        num_possible = 0 if self.problem else self._matcher.validate_tokens(list(draft_token_ids))
        num_ahead = 0
        for token_id in draft_token_ids[:num_possible]:
            if self.problem or time.thread_time() - began_at >= limit_s:
                break
            num_taken = self._matcher.try_consume_tokens([token_id])
            assert num_taken == 1, "a draft is not possible"
            num_ahead += 1
            self._masks.append(self._next_bits())
        if num_ahead:
            self._matcher.rollback(num_ahead)
            if self.problem == _STUCK:  # stuck behind a draft, which may never be sampled
                self.problem = ""
        return num_ahead

    def allowed_bits(self, num_drafts: int = 0) -> list[NDArray[np.uint8]]:
        """Return which tokens may come next, and which may come behind each draft.

        Each array has one bit per token, low bits first: `[ceil(vocab_size / 8)]`. If no token may
        come, all bits are set: `problem` says why, and `accept` takes no token.

        Args:
            num_drafts: at most the number that `look_ahead` returned.
        """
        self.compute_mask()
        return self._masks[: 1 + num_drafts]

    def accept(self, token_id: int) -> bool:
        """Advance by a token of the output; return False if the grammar forbids the token."""
        if self.problem:
            return False
        began_at = time.thread_time()
        if not self._matcher.consume_token(token_id):
            self.problem = f"structured_output: {one_line(self._matcher.get_error())}"
        self._spent_s += time.thread_time() - began_at
        self.has_mask = False
        self.num_accepted += 1
        return not self.problem

    @property
    def is_terminated(self) -> bool:
        """Return whether the output is complete and no token can follow."""
        return not self.problem and self._matcher.is_stopped()

    def _next_bits(self) -> NDArray[np.uint8]:
        bits = np.zeros_like(self._permitted)
        self._num_masks += 1
        if self._spent_s > self._num_masks * _MAX_MEAN_S + _MAX_EXTRA_S:
            self._fail_for_time()
        if not self.problem:
            began_at = time.thread_time()
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self.mask_s = time.thread_time() - began_at
            self._spent_s += self.mask_s
            if self._matcher.is_error():
                self.problem = f"structured_output: {one_line(self._matcher.get_error())}"
            else:
                found = found[: len(self._permitted)]
                bits[: len(found)] = found & self._permitted[: len(found)]
                if not bits.any():
                    self.problem = _STUCK
        return np.full_like(bits, 0xFF) if self.problem else bits

    def _fail_for_time(self) -> None:
        mean_ms = 1000 * self._spent_s / self._num_masks
        self.problem = (
            f"structured_output: the grammar takes {mean_ms:.1f} ms a token of the time that all "
            f"requests share, more than {1000 * _MAX_MEAN_S:g} ms"
        )


class MaskMaker(Protocol):
    """Compute the masks of grammars between steps, and limit how long a step waits for them.

    Only the engine's thread calls these methods.
    """

    def begin(self, grammar: GrammarState) -> None:
        """Begin a grammar's mask; no other code may use the grammar until `has_mask`."""

    def wait(self) -> None:
        """Wait a few milliseconds at most for the masks that were begun since the last call."""

    def wait_for_any(self) -> None:
        """Wait a few milliseconds at most for any mask that is not ready, if there is one."""


class MasksAtOnce:
    """Compute each mask in the caller, where no other request would have to wait."""

    def begin(self, grammar: GrammarState) -> None:
        """Compute the mask now."""
        grammar.compute_mask()

    def wait(self) -> None:
        """Return at once: no mask is missing."""

    def wait_for_any(self) -> None:
        """Return at once: no mask is missing."""


def allowed_bits(
    grammars: Mapping[str, tuple[GrammarState, int]],
) -> dict[str, list[NDArray[np.uint8]]]:
    """Return which tokens may come next in a step's grammars; see `GrammarState.allowed_bits`.

    Args:
        grammars: by request id, with the number of drafts that the step computes.
    """
    return {
        request_id: grammar.allowed_bits(num_drafts)
        for request_id, (grammar, num_drafts) in grammars.items()
    }


def _permitted_bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint8]:
    """One bit per token of the logits that a request does not ban itself."""
    permitted = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        permitted[:] = False
        permitted[list(params.allowed_token_ids)] = True
    permitted[list(params.banned_token_ids)] = False
    return np.packbits(permitted, bitorder="little")
