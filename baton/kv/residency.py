"""BlockResidency: histograms of how long blocks stay in the prefix cache, in seconds.

    cached ............. freed ......... used again ...... freed ....... evicted
           in use              idle, a reuse gap                  idle
    |<------------------------------ lifetime ------------------------------>|

Refuses to know: blocks, clocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper limits of the histograms' buckets, in seconds; one more bucket counts longer times.
RESIDENCY_S = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


@dataclass(slots=True)
class SecondsHistogram:
    """Histogram of durations, with the buckets of `RESIDENCY_S`.

    Attributes:
        counts: number of durations in each bucket.
        sum_s: sum of all durations, in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(RESIDENCY_S) + 1))
    sum_s: float = 0.0

    def note(self, seconds: float) -> None:
        """Count one duration of ``seconds``."""
        self.counts[bisect_left(RESIDENCY_S, seconds)] += 1
        self.sum_s += seconds

    def note_many(self, seconds: float, number: int) -> None:
        """Count ``number`` durations of ``seconds`` each."""
        self.counts[bisect_left(RESIDENCY_S, seconds)] += number
        self.sum_s += seconds * number

    def median_s(self) -> float:
        """Return the median, interpolated within its bucket; 0: nothing was counted.

        A median in the last bucket, which has no upper limit, counts as its lower limit.
        """
        half, below = sum(self.counts) / 2, 0
        for place, count in enumerate(self.counts):
            if count and below + count >= half:
                low = RESIDENCY_S[place - 1] if place else 0.0
                high = RESIDENCY_S[place] if place < len(RESIDENCY_S) else low
                return low + (high - low) * (half - below) / count
            below += count
        return 0.0

    def copy(self) -> SecondsHistogram:
        return SecondsHistogram(self.counts.copy(), self.sum_s)


@dataclass(slots=True)
class BlockResidency:
    """Histograms of how long the cached blocks of one pool stay, are idle, and wait for reuse.

    Attributes:
        lifetime: time from a block's entry into the prefix cache to its eviction.
        idle_before_eviction: time from the release by the block's last holder to its eviction.
        reuse_gap: time from the release by the block's last holder until a request uses the block
            again.
    """

    lifetime: SecondsHistogram = field(default_factory=SecondsHistogram)
    idle_before_eviction: SecondsHistogram = field(default_factory=SecondsHistogram)
    reuse_gap: SecondsHistogram = field(default_factory=SecondsHistogram)

    def note_eviction(self, cached_at: float, freed_at: float, now: float) -> None:
        """Count the lifetime and the idle time of a block that is evicted now."""
        lifetime, idle = self.lifetime, self.idle_before_eviction
        lifetime.counts[bisect_left(RESIDENCY_S, now - cached_at)] += 1
        lifetime.sum_s += now - cached_at
        idle.counts[bisect_left(RESIDENCY_S, now - freed_at)] += 1
        idle.sum_s += now - freed_at

    def copy(self) -> BlockResidency:
        """Return a copy that later events do not change."""
        idle = self.idle_before_eviction
        return BlockResidency(self.lifetime.copy(), idle.copy(), self.reuse_gap.copy())
