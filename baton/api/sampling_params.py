"""SamplingParams: how each next token of a request is chosen, and when its output ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.api.thinking import Thinking

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_TOKEN_IDS = 256
MAX_LISTED_TOKEN_IDS = 4096
MAX_LOGIT_BIASES = 300
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_LOGPROBS = 20
MAX_N = 128
_LEAST_TOP_P = 5e-324  # used for a top_p of 0, which samplers do not accept


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; a value outside its limit raises InvalidRequestError.

    Logits are changed in this order: repetition penalty, presence and frequency penalty, logit
    bias, bans (``banned_token_ids``, ``allowed_token_ids``, ``structured_output``, ``min_tokens``).
    Then the most probable token is taken (greedy), or one is drawn after temperature, top-k, top-p
    and min-p.

    Attributes:
        n: outputs per prompt, 1 to 128. They share the prompt's KV; output i (from 0) equals the
            output of a request with seed + i. Routers take n in `Client.generate_batch` only.
        max_tokens: maximum number of output tokens, at least 1.
        temperature: randomness; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the most probable tokens until their probabilities add up to this value, in [0,
            1]; 0 keeps only the most probable token.
        min_p: keep tokens whose probability is at least this value times the highest probability;
            in [0, 1]; 0 is off.
        seed: equal seeds give equal tokens in any batch and on any node; None draws a seed.
        repetition_penalty: above 0; for tokens in prompt or output, positive logits are divided by
            this value, and negative logits are multiplied by it (Keskar et al., arXiv 1909.05858).
            1 is off.
        presence_penalty: subtracted once from the logit of each token in the output; in [-2, 2].
        frequency_penalty: subtracted from a token's logit for each of its occurrences in the
            output; in [-2, 2].
        logit_bias: token id -> bias in [-100, 100], added to the logit; at most 300. A mapping or
            pairs; stored as pairs sorted by token id.
        allowed_token_ids: the only tokens that may be drawn; None allows all.
        banned_token_ids: tokens that are never drawn.
        min_tokens: minimum number of output tokens, at most ``max_tokens``. Until then, tokens that
            end the output are drawn only if no other tokens are allowed, and stop strings are
            ignored.
        stop_token_ids: tokens that end the output; the end token is part of the output.
        stop: strings that end the output; the text ends before the first stop string.
        ignore_eos: whether to continue after the model's end-of-sequence token.
        logprobs: number of most probable tokens whose logprobs are returned with each output
            token's own, 0 to 20; None: no logprobs. Logprobs come from the model's own
            distribution, before all changes above.
        structured_output: form that the output must have. An end-of-sequence token is drawn only
            where the form allows an end, and then ends the output despite ``ignore_eos``. Where the
            form allows no further token, the output ends, even before ``min_tokens``. If bans do
            not leave any token that fits, the request fails. ``max_tokens``, ``stop`` and
            ``stop_token_ids`` may still cut the output.
        thinking: the thought before the answer and its token limits. A ``structured_output`` then
            begins after the thought.
        prompt_logprobs: like ``logprobs``, but for each prompt token given the tokens before it;
            the first token has no logprob (None). Returned with the first output token. Such
            prompts do not use the prefix cache.
    """

    n: int = 1
    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    thinking: Thinking | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, "0 or more", 0, math.inf)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, "in [0, 1]", 0, 1)
        if not self.top_p:
            self._keep("top_p", _LEAST_TOP_P)
        _check_number("min_p", self.min_p, "in [0, 1]", 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, "above 0", 5e-324, math.inf)
        _check_number("presence_penalty", self.presence_penalty, "in [-2, 2]", -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, "in [-2, 2]", -2, 2)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.structured_output, StructuredOutput | None):
            got = type(self.structured_output).__name__
            raise InvalidRequestError("structured_output", f"must be a StructuredOutput, got {got}")
        if not isinstance(self.thinking, Thinking | None):
            got = type(self.thinking).__name__
            raise InvalidRequestError("thinking", f"must be a Thinking, got {got}")
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._keep("logit_bias", _biases(self.logit_bias))
        self._keep("stop", _stop_strings(self.stop))
        self._keep_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        self._keep_ids("banned_token_ids", MAX_LISTED_TOKEN_IDS)
        if self.allowed_token_ids is None:
            return
        allowed = self._keep_ids("allowed_token_ids", MAX_LISTED_TOKEN_IDS)
        if not set(allowed) - set(self.banned_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids", f"must have at least 1 that is not banned, got {allowed!r}"
            )

    @property
    def changes_logits(self) -> bool:
        """Return whether parameters change the model's logits in every step.

        In some steps a grammar or the end of a thought changes logits, too; see
        `StepPlan.constrained`.
        """
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.banned_token_ids
            or self.allowed_token_ids is not None
            or self.min_tokens
        )

    def with_seed(self, seed: int) -> SamplingParams:
        """Return a copy with this seed, without checking the other values again."""
        copied = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copied, name, getattr(self, name))
        copied._keep("seed", seed)
        return copied

    def _keep(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _keep_ids(self, field: str, max_ids: int) -> tuple[int, ...]:
        """Check the list of token ids in a field, and store it as a tuple (unchangeable)."""
        token_ids = _as_tuple(field, getattr(self, field), "token ids", max_ids)
        for token_id in token_ids:
            _check_int(field, token_id, 0, MAX_TOKEN_ID)
        self._keep(field, token_ids)
        return token_ids


def _as_tuple(field: str, value: object, what: str, limit: int) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(field, f"must be a list of {what}, got {value!r}")
    items = tuple(value)
    if len(items) > limit:
        raise InvalidRequestError(field, f"must have at most {limit}, got {len(items)}")
    return items


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Return a logit bias, given as a mapping or as pairs, as pairs sorted by token id."""
    field = "logit_bias"
    given = value.items() if isinstance(value, Mapping) else value
    biases: dict[int, float] = {}
    for pair in _as_tuple(field, given, "token ids with biases", MAX_LOGIT_BIASES):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRequestError(field, f"must be pairs of token id and bias, got {pair!r}")
        token_id, bias = pair
        _check_int(field, token_id, 0, MAX_TOKEN_ID)
        _check_number(field, bias, "in [-100, 100]", -100, 100)
        if token_id in biases:
            raise InvalidRequestError(field, f"must name a token once, got {token_id} twice")
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _stop_strings(value: object) -> tuple[str, ...]:
    """Return stop strings as a tuple; a single string becomes a tuple of one."""
    given = (value,) if isinstance(value, str) else value
    strings = _as_tuple("stop", given, "strings", MAX_STOP_STRINGS)
    kept = []
    for text in strings:
        if not isinstance(text, str):
            raise InvalidRequestError("stop", f"must be strings, got {text!r}")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                "stop", f"must be strings of 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequestError("stop", f"must be valid Unicode, got {text!r}")
        kept.append(text)
    return tuple(kept)


def _check_number(field: str, value: object, limits: str, low: float, high: float) -> None:
    """Raise InvalidRequestError unless a value is a finite number between ``low`` and ``high``.

    Args:
        limits: the range in words, for the error.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and value < math.inf:  # type: ignore[operator]  # a number
        return
    raise InvalidRequestError(field, f"must be {limits}, got {value!r}")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(field, f"must be a whole number, got {value!r}")
    if value < low:
        raise InvalidRequestError(field, f"must be {low} or more, got {value}")
    if value > high:
        raise InvalidRequestError(field, f"must be {high} or less, got {value}")
