"""SamplingInput: all that the sampler reads of a step's rows. Knows no logits and no grammar."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The requests that sample in a step.

    Attributes:
        parameters: `[num_requests]` of `PARAMETERS`.
        keys: `[num_requests, 2]`, random words by seed and output position; all that chance is.
        adjusted: by row, the requests whose choice depends on more than the model's logits.
    """

    request_ids: tuple[str, ...]
    parameters: npt.NDArray[np.void]
    keys: npt.NDArray[np.uint32]
    adjusted: dict[int, RequestSnapshot]

    @property
    def needs_host(self) -> bool:
        """Whether the sampling kernel alone cannot give all that is wanted."""
        return bool(self.adjusted) or bool((self.parameters["num_logprobs"] >= 0).any())
