"""Predicts the exposed transfer of a hand-off over a link from the times of prefills.

    chunk 1 | chunk 2 | ... | last chunk     computed, one after the other
             ->        ->     -> -> -> ->    pushed: chunks, then the last chunk's groups of layers
                ======   ======  == == ==|   carried by the link, in the same order
                                      exposed: from the last push to the end of the last bytes

The time of a prefill of n chunks is fitted as ``a n + b n^2``. The share `PAYLOAD_SHARE` of the
link's rate carries KV. "The link is faster than the prefill makes KV" means: at the last push, only
the last group of layers is left for the link to carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from baton.limits import NUM_LAYER_GROUPS

# 1,448 of the 1,514 bytes of an Ethernet frame are KV; the others are headers of Ethernet, IP, TCP
PAYLOAD_SHARE = 1448 / 1514
BITS = 8


@dataclass(frozen=True, slots=True)
class Prefills:
    """The time of prefills of one model: ``a * n + b * n**2`` seconds for n chunks."""

    a: float
    b: float

    @classmethod
    def fit(cls, seconds: Mapping[int, float]) -> Prefills:
        """Fit the times of at least two numbers of chunks, each weighted by its own length."""
        # least squares of the relative errors: (a n + b n^2) / t = 1
        found = np.linalg.lstsq(
            np.array([(n / t, n * n / t) for n, t in seconds.items()]), np.ones(len(seconds))
        )[0]
        return cls(float(found[0]), float(found[1]))

    def ends_at(self, num_chunks: float) -> float:
        """Return after how many seconds the first ``num_chunks`` chunks are computed."""
        return self.a * num_chunks + self.b * num_chunks**2


def push_queue(
    prefills: Prefills, num_chunks: int, num_bytes: float, mode: str
) -> list[tuple[float, float]]:
    """Return the time and the bytes of each push of a prompt, in order."""
    end_s, chunk_bytes = prefills.ends_at(num_chunks), num_bytes / num_chunks
    if mode == "after-prefill":
        return [(end_s, num_bytes)]
    chunks = [(prefills.ends_at(n), chunk_bytes) for n in range(1, num_chunks)]
    last_s = end_s - prefills.ends_at(num_chunks - 1)
    groups = range(NUM_LAYER_GROUPS)
    return chunks + [
        (end_s - last_s * (NUM_LAYER_GROUPS - 1 - g) / NUM_LAYER_GROUPS,
         chunk_bytes / NUM_LAYER_GROUPS)
        for g in groups
    ]  # fmt: skip


def exposed_s(queue: list[tuple[float, float]], rate: float) -> float:
    """Return the seconds from the last push until a link of ``rate`` Gbit/s has carried all KV."""
    bytes_per_s = PAYLOAD_SHARE * rate * 1e9 / BITS
    free_at = 0.0
    for pushed_at, num_bytes in queue:
        free_at = max(free_at, pushed_at) + num_bytes / bytes_per_s
    return free_at - queue[-1][0]


def least_rate(queue: list[tuple[float, float]]) -> float:
    """Return the lowest rate, in Gbit/s, of a link that is faster than the prefill makes KV."""
    slow, fast = 1e-6, 1e6
    while fast / slow > 1.001:
        rate = (slow * fast) ** 0.5
        waits = exposed_s(queue, rate) > 1.001 * exposed_s(queue[-1:], rate)
        slow, fast = (rate, fast) if waits else (slow, rate)
    return fast
