"""Beam search: finds the most probable outputs by keeping the best few prefixes of each length.

The search needs the most probable next tokens of many prompts: `LLM` computes them in its engine,
and a router by calls that generate one token. Prefixes with a common beginning share blocks in the
prefix cache. The outputs are those of `transformers` with `num_beams`
(https://huggingface.co/docs/transformers/generation_strategies). Refuses to know: engines, blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams

# Maximum number of tokens of an output, because a router makes a call for each beam and token.
MAX_BEAM_TOKENS = 1024
MAX_PENALTY = 10  # with more, a power of the length could overflow a float

EarlyStopping = bool | Literal["never"]
TopTokens = Sequence[tuple[int, float]]  # (token id, logprob), best first
# Function of prefixes and a number n: returns the n most probable next tokens of each prefix. A
# prefix is the index of a prompt, and the tokens of this prompt and of a beam.
NextTokens = Callable[[Sequence[tuple[int, list[int]]], int], Sequence[TopTokens]]


@dataclass(frozen=True, slots=True)
class BeamCompletion:
    """One output of a beam search. ``text`` is empty without a tokenizer.

    Attributes:
        token_ids: tokens of the output, including an end token.
        logprob: log-probability of the whole output.
        score: ``logprob / len(token_ids) ** length_penalty``; outputs are ordered by score.
    """

    text: str
    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; a value outside its limit raises InvalidRequestError.

    Attributes:
        beam_width: number of outputs to keep and return; this number and the number of end tokens
            add up to 20 at most.
        max_tokens: maximum number of output tokens, at least 1.
        length_penalty: exponent of the length in the score, from -10 to 10; above 0 favours long
            outputs.
        early_stopping: when the search ends after ``beam_width`` outputs have ended:
            immediately (True), or when no running output would score better if it ended now
            (False), or when no running output can ever score better (``"never"``).
        end_token_ids: ids of tokens that end an output.
    """

    beam_width: int = 4
    max_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        widest = MAX_LOGPROBS - len(self.end_token_ids)
        if widest < 1:
            raise InvalidRequestError(
                "stop_token_ids",
                f"must leave fewer than {MAX_LOGPROBS} end tokens in a beam search, the model's "
                f"included, got {len(self.end_token_ids)}",
            )
        for name, value, limit in (
            ("beam_width", self.beam_width, widest),
            ("max_tokens", self.max_tokens, 2**31 - 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InvalidRequestError(
                    name, f"must be a whole number from 1 to {limit}, got {value!r}"
                )
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise InvalidRequestError(
                "length_penalty",
                f"must be a number from -{MAX_PENALTY} to {MAX_PENALTY}, got {penalty!r}",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                "early_stopping", f'must be True, False or "never", got {self.early_stopping!r}'
            )

    @property
    def num_candidates(self) -> int:
        """Return how many next tokens of each prefix are needed, since some may be end tokens."""
        return self.beam_width + len(self.end_token_ids)

    def score(self, logprob: float, num_tokens: int) -> float:
        """Return an output's score, by which outputs are ordered."""
        return float(logprob / num_tokens**self.length_penalty)


# Sampling parameters that a request for a beam search may give.
_USED = frozenset(
    {"n", "max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs"}
)


def check_beam_sampling(params: SamplingParams, beam_width: int) -> None:
    """Raise InvalidRequestError, naming the field, if sampling parameters do not fit a beam search.

    Args:
        params: the request's parameters; ``n`` is the number of outputs that it wants.
        beam_width: number of beams.
    """
    if params.n > beam_width:
        raise InvalidRequestError("n", f"must be at most the {beam_width} beams, got {params.n}")
    if params.temperature != 0:
        problem = f"must be 0 or absent in a beam search, got {params.temperature:g}"
        raise InvalidRequestError("temperature", problem)
    if params.max_tokens > MAX_BEAM_TOKENS:
        problem = f"must be at most {MAX_BEAM_TOKENS} in a beam search, got {params.max_tokens}"
        raise InvalidRequestError("max_tokens", problem)
    if params.logprobs:
        raise InvalidRequestError(
            "logprobs", f"must be 0 or absent in a beam search, got {params.logprobs}"
        )
    usual = SamplingParams()
    for field in fields(params):
        if field.name not in _USED and getattr(params, field.name) != getattr(usual, field.name):
            raise InvalidRequestError(field.name, "cannot be used in a beam search")


@dataclass(frozen=True, slots=True)
class Beam:
    """An output of a beam search, running or ended.

    Attributes:
        logprob: sum of ``logprobs``.
        logprobs: the logprob of each token.
        score: score of the output once it has ended; 0 before.
    """

    token_ids: tuple[int, ...]
    logprob: float
    logprobs: tuple[float, ...] = ()
    score: float = 0.0


class BeamSearch:
    """The beam search for one prompt.

    The caller passes the next tokens of `running` to `advance` until `done` is set.

    Args:
        max_tokens: maximum number of output tokens, which the model's maximum length may make
            smaller than the number in the parameters.

    Attributes:
        running: outputs that continue, best first, all equally long.
        finished: outputs that have ended, best first; at most ``beam_width``.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.done = False

    def advance(self, next_tokens: Sequence[TopTokens]) -> None:
        """Extend the running outputs by one token.

        Args:
            next_tokens: for each running output, its ``num_candidates`` best next tokens.
        """
        params = self._params
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob, (*beam.logprobs, logprob))
            for beam, top in zip(self.running, next_tokens, strict=True)
            for token_id, logprob in top
        ]
        candidates.sort(key=lambda beam: beam.logprob, reverse=True)
        num_tokens = len(candidates[0].token_ids)
        at_limit = num_tokens >= self._max_tokens
        # As in transformers, an output that ends is kept only if it is among the best `beam_width`
        # of all candidates.
        ended = [
            replace(beam, score=params.score(beam.logprob, num_tokens))
            for beam in candidates[: params.beam_width]
            if at_limit or beam.token_ids[-1] in params.end_token_ids
        ]
        self.finished = heapq.nlargest(
            params.beam_width, [*self.finished, *ended], key=lambda beam: beam.score
        )
        self.running = [
            beam for beam in candidates if beam.token_ids[-1] not in params.end_token_ids
        ][: params.beam_width]
        self.done = at_limit or not self.running or self._cannot_improve(num_tokens)

    def _cannot_improve(self, num_tokens: int) -> bool:
        """Return whether no running output can still score better than the worst ended output."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            num_tokens = self._max_tokens
        best_possible = params.score(self.running[0].logprob, num_tokens)
        return best_possible <= self.finished[-1].score


def search_beams(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    max_model_len: int,
    next_tokens: NextTokens,
) -> list[list[Beam]]:
    """Search for the best outputs of all prompts at once; return the ended outputs, best first."""
    searches = [
        BeamSearch(params, min(params.max_tokens, max_model_len - len(prompt)))
        for prompt in prompts
    ]
    while True:
        active = [(index, search) for index, search in enumerate(searches) if not search.done]
        if not active:
            return [search.finished for search in searches]
        prefixes = [
            (index, [*prompts[index], *beam.token_ids])
            for index, search in active
            for beam in search.running
        ]
        found = iter(next_tokens(prefixes, params.num_candidates))
        for _, search in active:
            search.advance([next(found) for _ in search.running])
