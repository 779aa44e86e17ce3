"""Grammar: which tokens a request's output may go on with. Its state follows from the output alone.

Knows no request, no queue and no tensor; `engine/sampling/grammar_compiler.py` makes the states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.api.sampling_params import SamplingParams
from baton.text.grammars import one_line

_STUCK = "structured_output: no token is left that the grammar, the bans and the limits allow"

# Grammars whose steps grow with their outputs take ever more of the thread that all requests of
# the engine share; of its processor time, for a busy machine is not their fault. A mask takes some
# hundredths of a millisecond, up to some milliseconds.
_MAX_MEAN_S = 0.005
# So much beside it: what is used once, the first masks above all.
_MAX_EXTRA_S = 0.2
# In a step, all grammars together; then those that cost more than the mean above end.
_MAX_STEP_S = 0.1


class GrammarState:
    """Where one request's output is in its grammar.

    Args:
        matcher: at the beginning; this one's own.
        params: whose bans hold as well.
        vocab_size: of the logits; tokens that the tokenizer does not have are never allowed.

    Attributes:
        problem: why no token can follow; empty while one can.
    """

    def __init__(self, matcher: LLMatcher, params: SamplingParams, vocab_size: int) -> None:
        self.problem = ""
        self._matcher = matcher
        self._permitted = _permitted_bits(params, vocab_size)
        self._spent_s = 0.0
        self._num_masks = 0

    def allowed_bits(
        self, draft_token_ids: Sequence[int] = (), *, step_is_long: bool = False
    ) -> list[NDArray[np.uint8]]:
        """The tokens that may come next, and those that may come behind each draft.

        One bit a token, low bits first: `[ceil(vocab_size / 8)]` each. All of them when there is
        none: `problem` says so, and `accept` will take no token. Behind a draft at which no token
        is left there is no more to be said, and no problem while nobody sampled that draft.

        Args:
            draft_token_ids: no more than `num_possible` of them.
            step_is_long: whether other grammars have taken all the time that a step has for them.
        """
        found = [self._next_bits(step_is_long)]
        num_ahead = 0
        for token_id in draft_token_ids:
            if self.problem:
                break
            num_taken = self._matcher.try_consume_tokens([token_id])
            assert num_taken == 1, "a draft is not possible"
            num_ahead += 1
            found.append(self._next_bits(step_is_long))
        if num_ahead:
            self._matcher.rollback(num_ahead)
            if self.problem == _STUCK:
                self.problem = ""
        return found

    def num_possible(self, draft_token_ids: Sequence[int]) -> int:
        """How many leading ones of these tokens the output may go on with."""
        if self.problem:
            return 0
        began_at = time.thread_time()
        num_possible: int = self._matcher.validate_tokens(list(draft_token_ids))
        self._spent_s += time.thread_time() - began_at
        return num_possible

    def _next_bits(self, step_is_long: bool) -> NDArray[np.uint8]:
        bits = np.zeros_like(self._permitted)
        self._num_masks += 1
        extra_s = 0.0 if step_is_long else _MAX_EXTRA_S
        if self._spent_s > self._num_masks * _MAX_MEAN_S + extra_s:
            self._fail_for_time()
        if not self.problem:
            began_at = time.thread_time()
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._spent_s += time.thread_time() - began_at
            if self._matcher.is_error():
                self.problem = f"structured_output: {one_line(self._matcher.get_error())}"
            else:
                found = found[: len(self._permitted)]
                bits[: len(found)] = found & self._permitted[: len(found)]
                if not bits.any():
                    self.problem = _STUCK
        return np.full_like(bits, 0xFF) if self.problem else bits

    def accept(self, token_id: int) -> bool:
        """Go on with a token of the output; False when it must not be there."""
        if self.problem:
            return False
        began_at = time.thread_time()
        if not self._matcher.consume_token(token_id):
            self.problem = f"structured_output: {one_line(self._matcher.get_error())}"
        self._spent_s += time.thread_time() - began_at
        return not self.problem

    def _fail_for_time(self) -> None:
        mean_ms = 1000 * self._spent_s / self._num_masks
        self.problem = (
            f"structured_output: the grammar takes {mean_ms:.1f} ms a token of the time that all "
            f"requests share, more than {1000 * _MAX_MEAN_S:g} ms"
        )

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return not self.problem and self._matcher.is_stopped()


def allowed_bits(
    grammars: Mapping[str, tuple[GrammarState, Sequence[int]]],
) -> dict[str, list[NDArray[np.uint8]]]:
    """The tokens that may come next in each of a step's grammars; see `GrammarState.allowed_bits`.

    Args:
        grammars: by request id, with the drafts that the step computes.
    """
    began_at = time.thread_time()
    return {
        request_id: grammar.allowed_bits(
            draft_token_ids, step_is_long=time.thread_time() - began_at > _MAX_STEP_S
        )
        for request_id, (grammar, draft_token_ids) in grammars.items()
    }


def _permitted_bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint8]:
    """One bit per token of the logits that a request does not ban itself."""
    permitted = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        permitted[:] = False
        permitted[list(params.allowed_token_ids)] = True
    permitted[list(params.banned_token_ids)] = False
    return np.packbits(permitted, bitorder="little")
