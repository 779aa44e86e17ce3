"""Quarantine: blocks of ended transfers, held while their sender may still write them.

    held -> the sender sends Quiet -------------------------------------------> free
      |---> the sender's process has ended, and all its messages are read ----> free
      `---> the transport's `forbid` finds that no write can arrive any more -> free

A sender that the router has lost may be alive, so it stays connected while blocks that it may write
are held. Decode nodes hold KV blocks, and prefill nodes hold units of encodings. Refuses to know:
requests, except for their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton.telemetry.ledger import BlockHolding, BlockOwner
from kvconnector.base import TransferKey
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess

# Seconds after which `Cancel` is repeated while blocks are held, because `Cancel` or its `Quiet`
# may be lost.
RECANCEL_S = 1.0


class HeldBlocks(Protocol):
    """A node's blocks (or units of encodings), which are free once they have no references."""

    def hold(self, block_ids: Iterable[int], /) -> None:
        """Add a reference to each of these blocks."""

    def release(self, block_ids: Iterable[int], /) -> None:
        """Drop a reference to each of these blocks."""


@dataclass(slots=True)
class _Held:
    engine_id: str
    block_ids: tuple[int, ...]
    parked_at: float
    cancelled_at: float


class Quarantine:
    """The blocks of ended transfers that peers may still write, on one node.

    Args:
        blocks: the node's blocks, which have reference counts.
        receiver: watches, drains and disconnects peers.
        clock: returns seconds, never going back.
    """

    def __init__(self, blocks: HeldBlocks, receiver: Receiver, clock: Callable[[], float]) -> None:
        self._blocks = blocks
        self._receiver = receiver
        self._clock = clock
        self._held: dict[TransferKey, _Held] = {}
        self._processes: dict[str, PeerProcess] = {}  # processes of known peers, by engine id
        self._gone: set[str] = set()
        self._draining: set[str] = set()

    def __len__(self) -> int:
        """Return the number of ended requests whose blocks are held."""
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(held.block_ids) for held in list(self._held.values()))

    def list_blocks(self) -> Iterator[int]:
        """Yield all blocks in quarantine."""
        for held in self._held.values():
            yield from held.block_ids

    # ------------------------------------------------------------------ peers

    def meet(self, peer: PeerInfo) -> None:
        """Watch the process of a peer that connects, or connects again.

        Call this while the process id certainly still belongs to the peer.
        """
        if peer.engine_id not in self._processes:
            self._processes[peer.engine_id] = self._receiver.watch(peer)
        self._forget_loss(peer.engine_id)

    def lose(self, engine_id: str) -> None:
        """Record that the router has lost a peer, which stays connected while blocks are held."""
        if engine_id in self._processes:
            self._gone.add(engine_id)

    def end_drained(self, engine_id: str) -> None:
        """Free the blocks of a dead peer whose messages are all read, unless it connected again."""
        if engine_id in self._draining:
            for key in [key for key, held in self._held.items() if held.engine_id == engine_id]:
                self.free(key, engine_id)

    def _forget_loss(self, engine_id: str) -> None:
        self._gone.discard(engine_id)
        self._draining.discard(engine_id)

    def _is_dead(self, engine_id: str) -> bool:
        """Return whether a peer's process has certainly ended; False for another machine's."""
        process = self._processes.get(engine_id)
        return process is not None and process.has_ended()

    # ------------------------------------------------------------------ blocks

    def hold_blocks(
        self, key: TransferKey, engine_id: str, block_ids: tuple[int, ...], parked_at: float
    ) -> None:
        """Hold the blocks of an ended request until its sender certainly writes no more.

        Args:
            parked_at: when the request arrived, by the node's clock.
        """
        self._blocks.hold(block_ids)
        self._held[key] = _Held(engine_id, block_ids, parked_at, self._clock())

    def free(self, key: TransferKey, engine_id: str) -> None:
        """Free a request's blocks, because its peer writes no more.

        Do nothing if no blocks are held for the request and this peer.
        """
        held = self._held.get(key)
        if held is not None and held.engine_id == engine_id:
            del self._held[key]
            self._blocks.release(reversed(held.block_ids))

    def tick(self) -> None:
        """Drain dead peers, disconnect lost peers without held blocks, repeat `Cancel`."""
        now = self._clock()
        may_write = {held.engine_id for held in self._held.values()}
        for engine_id in list(self._gone):
            if engine_id not in may_write:
                self._forget_loss(engine_id)
                self._processes.pop(engine_id).close()
                self._receiver.disconnect(engine_id)
            elif engine_id not in self._draining and self._is_dead(engine_id):
                self._draining.add(engine_id)
                self._receiver.drain(engine_id)
        for (request_id, epoch), held in self._held.items():
            if now - held.cancelled_at >= RECANCEL_S:
                if self._is_dead(held.engine_id):  # no router may have reported this death
                    self._gone.add(held.engine_id)
                held.cancelled_at = now
                self._receiver.cancel(request_id, epoch, held.engine_id)

    def ledger(self) -> list[BlockHolding]:
        """Return the blocks in quarantine, for the ledger that operators read."""
        now = self._clock()
        return [
            BlockHolding(
                owner=BlockOwner.QUARANTINE,
                block_ids=held.block_ids,
                request_id=request_id,
                epoch=epoch,
                state="QUARANTINED",
                peer=held.engine_id,
                age_s=now - held.parked_at,
            )
            for (request_id, epoch), held in self._held.items()
        ]
