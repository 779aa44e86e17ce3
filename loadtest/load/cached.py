"""CacheReport: cached prompt tokens of a run, and how many this run's own prompts explain.

A prompt that the server has cached costs almost nothing. Prompts of one load share some beginnings
on purpose. Any further cached tokens were cached by another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.load.record import RequestRecord

# Share of prompt tokens that may be cached without another run: the beginning of a chat template,
# or a block that two prompts share by chance.
UNEXPLAINED = 0.05
MUCH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Cached prompt tokens of the measured requests for which the server reported them.

    Attributes:
        num_requests: number of measured requests for which the server reported cached tokens.
        num_shared_tokens: prompt tokens that this run itself may have cached: beginnings that an
            earlier request of the run also had.
    """

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens that the server had cached.

        None if the server does not report cached tokens.
        """
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    @property
    def shared_share(self) -> float | None:
        """Share of prompt tokens that this run itself may have cached.

        None if the server does not report cached tokens.
        """
        return self.num_shared_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    def line(self) -> str:
        """Return the line about cached prompt tokens that all reports print."""
        if self.cached_share is None or self.shared_share is None:
            return "prompt tokens cached: the server does not say"
        return (
            f"prompt tokens cached: {self.cached_share:.1%} "
            f"(this load shares {self.shared_share:.1%} by its making)"
        )

    def warning(self) -> str:
        """Return a warning if so many tokens were cached that TTFT shows the cache; else empty."""
        cached, shared = self.cached_share, self.shared_share
        if cached is None or shared is None:
            return ""
        if cached > shared + UNEXPLAINED:
            return (
                f"{cached:.1%} of the prompt tokens came out of the server's cache, of which this "
                f"load can have made {shared:.1%}: the server has met these prompts before, and "
                "TTFT is a cache's. Without --seed every run has fresh prompts"
            )
        if cached >= MUCH:
            return (
                f"{cached:.1%} of the prompt tokens came out of the server's cache, for the "
                "prompts of this load begin alike: TTFT is that of a warm cache"
            )
        return ""


def report_cache(records: Sequence[RequestRecord]) -> CacheReport:
    """Count the cached tokens of the measured prompts, and those that the run itself explains.

    Prompts with images are left out: only the server knows how many tokens an image has.
    """
    usages = [
        (record.usage, record.planned.shared_share)
        for record in records
        if record.usage is not None
        and record.usage.num_cached_tokens is not None
        and not record.planned.images
    ]
    return CacheReport(
        num_requests=len(usages),
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage, _ in usages),
        num_cached_tokens=sum(usage.num_cached_tokens or 0 for usage, _ in usages),
        num_shared_tokens=sum(round(usage.num_prompt_tokens * share) for usage, share in usages),
    )
