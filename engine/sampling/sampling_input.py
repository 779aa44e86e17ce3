"""SamplingInput: all that the sampler reads of a step's rows. Knows no logits and no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import NewRow

# One row per request. Counts are -1 where nothing was asked for.
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
    """A request's row of `PARAMETERS`."""
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
    """What the logits of a request depend on besides the model and its grammar."""

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
    """The tokens that a step samples: of a request one, and one more behind each of its drafts.

    Attributes:
        request_ids: `[num_sampling]`; a request's tokens are neighbours.
        parameters: `[num_sampling]` of `PARAMETERS`.
        keys: `[num_sampling, 2]`, random words by seed and output position; all that chance is.
            Where all is greedy they may be of another position: nobody reads them.
        adjusted: by row, those whose choice depends on more than the model's logits.
        draft_token_ids: `[num_sampling]`, what the step computes in the place of the sampled token;
            `UNKNOWN_TOKEN` where it computes nothing. Empty: there is no draft.
        is_greedy: each token is the most probable one by the model's own logits.
        wants_logprobs: of any row.
    """

    request_ids: tuple[str, ...]
    parameters: npt.NDArray[np.void]
    keys: npt.NDArray[np.uint32]
    adjusted: dict[int, RequestSnapshot]
    draft_token_ids: tuple[int, ...] = ()
    is_greedy: bool = field(init=False)
    wants_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look through the parameters once: decode steps of the same requests share them."""
        is_greedy = not self.adjusted and not self.parameters["temperature"].any()
        wants_logprobs = bool((self.parameters["num_logprobs"] >= 0).any())
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "wants_logprobs", wants_logprobs)

    def accept(self, token_ids: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Group what was sampled by request id, up to the first token that is not its draft.

        What follows that one was computed behind another token. Where chance is a function of seed
        and position, the tokens are those that steps without drafts would have sampled.
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
        """Whether the sampling kernel alone cannot give all that is wanted."""
        return bool(self.adjusted) or self.wants_logprobs
