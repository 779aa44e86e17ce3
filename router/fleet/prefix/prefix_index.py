"""PrefixIndex: how much of a prompt each node has in its prefix cache.

    block hash   nodes that hold the block,    to match a prompt, visit its blocks and keep
                 as bits of an integer         the bits that all visited blocks have
       h0              1 1 0 1                   1 1 0 1
       h1              1 0 0 1                   1 0 0 1      node 2 has 1 block
       h2              0 0 1 1                   0 0 0 1      node 3 has 2, node 0 has 3

A node's first report, its snapshot, is kept as a set of hashes, and merged into this table later:
after a restart of a router, all nodes send snapshots at once.

The index is exact for nodes that report each change of their cache without a gap. For other nodes,
prompts that were lately sent to the node count as cached (`placement_memory.py`). If the index is
wrong, a prompt is only computed again, because nodes check their own caches.

A node with several KV cache groups reports only the first group, which keeps most: full attention
if the model has it. Blocks of other groups may be evicted, or the first group's window may slide,
so a node may find fewer or more cached tokens than the index says.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import ShortHash
from baton.link.words import KVCacheEvents
from router.fleet.prefix.placement_memory import PlacementMemory
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes

logger = logging.getLogger(__name__)

# Defaults of `PrefixIndex`'s arguments
MAX_BLOCKS = 2**22
MAX_PLACED_BLOCKS = 2**18
PLACEMENT_LIFETIME_S = 600.0
SWEEP_BLOCKS = 2048
# `merge_some` merges snapshots until it has merged this many blocks. That takes some milliseconds.
MERGE_BLOCKS = 2**13
# A prompt is looked up in no further unmerged snapshot once this many of its blocks were found.
MAX_LOOKED_UP = 2**14
_MAX_SHARED_SETS = 2**16  # maximum number of sets of nodes that are stored only once
MAX_KINDS = 8  # maximum number of kinds of block hashes, because a prompt is hashed once per kind


@dataclass(slots=True, eq=False)
class _Holder:
    """A node, and the cached blocks that it reported since its last snapshot.

    Attributes:
        bit: the node's bit in sets of nodes.
        blocks: hashes of the node's cached blocks, as far as the index had room.
        num_left_out: number of cached blocks for which the index had no room.
        last_sequence: sequence number of the node's last event; None: the node has not sent its
            snapshot yet.
        was_placed: whether the placement memory may have entries with this bit.
        generation: the placement memory's generation when the node left.
    """

    engine_id: str
    kind: HashKind
    bit: int
    blocks: set[ShortHash] = field(default_factory=set)
    num_left_out: int = 0
    last_sequence: int | None = None
    was_placed: bool = False
    generation: int = 0


class PrefixIndex:
    """Indexes the prefix caches of one base model's nodes, on the router's event loop.

    Args:
        max_blocks: maximum number of (node, block) entries. Further blocks are left out; then
            prompts that were sent to the blocks' nodes count as cached there.
        max_placed_blocks: maximum number of blocks whose placement is remembered.
        placement_lifetime_s: longest time that a placement is remembered.
        sweep_blocks: number of entries of removed nodes that are dropped at a time; dropping more
            would block the event loop.
        clock: returns monotonic seconds.

    Attributes:
        num_blocks: number of (node, block) entries, including entries of removed nodes that are not
            dropped yet.
    """

    def __init__(
        self,
        max_blocks: int = MAX_BLOCKS,
        *,
        max_placed_blocks: int = MAX_PLACED_BLOCKS,
        placement_lifetime_s: float = PLACEMENT_LIFETIME_S,
        sweep_blocks: int = SWEEP_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._sweep_blocks = sweep_blocks
        self._held: dict[ShortHash, int] = {}
        self._placed = PlacementMemory(max_placed_blocks, placement_lifetime_s, clock)
        self._holders: dict[str, _Holder] = {}  # nodes by engine id
        # Nodes whose snapshot is not merged into `_held` yet, by engine id, the oldest first
        self._unmerged: dict[str, _Holder] = {}
        self._left_out: dict[str, HashKind] = {}  # nodes that are left out, see `MAX_KINDS`
        self._kinds: set[HashKind] = set()
        self._places: list[_Holder | None] = []  # nodes by bit; None: the bit is free
        # Removed nodes whose blocks must still be dropped, oldest first
        self._leaving: deque[_Holder] = deque()
        # Removed nodes without entries here; the placement memory may still have their bits. Oldest
        # first.
        self._fading: deque[_Holder] = deque()
        self._exact = 0  # bits of nodes whose reports have had no gap since their snapshot
        self._inexact = 0  # bits of nodes for which prompts sent to them count as cached
        # Equal sets of nodes share one integer object, which saves memory and makes comparing
        # cheap.
        self._shared_sets: dict[int, int] = {}

    # ------------------------------------------------------------------ nodes

    def add_node(self, engine_id: str, kind: HashKind) -> None:
        """Add a node; until its snapshot arrives, prompts sent to it count as cached there.

        If nodes already have `MAX_KINDS` kinds of block hashes, a node with a further kind is left
        out until another kind has no nodes.
        """
        self.remove(engine_id)
        if not self._may_have(kind):
            self._left_out[engine_id] = kind
            logger.warning(
                "%s is not indexed: its block hashes are of one more kind than the maximum of %d",
                engine_id,
                MAX_KINDS,
            )
            return
        self._enter(engine_id, kind)

    def remove(self, engine_id: str) -> None:
        """Remove a node; do nothing if it is unknown."""
        self._left_out.pop(engine_id, None)
        holder = self._holders.pop(engine_id, None)
        if holder is not None:
            self._exact &= ~holder.bit
            self._inexact &= ~holder.bit
            if self._unmerged.pop(engine_id, None) is not None:
                self.num_blocks -= len(holder.blocks)
                holder.blocks = set()
            holder.generation = self._placed.generation
            self._leaving.append(holder)
            self._kinds = {holder.kind for holder in self._holders.values()}

    def apply_events(self, engine_id: str, events: KVCacheEvents) -> bool:
        """Apply a node's report of changes in its cache; return whether it must send a snapshot.

        After a gap in the reports, further reports are dropped until the snapshot arrives.
        """
        self._sweep()
        holder = self._holders.get(engine_id)
        if holder is None:
            kind = self._left_out.get(engine_id)
            if kind is None or not self._may_have(kind):
                return False
            holder = self._enter(engine_id, kind)
            if not events.snapshot:
                return True
        if events.snapshot:
            # `_sweep` drops the old blocks step by step, because dropping all now would take long
            if holder.blocks:
                self.remove(engine_id)
                holder = self._enter(engine_id, holder.kind)
            holder.num_left_out = 0
            self._exact |= holder.bit
        elif holder.last_sequence is None:
            return False
        elif events.sequence != holder.last_sequence + 1:
            self.remove(engine_id)
            self._enter(engine_id, holder.kind)
            return True
        holder.last_sequence = events.sequence
        if events.snapshot and self._keep_unmerged(holder, events.stored):
            self._inexact &= ~holder.bit
            return False
        if engine_id in self._unmerged:
            self._merge(engine_id)
        self._drop(holder, events.removed)
        self._store(holder, events.stored)
        if holder.num_left_out:
            self._inexact |= holder.bit
        else:
            self._inexact &= ~holder.bit
        return False

    def is_exact(self, engine_id: str) -> bool:
        """Return whether the index uses only the node's own reports, and not earlier placements."""
        holder = self._holders.get(engine_id)
        return holder is not None and bool(holder.bit & self._exact & ~self._inexact)

    # ------------------------------------------------------------------ prompts

    def note_placement(self, engine_id: str, prompt: PromptHashes) -> None:
        """Remember that a prompt is sent to a node, unless the node's reports are exact."""
        holder = self._holders.get(engine_id)
        if holder is not None and holder.bit & self._inexact:
            self._placed.expire()
            self._placed.note(holder.bit, prompt.of(holder.kind))
            holder.was_placed = True

    def match(self, hashes: Sequence[ShortHash]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each node has cached, by engine id.

        Nodes without the first block are left out.

        Args:
            hashes: hashes of the prompt's blocks, in order.
        """
        found = self._walk(self._held.get, hashes, self._exact)
        if self._unmerged:
            self._match_unmerged(hashes, found)
        if self._inexact:
            self._placed.expire()
            for engine_id, length in self._walk(self._placed.get, hashes, self._inexact).items():
                found[engine_id] = max(length, found.get(engine_id, 0))
        return found

    def match_tokens(self, prompt: PromptHashes) -> dict[str, int]:
        """Return how many leading tokens of a prompt each node has cached, by engine id."""
        return {
            engine_id: length * kind.block_size
            for kind in self._kinds
            for engine_id, length in self.match(prompt.of(kind)).items()
            if self._holders[engine_id].kind == kind
        }

    def ends_of(self, prompt: PromptHashes) -> tuple[ShortHash, ...]:
        """Return the hash of a prompt's last full block, for each kind of hashes of the nodes."""
        return tuple(hashes[-1] for kind in self._kinds if (hashes := prompt.of(kind)))

    def _match_unmerged(self, hashes: Sequence[ShortHash], found: dict[str, int]) -> None:
        """Add the nodes that are not merged yet to ``found``; then merge one of them.

        If many of them have long prefixes of the prompt, some are left out, to save time.
        """
        num_looked_up = 0
        for engine_id, holder in self._unmerged.items():
            blocks = holder.blocks
            if hashes and hashes[0] in blocks and num_looked_up < MAX_LOOKED_UP:
                missing = (place for place, one in enumerate(hashes) if one not in blocks)
                found[engine_id] = length = next(missing, len(hashes))
                num_looked_up += length
        self._merge(next(iter(self._unmerged)))

    def _walk(
        self, get: Callable[[ShortHash, int], int], hashes: Sequence[ShortHash], candidates: int
    ) -> dict[str, int]:
        """Return how many leading blocks each candidate has, by engine id.

        Args:
            get: returns the nodes that have a block, as bits.
            candidates: the nodes to look at, as bits.
        """
        found: dict[str, int] = {}
        last, length = candidates, 0
        for block_hash in hashes:
            held = get(block_hash, 0)
            # Equal sets are one object, so consecutive blocks rarely differ here
            if held is not last:
                last = held
                left = candidates & held
                if left != candidates:
                    if length:
                        self._note_length(found, candidates ^ left, length)
                    candidates = left
                    if not candidates:
                        return found
            length += 1
        if length:
            self._note_length(found, candidates, length)
        return found

    def _note_length(self, found: dict[str, int], bits: int, length: int) -> None:
        while bits:
            place = bits.bit_length() - 1
            bits ^= 1 << place
            holder = self._places[place]
            assert holder is not None
            found[holder.engine_id] = length

    # ------------------------------------------------------------------ inside

    def check(self) -> None:
        """Assert the index's invariants, for tests; takes time proportional to `num_blocks`."""
        holders = [*self._holders.values(), *self._leaving, *self._fading]
        held: dict[ShortHash, int] = {}
        for holder in holders:
            assert self._places[holder.bit.bit_length() - 1] is holder
            if self._unmerged.get(holder.engine_id) is holder:
                continue
            for block_hash in holder.blocks:
                held[block_hash] = held.get(block_hash, 0) | holder.bit
        assert held == self._held
        assert self.num_blocks == sum(len(holder.blocks) for holder in holders)
        assert self.num_blocks <= self._max_blocks
        assert sum(place is not None for place in self._places) == len(holders)

    def _may_have(self, kind: HashKind) -> bool:
        return kind in self._kinds or len(self._kinds) < MAX_KINDS

    def _enter(self, engine_id: str, kind: HashKind) -> _Holder:
        """Give a node a free bit, and an entry without blocks."""
        self._sweep()
        if None not in self._places:
            self._places.append(None)
        place = self._places.index(None)
        holder = _Holder(engine_id, kind, 1 << place)
        self._places[place] = holder
        self._holders[engine_id] = holder
        self._left_out.pop(engine_id, None)
        self._kinds.add(kind)
        self._inexact |= holder.bit
        return holder

    def _keep_unmerged(self, holder: _Holder, hashes: Sequence[ShortHash]) -> bool:
        """Keep a snapshot as it is, to be merged later; return False if it does not fit.

        `_held` is larger than the processor's caches, so merging takes ten times as long as
        keeping. After a restart of a router, all nodes send snapshots at once.
        """
        blocks = set(hashes)
        if self.num_blocks + len(blocks) > self._max_blocks:
            return False
        holder.blocks = blocks
        self.num_blocks += len(blocks)
        if blocks:
            self._unmerged[holder.engine_id] = holder
        return True

    def merge_some(self) -> None:
        """Merge some snapshots, so that prompts are matched faster; call in each beat interval."""
        num_merged = 0
        while self._unmerged and num_merged < MERGE_BLOCKS:
            num_merged += self._merge(next(iter(self._unmerged)))

    def _merge(self, engine_id: str) -> int:
        """Merge a node's snapshot into `_held`; return the number of its blocks."""
        holder, held = self._unmerged.pop(engine_id), self._held
        bit, share = holder.bit, self._share
        for block_hash in holder.blocks:
            others = held.get(block_hash)
            held[block_hash] = bit if others is None else share(others | bit)
        return len(holder.blocks)

    def _store(self, holder: _Holder, hashes: Sequence[ShortHash]) -> None:
        held, blocks, bit = self._held, holder.blocks, holder.bit
        room = self._max_blocks - self.num_blocks + len(blocks)
        for block_hash in hashes:
            if block_hash in blocks:
                continue
            if len(blocks) >= room:
                holder.num_left_out += 1
                continue
            blocks.add(block_hash)
            others = held.get(block_hash)
            held[block_hash] = bit if others is None else self._share(others | bit)
        self.num_blocks = self._max_blocks - room + len(blocks)

    def _drop(self, holder: _Holder, hashes: Sequence[ShortHash]) -> None:
        blocks = holder.blocks
        for block_hash in hashes:
            if block_hash in blocks:
                blocks.remove(block_hash)
                self.num_blocks -= 1
                self._forget(block_hash, holder.bit)
            elif holder.num_left_out:
                holder.num_left_out -= 1

    def _forget(self, block_hash: ShortHash, bit: int) -> None:
        others = self._held[block_hash] ^ bit
        if others:
            self._held[block_hash] = self._share(others)
        else:
            del self._held[block_hash]

    def _share(self, nodes: int) -> int:
        """Return the one stored integer object that is equal to this set of nodes."""
        if len(self._shared_sets) >= _MAX_SHARED_SETS:
            self._shared_sets.clear()
        return self._shared_sets.setdefault(nodes, nodes)

    def _sweep(self) -> None:
        """Drop some blocks of removed nodes; free the bits of removed nodes without blocks."""
        room = self._sweep_blocks
        while self._leaving:
            holder = self._leaving[0]
            num_dropped = min(room, len(holder.blocks))
            for _ in range(num_dropped):
                self._forget(holder.blocks.pop(), holder.bit)
            room -= num_dropped
            self.num_blocks -= num_dropped
            if holder.blocks:
                break
            holder.blocks = set()  # frees the memory, which an emptied set would keep
            self._leaving.popleft()
            if holder.was_placed:
                self._fading.append(holder)
            else:
                self._free_place(holder)
        if self._fading:
            self._placed.expire()
        # A bit becomes free only when the placement memory has forgotten it, so that old entries do
        # not count for the next node with this bit.
        while self._fading and self._placed.has_forgotten(self._fading[0].generation):
            self._free_place(self._fading.popleft())

    def _free_place(self, holder: _Holder) -> None:
        self._places[holder.bit.bit_length() - 1] = None
