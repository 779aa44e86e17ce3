"""The ledger: the owners of a node's KV blocks, as plain values. Knows no engine, no wire format.

Each reference to a block must have an owner in the ledger. A reference without an owner is a leak,
and its block is an orphan, which never becomes free. If an owner has no reference to its block, the
block could be given to another owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class BlockOwner(Enum):
    """Kinds of owners that references to blocks may have."""

    REQUEST = "request"  # a request that waits or runs on this node
    GRANT = "grant"  # promised to a prefill node, which may write the block
    QUARANTINE = "quarantine"  # the request has ended, but a prefill node may still write the block
    PUSH = "push"  # is being sent to a decode node
    DRAINING = "draining"  # the request has ended, but a push may still read the block
    STEP = "step in flight"  # the request has ended, but the running step still writes the block
    CACHE = "cache"  # encodings that an encode node keeps for later commands
    NULL_BLOCK = "null block"  # placeholder for blocks outside a sliding window, held for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHolding:
    """The references of one owner, which has one reference to each of its blocks.

    Attributes:
        state: name of the state of the owning request or transfer.
        peer: engine id of the node at the other end of a transfer; empty: there is no such node.
        age_s: seconds since the request reached this node.
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
    """All references to a node's blocks and their owners, at one moment between two steps.

    Attributes:
        num_references: references that the block pool counts.
        orphans: blocks with more references than owners; they never become free.
        overdrawn: blocks with more owners than references.
        encodings: ledger of the memory in which a prefill node receives encodings of images; None:
            the node receives none.
    """

    holdings: tuple[BlockHolding, ...]
    num_blocks: int
    num_free_blocks: int
    num_references: int
    orphans: tuple[int, ...]
    overdrawn: tuple[int, ...]
    encodings: Ledger | None = None

    @property
    def num_orphans(self) -> int:
        """Number of orphans, those of encodings included."""
        return len(self.orphans) + (self.encodings.num_orphans if self.encodings else 0)

    @property
    def num_overdrawn(self) -> int:
        """Number of overdrawn blocks, those of encodings included."""
        return len(self.overdrawn) + (self.encodings.num_overdrawn if self.encodings else 0)


def balance(
    holdings: Iterable[BlockHolding],
    ref_counts: Mapping[int, int],
    *,
    num_blocks: int,
    num_free_blocks: int,
) -> Ledger:
    """Make the ledger of a node: compare the owners' references with the counts of the block pool.

    Args:
        holdings: the references of all owners.
        ref_counts: the pool's reference count of each block; blocks without references may be left
            out.
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
    """Return runs of consecutive ids, in the given order, as (first id, number of ids) pairs."""
    ranges: list[tuple[int, int]] = []
    for block_id in block_ids:
        if ranges and sum(ranges[-1]) == block_id:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((block_id, 1))
    return ranges
