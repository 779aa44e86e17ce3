"""Rejection sampling of drafts: drafts may change the sampled tokens, but not their distribution.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. A draft x that the drafter drew
from its distribution q is kept with probability min(1, p(x) / q(x)), where p is the model's
distribution. Otherwise, a token is drawn from the part of p above q (*recovered* token), which
never equals the draft. If q is unknown, all of q's mass is taken to be on x. After the last draft,
a token is drawn from p (*bonus* token).

Random words depend only on seed, position and purpose. Each purpose has words of its own, so that
the decision to keep a draft does not depend on the noise with which it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.step_plan import UNKNOWN_TOKEN
from engine.sampling.device_sampling import LEAST_TEMPERATURE
from engine.sampling.gumbel import NO_TOKEN, Floats, TokenIds, Words, draw, noise_hashes
from engine.sampling.logits import adjust_logits
from engine.sampling.sampler import least_kept, sample
from engine.sampling.sampling_input import SamplingInput

AllowedBits = Mapping[str, Sequence[npt.NDArray[np.uint8]]]
_KEEP, _AGAIN, DRAFT = range(3)  # purposes of random words, see `salted`
_BEYOND = 2**31  # larger than any token id, so that words for other purposes differ


def salted(keys: Words, purpose: int) -> Words:
    """Derive the random words for one purpose from the keys of positions: `[n, 2]` in and out."""
    ids = np.array([_BEYOND + 2 * purpose, _BEYOND + 2 * purpose + 1], dtype=np.uint32)
    return noise_hashes(keys[:, None], ids[None])


def sample_with_rejection(
    logits: Tensor,
    sampling: SamplingInput,
    allowed_bits: Callable[[], AllowedBits] = dict,
    proposed: Mapping[int, Floats] | None = None,
) -> list[int]:
    """Sample one token per row: the row's draft if it is kept, else another token.

    `SamplingInput.accept` finds the accepted drafts in the result.

    Args:
        logits: `[num_sampling, vocab_size]` float32; row i belongs to row i of ``sampling``.
        allowed_bits: masks of the tokens that grammars allow, by request id
            (`StepHooks.allowed_bits`).
        proposed: distribution that a row's draft was drawn from, `[vocab_size]`, by row, where it
            is known.
    """
    allowed = allowed_bits() if sampling.adjusted else {}
    token_ids = sample(logits, sampling, lambda: allowed)
    drafts = np.array(sampling.draft_token_ids, dtype=np.int64)
    rows = (drafts != UNKNOWN_TOKEN).nonzero()[0]
    if not len(rows):
        return token_ids
    target = probabilities(_adjusted(logits, sampling, allowed, rows), sampling.parameters[rows])
    proposed = proposed or {}
    draft_probabilities = np.zeros_like(target)
    for place, row in enumerate(rows.tolist()):
        known = proposed.get(row)
        if known is None:
            draft_probabilities[place, drafts[row]] = 1.0
        else:
            draft_probabilities[place, : len(known)] = known[: target.shape[1]]
    chosen = keep_or_draw(target, draft_probabilities, drafts[rows], sampling.keys[rows])
    for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
        if token_ids[row] != NO_TOKEN:  # a row with NaN keeps no draft
            token_ids[row] = token_id
    return token_ids


def keep_or_draw(target: Floats, proposed: Floats, drafts: TokenIds, keys: Words) -> TokenIds:
    """Keep each row's draft, or draw a token in its place: `[n]`.

    Args:
        target, proposed: `[n, vocab_size]`, the model's and the drafter's distributions.
        drafts: `[n]`.
        keys: `[n, 2]`, random words of each position.
    """
    at = np.arange(len(drafts))
    chances = (salted(keys, _KEEP)[:, 0] + 0.5) * 2.0**-32
    is_kept = chances * proposed[at, drafts] < target[at, drafts]
    again = (~is_kept).nonzero()[0]
    if not len(again):
        return drafts
    rest = np.maximum(target[again] - proposed[again], 0.0)
    # As `target` and `proposed` both sum to 1, a row of `rest` can be all 0 only by rounding.
    nothing = rest.sum(axis=1) == 0
    rest[nothing] = target[again[nothing]]
    with np.errstate(divide="ignore"):
        scores = torch.from_numpy(np.log(rest))
    found = drafts.copy()
    found[again] = draw(scores, np.ones(len(again)), salted(keys[again], _AGAIN))
    return found


def probabilities(logits: Tensor, parameters: npt.NDArray[np.void]) -> Floats:
    """Return the distribution of tokens after temperature and filters: `[n, vocab_size]` float64.

    Args:
        logits: `[n, vocab_size]`, float32 or float64, already adjusted (penalties, bans).
        parameters: `[n]` of `PARAMETERS`.
    """
    host = logits.double().cpu().numpy()
    greedy = parameters["temperature"] == 0
    temperatures = np.maximum(parameters["temperature"], LEAST_TEMPERATURE)
    filtered = (parameters["top_k"] > 0) | (parameters["top_p"] < 1) | (parameters["min_p"] > 0)
    if filtered.any():
        rows = filtered.nonzero()[0]
        own = logits[torch.from_numpy(rows).to(logits.device)]
        least = least_kept(own, parameters[rows])
        host[rows] = np.where(host[rows] >= least[:, None], host[rows], -np.inf)
    best = host.max(axis=1, keepdims=True)
    weights: Floats = np.exp((host - best) / temperatures[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    if greedy.any():
        rows = greedy.nonzero()[0]
        weights[rows] = 0.0
        weights[rows, host[rows].argmax(axis=1)] = 1.0
    return weights


def _adjusted(
    logits: Tensor, sampling: SamplingInput, allowed: AllowedBits, rows: TokenIds
) -> Tensor:
    """Return some rows of the logits after penalties, biases, bans and grammars are applied."""
    wanted = logits[torch.from_numpy(rows).to(logits.device)].double()
    if not sampling.adjusted:
        return wanted
    masks = {request_id: iter(own) for request_id, own in allowed.items()}
    bits = {
        row: mask
        for row in sampling.adjusted
        for mask in islice(masks.get(sampling.request_ids[row], ()), 1)
    }
    places = [place for place, row in enumerate(rows.tolist()) if row in sampling.adjusted]
    if places:
        own = rows[places]
        snapshots = [sampling.adjusted[row] for row in own.tolist()]
        own_bits = {index: bits[row] for index, row in enumerate(own.tolist()) if row in bits}
        own_logits = logits[torch.from_numpy(own).to(logits.device)]
        wanted[places] = adjust_logits(own_logits, snapshots, own_bits)
    return wanted
