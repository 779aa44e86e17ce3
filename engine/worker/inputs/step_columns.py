"""StepColumns: the plan of a step as arrays, with one entry per request or per sampled token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.core.step_plan import SHARE, UNKNOWN_TOKEN, StepPlan

Ints = npt.NDArray[np.int64]


class StepColumns:
    """The plan of a step as columns, each `[num_requests]` unless stated otherwise.

    Attributes:
        sampling: `[num_sampling]`, index of the request of each sampled token; ascending.
        sampled_at: `[num_sampling]`, position of each sampled token in its request.
        num_behind: `[num_sampling]`, number of the request's drafts at and after each sampled
            token's position; None: no drafts.
        draft_token_ids: `[num_sampling]`, drafts at the sampled tokens' positions
            (`SamplingInput`).
        constrained: ids of requests that sample by a grammar (`StepPlan.constrained`).
    """

    def __init__(self, plan: StepPlan, max_decode_rows: int) -> None:
        # Shares are one flat list, because numpy takes twice as long to convert a list of tuples.
        columns = np.array(plan.shares, dtype=np.int64).reshape(-1, SHARE).T.copy()
        self.rows, self.starts, self.query_lens, self.num_known = columns
        # [num_tokens]; unknown tokens are < 0
        self.token_ids = np.array(plan.token_ids, dtype=np.int64)
        self.ends = self.starts + self.query_lens
        self.sampling: Ints = (self.ends >= self.num_known).nonzero()[0]
        self.sampled_at: Ints = self.num_known[self.sampling]
        self.constrained = plan.constrained
        self.num_behind: Ints | None = None
        self.draft_token_ids: tuple[int, ...] = ()
        if len(self.token_ids) > len(self.rows):
            num_drafts = self.ends[self.sampling] - self.sampled_at
            if num_drafts.any():
                self._sample_behind(num_drafts)
                if len(self.token_ids) == len(self.sampling) <= max_decode_rows:
                    self._spread()

    def _sample_behind(self, num_drafts: Ints) -> None:
        """Add one more sampled token to the columns for each draft.

        Args:
            num_drafts: number of drafts of each request that samples.
        """
        num_samples = num_drafts + 1
        ends = num_samples.cumsum()
        after_first = np.arange(ends[-1]) - (ends - num_samples).repeat(num_samples)
        self.sampling = self.sampling.repeat(num_samples)
        self.sampled_at = self.sampled_at.repeat(num_samples) + after_first
        self.num_behind = num_behind = num_drafts.repeat(num_samples) - after_first
        places = self.query_lens.cumsum()[self.sampling] - num_behind
        drafts = np.append(self.token_ids, UNKNOWN_TOKEN)[places]
        self.draft_token_ids = tuple(np.where(num_behind, drafts, UNKNOWN_TOKEN).tolist())

    def _spread(self) -> None:
        """Turn the step into a decode step: each draft becomes a request with its request's blocks.

        Every layer writes the KV of all tokens before it reads any, so decode graphs and decode
        kernels also work with drafts.
        """
        self.rows = self.rows.repeat(self.query_lens)
        self.starts, self.ends = self.sampled_at - 1, self.sampled_at
        self.sampling = np.arange(len(self.rows))
        self.query_lens = np.ones_like(self.sampling)
        self.num_behind = np.zeros_like(self.sampling)

    @property
    def is_decode(self) -> bool:
        """Return whether every request computes only its last known token."""
        return len(self.token_ids) == len(self.rows) == len(self.sampling)
