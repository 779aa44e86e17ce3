"""Logprobs: the model's own log-probabilities of tokens, and of the most probable tokens.

Logprobs of output tokens and prompt tokens are the log-softmax of the logits before penalties,
biases, bans, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.api.outputs import TokenLogprobs
from engine.core.outputs import PromptLogprobs
from engine.sampling.sampling_input import SamplingInput

# Number of prompt tokens whose logits are computed together; the logits of a whole long chunk would
# take gigabytes.
MAX_PROMPT_ROWS = 256


def compute_logprobs(
    logits: Tensor, sampling: SamplingInput, token_ids: Sequence[int]
) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Return the logprobs of sampled tokens, by request id, for requests that ask for them.

    Args:
        logits: `[num_sampling, vocab_size]`; row i belongs to row i of ``sampling``.
        token_ids: `[num_sampling]`, the sampled tokens.
    """
    if not sampling.wants_logprobs:
        return {}
    num_top = sampling.parameters["num_logprobs"]
    rows = (num_top >= 0).nonzero()[0].tolist()
    found = _token_logprobs(logits[rows], [token_ids[row] for row in rows], num_top[rows].tolist())
    by_request: dict[str, tuple[TokenLogprobs, ...]] = {}
    for row, one in zip(rows, found, strict=True):
        request_id = sampling.request_ids[row]
        by_request[request_id] = (*by_request.get(request_id, ()), one)
    return by_request


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A chunk of a prompt whose request asks for prompt logprobs.

    Attributes:
        first_row: row of the step's hidden states that predicts ``token_ids[0]``.
        first_position: position of ``token_ids[0]`` in the prompt.
        token_ids: the prompt tokens that the chunk predicts; empty if the step computes only the
            prompt's last token.
        num_top: number of most probable tokens to return for each predicted token.
    """

    request_id: str
    first_row: int
    first_position: int
    token_ids: tuple[int, ...]
    num_top: int


def compute_prompt_logprobs(
    compute_logits: Callable[[range], Tensor],
    prompt_rows: Sequence[PromptRows],
) -> dict[str, PromptLogprobs]:
    """Return the logprobs of each chunk's prompt tokens, by request id.

    Args:
        compute_logits: returns the logits of some of the step's tokens, `[n, vocab_size]`.
    """
    return {
        chunk.request_id: PromptLogprobs(
            chunk.first_position,
            tuple(
                one
                for start in range(0, len(chunk.token_ids), MAX_PROMPT_ROWS)
                for one in _slice_logprobs(compute_logits, chunk, start)
            ),
        )
        for chunk in prompt_rows
        if chunk.token_ids
    }


def _slice_logprobs(
    compute_logits: Callable[[range], Tensor], chunk: PromptRows, start: int
) -> list[TokenLogprobs]:
    token_ids = chunk.token_ids[start : start + MAX_PROMPT_ROWS]
    first = chunk.first_row + start
    logits = compute_logits(range(first, first + len(token_ids)))
    return _token_logprobs(logits, token_ids, [chunk.num_top] * len(token_ids))


def _token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return, for each row, the logprob of its token, and its most probable tokens.

    ``logits`` are `[n, vocab_size]`, ``token_ids`` `[n]`.
    """
    logprobs = _log_softmax(logits)
    best_ids, best = _best(logprobs, num_top)
    index = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, index).squeeze(1).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:num], values[:num], strict=True)))
        for logprob, ids, values, num in zip(chosen, best_ids, best, num_top, strict=True)
    ]


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax in float32; a row's result does not depend on other rows.

    On a GPU, the order in which torch adds a row depends on the row's address, unless all rows
    begin at a multiple of 16 bytes.
    """
    size, wide = logits.shape[-1], logits.float()
    rest = -size % 4 if logits.is_cuda else 0
    padded = functional.pad(wide, (0, rest), value=-torch.inf) if rest else wide
    return padded.log_softmax(dim=-1)[:, :size]


def _best(logprobs: Tensor, num_top: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's most probable tokens and their logprobs, best first; ties by token id.

    `topk` alone breaks ties arbitrarily, depending on ``num_top``.
    """
    vocab_size = logprobs.shape[-1]
    wanted = torch.tensor(num_top, device=logprobs.device).clamp(max=vocab_size)
    most = min(max(num_top) + 1, vocab_size)
    found = logprobs.topk(most, dim=-1)
    # Sort by token id, then stably by logprob, so that ties are in order of token ids.
    ids, order = found.indices.sort(dim=-1)
    values, order = found.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # Check whether a token that `topk` did not return ties with the last wanted token.
    last = values.gather(1, (wanted - 1).clamp(min=0).unsqueeze(1))  # [n, 1]
    is_cut = (values[:, -1:] == last) & (wanted > 0).unsqueeze(1)
    for row in is_cut.squeeze(1).nonzero().squeeze(1).tolist() if most < vocab_size else ():
        above = int((values[row] > last[row]).sum())
        equal = (logprobs[row] == last[row]).nonzero().squeeze(1)[: num_top[row] - above]
        ids[row, above : above + len(equal)] = equal
    return ids.tolist(), values.tolist()
