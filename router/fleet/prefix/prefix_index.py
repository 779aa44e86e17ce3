"""PrefixIndex: how much of a prompt each node has in its prefix cache.

    block hash     nodes that hold it,       match: walk the prompt's blocks, keep the bits that
                   as bits of a number       all so far have
       h0              1 1 0 1                   1 1 0 1
       h1              1 0 0 1                   1 0 0 1      node 2 has 1 block
       h2              0 0 1 1                   0 0 0 1      node 3 has 2, node 0 has 3

Exact for nodes whose events come without a gap. For others it goes by where prompts were placed
lately (`placement_memory.py`). An error costs a prompt computed again and nothing else: the node
looks for itself. Refuses to know: nodes' load, and who gets a request.

With several KV cache groups a node tells of the first, which keeps most: full attention if the
model has any. A window of another group may be gone, or the first one slide: then the node's hit is
shorter, or longer, than said here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.block_hash import ShortHash
from baton.link.words import KVCacheEvents
from router.fleet.prefix.placement_memory import PlacementMemory
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes

logger = logging.getLogger(__name__)

MAX_BLOCKS = 2**22
MAX_PLACED_BLOCKS = 2**18
PLACEMENT_LIFETIME_S = 600.0
SWEEP_BLOCKS = 2048
_MAX_SHARED_SETS = 2**16
MAX_KINDS = 8  # of names of blocks: every prompt is hashed for each of them


@dataclass(slots=True, eq=False)
class _Holder:
    """One life of a node in the index; a snapshot begins another one.

    Attributes:
        bit: a 1 in the node's place.
        blocks: what it holds, as far as there was room.
        num_left_out: contents that it holds beyond these.
        last_sequence: of its events; None: a snapshot is awaited.
        was_placed: whether the placement memory has, or had, something of it.
        generation: of the placement memory when this life ended.
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
    """All nodes of one router. Belongs to the router's event loop.

    Args:
        max_blocks: most pairs of a node and a block that it holds. What nodes hold beyond that is
            left out, and for them placements count as well.
        max_placed_blocks: most blocks whose placement is remembered.
        placement_lifetime_s: how long, at most.
        sweep_blocks: what a node had that went away is dropped in parts of so many, so that
            nobody's tokens wait for it.
        clock: seconds that never go back.

    Attributes:
        num_blocks: pairs of a node and a block; those of nodes that went away among them, until
            they are swept.
        num_left_out_total: pairs that found no room, since the start.
        num_gaps_total: times that a node's events had a gap.
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
        self.num_left_out_total = 0
        self.num_gaps_total = 0
        self._max_blocks = max_blocks
        self._sweep_blocks = sweep_blocks
        self._held: dict[ShortHash, int] = {}
        self._placed = PlacementMemory(max_placed_blocks, placement_lifetime_s, clock)
        self._holders: dict[str, _Holder] = {}  # by engine id
        self._kinds: set[HashKind] = set()
        self._places: list[_Holder | None] = []  # by place of the bit; None: free
        self._leaving: deque[_Holder] = deque()  # have blocks to be dropped; oldest first
        self._fading: deque[_Holder] = deque()  # have none; the placement memory has; oldest first
        self._exact = 0  # bits of nodes whose events are complete up to now
        self._guessed = 0  # bits of nodes for which placements count
        # Equal sets of nodes are one object: little memory, and quick to find equal.
        self._shared_sets: dict[int, int] = {}

    # ------------------------------------------------------------------ nodes

    def add(self, engine_id: str, kind: HashKind) -> None:
        """A node joined; until its snapshot comes, placements count.

        One whose kind is one too many is not here: nothing is known of its cache.
        """
        self.remove(engine_id)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            logger.warning("%s names blocks in one way too many; it is not indexed", engine_id)
            return
        self._enter(engine_id, kind)

    def remove(self, engine_id: str) -> None:
        """A node went away; harmless when it is not here."""
        holder = self._holders.pop(engine_id, None)
        if holder is not None:
            self._exact &= ~holder.bit
            self._guessed &= ~holder.bit
            holder.generation = self._placed.generation
            self._leaving.append(holder)
            self._kinds = {holder.kind for holder in self._holders.values()}

    def take(self, engine_id: str, events: KVCacheEvents) -> bool:
        """Take what a node said; returns whether it must be asked for a snapshot.

        Events behind a gap are of no use and dropped until that snapshot comes.
        """
        self._sweep()
        holder = self._holders.get(engine_id)
        if holder is None:
            return False
        if events.snapshot:
            if holder.blocks:  # dropping them here could take long
                self.remove(engine_id)
                holder = self._enter(engine_id, holder.kind)
            holder.num_left_out = 0
            self._exact |= holder.bit
        elif holder.last_sequence is None:
            return False
        elif events.sequence != holder.last_sequence + 1:
            self.num_gaps_total += 1
            self.remove(engine_id)
            self._enter(engine_id, holder.kind)
            return True
        holder.last_sequence = events.sequence
        self._drop(holder, events.removed)
        self._store(holder, events.stored)
        if holder.num_left_out:
            self._guessed |= holder.bit
        else:
            self._guessed &= ~holder.bit
        return False

    def is_exact(self, engine_id: str) -> bool:
        """Whether `match` says of this node what it holds, and not only what it was sent."""
        holder = self._holders.get(engine_id)
        return holder is not None and bool(holder.bit & self._exact & ~self._guessed)

    # ------------------------------------------------------------------ prompts

    def note_placement(self, engine_id: str, prompt: PromptHashes) -> None:
        """A prompt is sent to a node; forgotten at once if the node tells what it holds."""
        holder = self._holders.get(engine_id)
        if holder is not None and holder.bit & self._guessed:
            self._placed.expire()
            self._placed.note(holder.bit, prompt.of(holder.kind))
            holder.was_placed = True

    def match(self, hashes: Sequence[ShortHash]) -> dict[str, int]:
        """Blocks of the longest prefix that each node holds, by engine id; those with none are out.

        Args:
            hashes: of the prompt's blocks, the first one first.
        """
        found = self._walk(self._held.get, hashes, self._exact)
        if self._guessed:
            self._placed.expire()
            for engine_id, length in self._walk(self._placed.get, hashes, self._guessed).items():
                found[engine_id] = max(length, found.get(engine_id, 0))
        return found

    def match_tokens(self, prompt: PromptHashes) -> dict[str, int]:
        """The same in tokens, for nodes with blocks of any size; those with none are out."""
        return {
            engine_id: length * kind.block_size
            for kind in self._kinds
            for engine_id, length in self.match(prompt.of(kind)).items()
            if self._holders[engine_id].kind == kind
        }

    def _walk(
        self, get: Callable[[ShortHash, int], int], hashes: Sequence[ShortHash], candidates: int
    ) -> dict[str, int]:
        """Who of the candidates has how many of the first blocks without a break."""
        found: dict[str, int] = {}
        last, length = candidates, 0
        for block_hash in hashes:
            held = get(block_hash, 0)
            if held is not last:  # else it was looked at: sets are shared
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
        """Assert the invariants; O(num_blocks), for tests."""
        holders = [*self._holders.values(), *self._leaving, *self._fading]
        held: dict[ShortHash, int] = {}
        for holder in holders:
            assert self._places[holder.bit.bit_length() - 1] is holder
            for block_hash in holder.blocks:
                held[block_hash] = held.get(block_hash, 0) | holder.bit
        assert held == self._held
        assert self.num_blocks == sum(len(holder.blocks) for holder in holders)
        assert self.num_blocks <= self._max_blocks
        assert sum(place is not None for place in self._places) == len(holders)

    def _enter(self, engine_id: str, kind: HashKind) -> _Holder:
        """Give a node a place with nothing in it."""
        self._sweep()
        if None not in self._places:
            self._places.append(None)
        place = self._places.index(None)
        holder = _Holder(engine_id, kind, 1 << place)
        self._places[place] = holder
        self._holders[engine_id] = holder
        self._kinds.add(kind)
        self._guessed |= holder.bit
        return holder

    def _store(self, holder: _Holder, hashes: Sequence[ShortHash]) -> None:
        held, blocks, bit = self._held, holder.blocks, holder.bit
        room = self._max_blocks - self.num_blocks + len(blocks)
        for block_hash in hashes:
            if block_hash in blocks:
                continue
            if len(blocks) >= room:
                holder.num_left_out += 1
                self.num_left_out_total += 1
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
        if len(self._shared_sets) >= _MAX_SHARED_SETS:
            self._shared_sets.clear()
        return self._shared_sets.setdefault(nodes, nodes)

    def _sweep(self) -> None:
        """Drop a part of what nodes had that went away; free the places of those with nothing."""
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
            holder.blocks = set()  # an emptied one keeps its memory
            self._leaving.popleft()
            if holder.was_placed:
                self._fading.append(holder)
            else:
                self._free_place(holder)
        if self._fading:
            self._placed.expire()
        # Placements of before may not count for the next node in this place.
        while self._fading and self._placed.has_forgotten(self._fading[0].generation):
            self._free_place(self._fading.popleft())

    def _free_place(self, holder: _Holder) -> None:
        self._places[holder.bit.bit_length() - 1] = None
