"""Logprobs: how probable the model itself held a sampled token, and the best ones, to be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baton.outputs import TokenLogprobs
from engine.request import Request


def compute_logprobs(
    logits: Tensor, requests: Sequence[Request], token_ids: Sequence[int]
) -> dict[str, TokenLogprobs]:
    """For the requests that ask for them, by request id.

    From the log-softmax of the model's own logits: before penalties, biases, bans, temperature and
    filters, so that it says what the model holds probable, whatever the request made of it.

    Args:
        logits: `[num_requests, vocab_size]`; row i belongs to ``requests[i]``.
        token_ids: that were sampled from them.
    """
    rows = [i for i, r in enumerate(requests) if r.sampling_params.logprobs is not None]
    if not rows:
        return {}
    logprobs = logits[rows].float().log_softmax(dim=-1)  # [num_asking, vocab_size]
    wanted = [requests[row].sampling_params.logprobs or 0 for row in rows]
    top = logprobs.topk(min(max(wanted), logprobs.shape[-1]), dim=-1)
    # One transfer each instead of one per request.
    best_ids, best = top.indices.tolist(), top.values.tolist()
    chosen = logprobs[range(len(rows)), [token_ids[row] for row in rows]].tolist()
    return {
        requests[row].request_id: TokenLogprobs(
            chosen[i],
            tuple(zip(best_ids[i][:num], best[i][:num], strict=True)),
        )
        for i, (row, num) in enumerate(zip(rows, wanted, strict=True))
    }
