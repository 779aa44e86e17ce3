"""The ledger: who holds which KV blocks of a node, as plain values. Knows no engine and no wire.

Every reference on a block has an owner who is named here. A reference without one is a leak (its
block is an orphan); an owner without one would lose its block to somebody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class BlockOwner(Enum):
    """The kinds of owners of a reference."""

    REQUEST = "request"  # waiting or running, and computed here
    GRANT = "grant"  # promised to a prefill node, which may write there
    QUARANTINE = "quarantine"  # of an ended request, and a prefill node may still write there
    PUSH = "push"  # travels to a decode node
    DRAINING = "draining"  # of an ended request, and a write may still read there
    STEP = "step in flight"  # of an ended request, and the step that runs still writes there
    NULL_BLOCK = "null block"  # stands for what slid out; held for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHolding:
    """One reference of one owner on each of these blocks.

    Attributes:
        state: of the request or the transfer, by name.
        peer: engine id of the node at the other end; empty when there is none.
        age_s: since the request came here.
    """

    owner: BlockOwner
    block_ids: tuple[int, ...]
    request_id: str = ""
    epoch: int = 0
    state: str = ""
    peer: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All references on a node's blocks at one moment between two steps.

    Attributes:
        num_references: that the block pool counts.
        orphans: blocks with more references than owners: they never become free.
        overdrawn: blocks with more owners than references.
    """

    holdings: tuple[BlockHolding, ...]
    num_blocks: int
    num_free_blocks: int
    num_references: int
    orphans: tuple[int, ...]
    overdrawn: tuple[int, ...]


def balance(
    holdings: Iterable[BlockHolding],
    ref_counts: Mapping[int, int],
    *,
    num_blocks: int,
    num_free_blocks: int,
) -> Ledger:
    """Compare what owners say they hold with what the pool counts.

    Args:
        ref_counts: of each block that has any.
    """
    holdings = tuple(holdings)
    named = Counter(block_id for holding in holdings for block_id in holding.block_ids)
    return Ledger(
        holdings=holdings,
        num_blocks=num_blocks,
        num_free_blocks=num_free_blocks,
        num_references=sum(ref_counts.values()),
        orphans=tuple(sorted(b for b, count in ref_counts.items() if count > named[b])),
        overdrawn=tuple(sorted(b for b in named if named[b] > ref_counts.get(b, 0))),
    )


def to_ranges(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    """``[(first id, number of ids), ...]``: ids that follow one another, in the order given."""
    ranges: list[tuple[int, int]] = []
    for block_id in block_ids:
        if ranges and sum(ranges[-1]) == block_id:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((block_id, 1))
    return ranges
