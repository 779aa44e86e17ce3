"""SamplingInput: the sampler's inputs for the rows of a step. Refuses to know: logits, grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import NewRow

# One entry per request. The number of logprobs is -1 if the request asks for none.
PARAMETERS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("changes_logits", np.bool_),
        ("num_logprobs", np.int64),
        ("num_prompt_logprobs", np.int64),
        ("num_prompt_tokens", np.int64),
    ]
)


def parameters_row(new: NewRow) -> tuple[object, ...]:
    """Return the sampling parameters of a request as one entry of dtype `PARAMETERS`."""
    params = new.sampling_params
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        new.seed % 2**64,
        params.changes_logits,
        -1 if params.logprobs is None else params.logprobs,
        -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        new.num_prompt_tokens,
    )


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Inputs of `adjust_logits` for one request, besides the request's grammar."""

    sampling_params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Inputs for the tokens that a step samples: one row per request, plus one per draft.

    Attributes:
        request_ids: `[num_sampling]`, the request of each row; rows of one request are adjacent.
        parameters: `[num_sampling]` of `PARAMETERS`.
        keys: `[num_sampling, 2]`, random words by seed and output position: the only source of
            randomness. If all rows are greedy, keys may be stale, because they are not read.
        adjusted: snapshots by row, for requests with penalties, biases or bans.
        draft_token_ids: `[num_sampling]`, the draft at the sampled token's position;
            `UNKNOWN_TOKEN` for a row without a draft. Empty: the step has no drafts.
        is_greedy: whether every row takes the most probable token by the unadjusted logits.
        wants_logprobs: whether any row wants logprobs.
    """

    request_ids: tuple[str, ...]
    parameters: npt.NDArray[np.void]
    keys: npt.NDArray[np.uint32]
    adjusted: dict[int, RequestSnapshot]
    draft_token_ids: tuple[int, ...] = ()
    is_greedy: bool = field(init=False)
    wants_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute `is_greedy` and `wants_logprobs` once: later decodes may reuse this object."""
        is_greedy = not self.adjusted and not self.parameters["temperature"].any()
        wants_logprobs = bool((self.parameters["num_logprobs"] >= 0).any())
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "wants_logprobs", wants_logprobs)

    def accept(self, token_ids: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Group sampled tokens by request id; drop those after the first wrong draft of a request.

        The token sampled in the wrong draft's place is kept. Later tokens are dropped, because they
        were computed from the wrong draft. Randomness depends only on seed and position, so steps
        without drafts would sample equal tokens (except with rejection sampling).
        """
        if not self.draft_token_ids:
            return dict(zip(self.request_ids, zip(token_ids), strict=True))
        accepted: dict[str, tuple[int, ...]] = {}
        rows = zip(self.request_ids, token_ids, self.draft_token_ids, strict=True)
        is_right = True
        for request_id, token_id, draft in rows:
            before = accepted.get(request_id)
            if before is None or is_right:
                accepted[request_id] = (*(before or ()), token_id)
                is_right = token_id == draft
        return accepted

    @property
    def needs_host(self) -> bool:
        """Return whether the host must sample: the kernel lacks logit adjustments and logprobs."""
        return bool(self.adjusted) or self.wants_logprobs
