"""BlockDigests: keyed digests of KV blocks, read from the KV cache's memory.

If a node has several ranks, a block is divided into slices, each written by one rank and read by
one rank. These two ranks compute the slice's digest, and the block's digest is the digest of its
slices' digests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from baton.kv.block_key import DIGEST_BYTES, BlockKey
from baton.kv.manifest import RankCopy
from kvconnector.blocks import LayerRange, Ranges, Slices
from kvconnector.layout import KVMemory
from kvconnector.protocol.digests import Written
from kvconnector.ranks.messages import DigestSlices
from kvconnector.transports.side_stream import SideStream

# GMAC allows each number only once per key. So each slice of a block has its own number, and the
# digest over all slices has a further number.
_PAIR_BITS = 20
_ALL_PAIRS = (1 << _PAIR_BITS) - 1


class AskedRanks(Protocol):
    """Asks the other ranks of this node for digests; `RanksTransport` implements this protocol."""

    def digest(self, make: Callable[[int], DigestSlices]) -> dict[int, list[bytes]]:
        """Send each other rank the message that ``make`` returns; return the digests by rank.

        ``make`` gets the number of this call, which the ranks' answers repeat.
        """


def _ranges(copies: Sequence[RankCopy], writes: bool) -> Ranges:
    return tuple((copy.source if writes else copy.target, copy.num_bytes) for copy in copies)


class BlockDigests:
    """Computes keyed digests of blocks, or of some of their layers.

    Args:
        memory: this rank's KV cache, which holds the blocks.
        ranks: the node's other ranks; None: the node has one rank.
    """

    def __init__(self, memory: KVMemory, ranks: AskedRanks | None = None) -> None:
        kv_cache = memory.tensor
        self._rank, self._ranks = memory.rank, ranks
        num_blocks, self.num_local_layers = kv_cache.shape[:2]
        self.num_layers = memory.manifest.layers_per_unit
        self._layers = kv_cache.view(num_blocks, self.num_local_layers, -1).view(torch.uint8)
        self._layer_bytes = self._layers.shape[2]
        self._side_stream = SideStream(kv_cache)
        # Slicing a memoryview takes a tenth of the time of slicing a tensor, and there are
        # thousands of slices.
        self._memory = None if kv_cache.is_cuda else self._layers.view(-1).numpy().data

    def of(
        self,
        block_ids: Sequence[int],
        written: Written,
        key: BlockKey,
        slices: Slices | None = None,
        *,
        writes: bool = True,
    ) -> bytes:
        """Return the digests of all blocks, joined; each digest has ``DIGEST_BYTES`` bytes.

        Args:
            slices: how the ranks of both nodes divide a block; None: each block is one slice.
            writes: whether this node writes the blocks; false: this node receives them.
        """
        if slices is not None and not slices.is_whole:
            return self._of_all_slices(block_ids, written, key, slices, writes)
        parts = zip(
            written.numbers,
            written.contexts(),
            self._read(block_ids, written.layers),
            strict=True,
        )
        return b"".join(key.digest(number, context, part) for number, context, part in parts)

    def of_slices(
        self,
        block_ids: Sequence[int],
        groups: Sequence[int],
        layers: LayerRange,
        written: Sequence[tuple[int, bytes]],
        key: BlockKey,
        slices: Slices,
        *,
        writes: bool,
    ) -> list[bytes]:
        """Return each block's digests of this rank's slices, joined in the order of `Slices.pairs`.

        Args:
            groups: KV group of each block; empty: there is only one group.
            written: for each block, the number of its digest, and the block's identity as bytes.
            writes: whether this rank's node writes the blocks; false: this node receives them.
        """
        digests = [b""] * len(block_ids)
        for kind, places in slices.sorted_by_kind(groups, len(block_ids)):
            ranges = [
                (slices.pairs.index(pair), _ranges(copies, writes))
                for pair, copies in slices.of(kind, layers).items()
                if (pair.writer if writes else pair.reader) == self._rank
            ]
            for place in places:
                number, context = written[place]
                block = self._whole(block_ids[place])
                digests[place] = b"".join(
                    key.digest(number << _PAIR_BITS | pair, context, memoryview(
                        b"".join(block[first : first + size] for first, size in parts)
                    ))
                    for pair, parts in ranges
                )  # fmt: skip
        return digests

    def _of_all_slices(
        self,
        block_ids: Sequence[int],
        written: Written,
        key: BlockKey,
        slices: Slices,
        writes: bool,
    ) -> bytes:
        """Return the digests of all blocks, joined; a block's digest covers its slices' digests."""
        numbered = list(zip(written.numbers, written.contexts(), strict=True))
        own = self.of_slices(
            block_ids, written.groups, written.layers, numbered, key, slices, writes=writes
        )
        others = self._ask_ranks(block_ids, written, numbered, key, writes)
        by_rank = {self._rank: own, **others}
        whole: list[bytes] = [b""] * len(block_ids)
        for kind, places in slices.sorted_by_kind(written.groups, len(block_ids)):
            ranks = [p.writer if writes else p.reader for p in slices.of(kind, written.layers)]
            for place in places:
                left = {rank: by_rank[rank][place] for rank in set(ranks)}
                parts = bytearray()
                for rank in ranks:  # both nodes use the same order of pairs
                    parts += left[rank][:DIGEST_BYTES]
                    left[rank] = left[rank][DIGEST_BYTES:]
                number, context = numbered[place]
                last = number << _PAIR_BITS | _ALL_PAIRS
                whole[place] = key.digest(last, context, memoryview(parts))
        return b"".join(whole)

    def _ask_ranks(
        self,
        block_ids: Sequence[int],
        written: Written,
        numbered: Sequence[tuple[int, bytes]],
        key: BlockKey,
        writes: bool,
    ) -> dict[int, list[bytes]]:
        """Return the other ranks' digests of their slices, by rank.

        Args:
            numbered: for each block, the number of its digest, and the block's identity as bytes.
        """
        if self._ranks is None:
            return {}
        return self._ranks.digest(
            lambda call: DigestSlices(
                call,
                written.peer,
                writes,
                list(block_ids),
                list(written.groups),
                written.layers,
                [number for number, _ in numbered],
                [context for _, context in numbered],
                key.secret,
            )
        )

    def _whole(self, block_id: int) -> memoryview:
        """Return all bytes of a block in this rank's memory."""
        size = self.num_local_layers * self._layer_bytes
        if self._memory is not None:
            return self._memory[block_id * size : (block_id + 1) * size]
        with self._side_stream.entered():
            copied = self._layers[block_id].cpu()
        return memoryview(copied.view(-1).numpy().data)

    def _read(self, block_ids: Sequence[int], layers: LayerRange) -> Iterator[memoryview]:
        first, end = (layer * self._layer_bytes for layer in layers)
        if self._memory is None:
            with self._side_stream.entered():
                copied = self._layers[list(block_ids), slice(*layers)].cpu()
            yield from (block.data for block in copied.view(len(block_ids), -1).numpy())
            return
        block_bytes = self.num_local_layers * self._layer_bytes
        for block_id in block_ids:
            yield self._memory[block_id * block_bytes + first : block_id * block_bytes + end]


def digests_are_wanted(option: bool | None, kv_connector: str) -> bool:
    """Return whether a decode node checks received blocks against digests.

    By default, blocks are checked if KV can travel beyond the loopback device without encryption.
    NIXL's UCX stays on loopback unless UCX_NET_DEVICES names another device (`nixl/agent.py`).
    """
    if option is not None:
        return option
    devices = os.environ.get("UCX_NET_DEVICES", "lo").split(",")
    return kv_connector == "nixl" and any(device.strip() != "lo" for device in devices)
