"""Measure memory ranges per transfer after an hour in which requests come, grow and end.

The block pools of two nodes are 90 % full; nothing is computed, and the clock is simulated. A
request takes its prompt's blocks on both nodes, takes more blocks on the decode node as it grows,
and frees its blocks on both nodes at random times. Both ways of allocating blocks get the same
requests.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass, field

from benchmarks.runner.environment import summary
from engine.core.block_pool import BlockPool
from kvconnector.blocks import count_runs

NUM_BLOCKS = 8192
BLOCK_SIZE = 16
OCCUPANCY = 0.9
HOUR_S = 3600.0
TOKEN_S = 0.03  # seconds per decoded token
MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 1000, 300


@dataclass(slots=True)
class _Held:
    """The blocks of a request on the prefill node (p) and on the decode node (d)."""

    p: list[int]
    d: list[int]
    output_blocks_left: int


@dataclass(slots=True)
class _Churn:
    """The block pools of a prefill node (p) and a decode node (d), and future events."""

    extents: bool
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    p: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    d: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    events: list[tuple[float, int, str, _Held]] = field(default_factory=list)
    num_events: int = 0
    allocate_s: float = 0.0
    num_allocated: int = 0
    next_blocks: int = 1  # number of prompt blocks of the next request

    def fill(self, now: float) -> list[tuple[int, int]]:
        """Fill the pools with requests; return each transfer's number of blocks and of ranges."""
        transfers: list[tuple[int, int]] = []
        spare = int(NUM_BLOCKS * (1 - OCCUPANCY))
        while True:
            num_blocks = self.next_blocks
            if min(self.p.num_free, self.d.num_free) - num_blocks - 1 < spare:
                return transfers
            self.next_blocks = self._draw_blocks()
            started = time.perf_counter()
            p = self.p.allocate(num_blocks, extents=self.extents)
            # the prompt's blocks, and one for the first output tokens
            d = self.d.allocate(num_blocks + 1, extents=self.extents)
            self.allocate_s += time.perf_counter() - started
            assert p is not None
            assert d is not None
            self.num_allocated += len(p) + len(d)
            # Sorted by the sender's order of writes
            pairs = sorted(zip(p, d, strict=False))
            transfers.append((num_blocks, count_runs([a for a, _ in pairs], [b for _, b in pairs])))
            num_output = self.draw.expovariate(1 / MEAN_OUTPUT_TOKENS)
            held = _Held(p, d, int(num_output / BLOCK_SIZE))
            stay_s = self.draw.expovariate(1 / (MEAN_OUTPUT_TOKENS * TOKEN_S))
            self._later(now + stay_s, "leave p", held)
            self._later(now + BLOCK_SIZE * TOKEN_S, "grow", held)

    def advance(self) -> float:
        """Handle the next event; return its time in seconds."""
        now, _, what, held = heapq.heappop(self.events)
        if what == "leave p":
            self.p.release(reversed(held.p))
        elif held.output_blocks_left and (grown := self.d.allocate(1)) is not None:
            held.d += grown
            held.output_blocks_left -= 1
            self._later(now + BLOCK_SIZE * TOKEN_S, "grow", held)
        else:
            self.d.release(reversed(held.d))
        return now

    def _draw_blocks(self) -> int:
        """Draw a prompt's number of blocks, for a log-normal number of tokens."""
        num_tokens = self.draw.lognormvariate(0, 0.8) * MEAN_PROMPT_TOKENS / math.exp(0.8**2 / 2)
        return -(-min(int(num_tokens) + 1, 8000) // BLOCK_SIZE)

    def _later(self, when: float, what: str, held: _Held) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, what, held))


def measure_churn(hours: float = 1.0) -> dict[str, object]:
    """Return, by way of allocating, the ranges per transfer and the cost of allocating.

    Ranges are counted in the last tenth of the time.
    """
    results: dict[str, object] = {}
    for name, extents in (("oldest first", False), ("extents", True)):
        churn = _Churn(extents)
        now, late, num_transfers = 0.0, list[tuple[int, int]](), 0
        while now < hours * HOUR_S:
            transfers = churn.fill(now)
            num_transfers += len(transfers)
            if now > 0.9 * hours * HOUR_S:
                late += transfers
            now = churn.advance()
        num_blocks = sum(blocks for blocks, _ in late)
        num_ranges = sum(ranges for _, ranges in late)
        results[name] = {
            "num_transfers": num_transfers,
            "occupancy_at_end": round(1 - churn.d.num_free / NUM_BLOCKS, 3),
            "blocks_per_transfer": summary([blocks for blocks, _ in late]),
            "descriptors_per_transfer": summary([ranges for _, ranges in late]),
            "descriptors_per_block": round(num_ranges / num_blocks, 4),
            "allocate_us_per_block": round(churn.allocate_s / churn.num_allocated * 1e6, 3),
        }
    return results
