"""Check the prompts and parameters of requests; draw seeds; derive the seeds and ids of outputs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from baton.api.errors import InvalidRequestError, PromptTooLongError
from baton.api.sampling_params import MAX_SEED, SamplingParams
from baton.api.thinking import Thinking

MAX_PRIORITY = 2**31 - 1
# Maximum number of logprobs of a prompt in one answer. So many take about 2 MiB of the 8 MiB that a
# message may have.
MAX_PROMPT_LOGPROBS = 250_000


def check_prompt(
    token_ids: Sequence[int], *, vocab_size: int, max_model_len: int, field: str = "prompt"
) -> None:
    """Raise InvalidRequestError unless the prompt can be served.

    Args:
        vocab_size: number of token ids of the model.
        max_model_len: maximum number of tokens of prompt and output together. An output has at
            least one token.
        field: name of the prompt's field, for errors.
    """
    if not token_ids:
        raise InvalidRequestError(field, "must have at least 1 token, got 0")
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(field, len(token_ids), max_model_len - 1)
    check_token_ids(field, token_ids, vocab_size)


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError if a prompt's logprobs would not fit into a message."""
    if params.prompt_logprobs is None:
        return
    num_logprobs = num_prompt_tokens * (params.prompt_logprobs + 1)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1
        hint = f"at most {most}" if most >= 0 else "none"
        raise InvalidRequestError(
            "prompt_logprobs",
            f"must be {hint} for a prompt of {num_prompt_tokens} tokens (prompt tokens x "
            f"(prompt_logprobs + 1) is at most {MAX_PROMPT_LOGPROBS}), "
            f"got {params.prompt_logprobs}",
        )


def check_sampling_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequestError if a parameter names a token id that the model lacks."""
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("banned_token_ids", params.banned_token_ids, vocab_size)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    if params.thinking is not None:
        _check_marks(params, params.thinking, vocab_size)
    if len(set(params.banned_token_ids)) == vocab_size:
        raise InvalidRequestError(
            "banned_token_ids", f"must leave at least 1 token, got all {vocab_size}"
        )


def _check_marks(params: SamplingParams, thinking: Thinking, vocab_size: int) -> None:
    """Raise InvalidRequestError if the closing mark cannot be generated with these parameters."""
    if not thinking.close_token_ids or not (thinking.is_open or thinking.open_marks):
        raise InvalidRequestError(
            "thinking", "must have a closing mark, and an opening mark unless the thought is open"
        )
    marks = {*thinking.close_token_ids, *thinking.behind_token_ids}
    check_token_ids("thinking.close_token_ids", sorted(marks), vocab_size)
    for mark in (*thinking.open_marks, thinking.gap_token_ids):
        check_token_ids("thinking.open_marks", mark, vocab_size)
    allowed = params.allowed_token_ids
    if not marks.isdisjoint(params.banned_token_ids):
        raise InvalidRequestError("banned_token_ids", "must not have the mark that ends a thought")
    if allowed is not None and not marks <= set(allowed):
        raise InvalidRequestError("allowed_token_ids", "must have the mark that ends a thought")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError if a token id is not in the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            field, f"token ids must be 0 to {vocab_size - 1} (the vocabulary), got {wrong}"
        )


def check_priority(priority: int, most_urgent: int | None = None) -> None:
    """Raise InvalidRequestError if a priority is out of range, or too urgent for the client.

    Args:
        most_urgent: smallest number that the client may ask for; None: any number.
    """
    if most_urgent is not None and priority < most_urgent:
        raise InvalidRequestError(
            "priority", f"must be {most_urgent} or more with this API key, got {priority}"
        )
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            "priority", f"must be {-MAX_PRIORITY - 1} to {MAX_PRIORITY}, got {priority}"
        )


def draw_seed() -> int:
    """Draw a seed for a request without a seed."""
    return secrets.randbits(63)


def choice_seed(seed: int, choice_index: int) -> int:
    """Return the seed of output i among a prompt's ``n`` outputs: seed + i.

    After the greatest seed comes the smallest seed, because samplers use seeds modulo 2**64.
    """
    return (seed + choice_index + MAX_SEED + 1) % 2**64 - MAX_SEED - 1


def choice_request_id(request_id: str, choice_index: int) -> str:
    """Return the id of one of a prompt's ``n`` outputs; the first has the request's id."""
    return f"{request_id}-{choice_index}" if choice_index else request_id


def check_name(field: str, name: str, limit: int) -> None:
    """Raise InvalidRequestError if a client's name is too long or not printable."""
    if len(name) > limit:
        raise InvalidRequestError(field, f"must have at most {limit} characters, got {len(name)}")
    # HTTP headers that are not UTF-8 are refused, too: their bytes have become surrogates.
    if not name.isprintable():
        raise InvalidRequestError(field, f"must have printable characters only, got {name!a}")
