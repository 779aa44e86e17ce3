"""Quarantine: blocks of ended requests, held while their prefill node may still write them.

    held -> the node says that it is quiet ------------------------------> free
      `---> its process has ended, and what it had sent is taken in -----> free

A node that its router has lost may be alive: it stays connected while blocks are held for it.
Knows processes, peers and blocks; of a request its key alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.telemetry.ledger import BlockHolding, BlockOwner
from decode_node.grant_queue import Key
from engine.engine import Engine
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess

# A Cancel or its Quiet may be lost, or meet a link that is down: ask again while blocks are held.
RECANCEL_S = 1.0


@dataclass(slots=True)
class _Held:
    engine_id: str
    block_ids: tuple[int, ...]
    parked_at: float
    cancelled_at: float


class Quarantine:
    """Of one decode node.

    Args:
        engine: where the blocks are.
        receiver: watches, drains and disconnects peers.
        clock: seconds that never go back.
    """

    def __init__(self, engine: Engine, receiver: Receiver, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._receiver = receiver
        self._clock = clock
        self._held: dict[Key, _Held] = {}
        self._processes: dict[str, PeerProcess] = {}  # of all that were met and not forgotten
        self._gone: set[str] = set()
        self._draining: set[str] = set()

    def __len__(self) -> int:
        """Ended requests whose blocks are held."""
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(held.block_ids) for held in list(self._held.values()))

    # ------------------------------------------------------------------ peers

    def meet(self, peer: PeerInfo) -> None:
        """A peer came, or came back: watch its process while it is certain which one that is."""
        if peer.engine_id not in self._processes:
            self._processes[peer.engine_id] = self._receiver.watch(peer)
        self._forget_loss(peer.engine_id)

    def lose(self, engine_id: str) -> None:
        """A peer's router has lost it."""
        if engine_id in self._processes:
            self._gone.add(engine_id)

    def end_drained(self, engine_id: str) -> None:
        """Nothing of a dead peer can arrive any more, unless it came back: free what it held."""
        if engine_id in self._draining:
            for key in [key for key, held in self._held.items() if held.engine_id == engine_id]:
                self.free(key, engine_id)

    def _forget_loss(self, engine_id: str) -> None:
        self._gone.discard(engine_id)
        self._draining.discard(engine_id)

    def _is_dead(self, engine_id: str) -> bool:
        """Whether a peer's process certainly has ended. Of another machine we cannot say."""
        process = self._processes.get(engine_id)
        return process is not None and process.has_ended()

    # ------------------------------------------------------------------ blocks

    def add(self, key: Key, engine_id: str, block_ids: tuple[int, ...], parked_at: float) -> None:
        """Hold the blocks of a request whose peer has been asked to write no more.

        Args:
            parked_at: when the request came.
        """
        self._engine.block_pool.hold(block_ids)
        self._held[key] = _Held(engine_id, block_ids, parked_at, self._clock())

    def free(self, key: Key, engine_id: str) -> None:
        """A peer writes no more of a request; harmless when nothing is held of it."""
        held = self._held.get(key)
        if held is not None and held.engine_id == engine_id:
            del self._held[key]
            self._engine.block_pool.release(reversed(held.block_ids))

    def tick(self) -> None:
        """Have dead peers drained, forget who is quiet, ask the others again; now and then."""
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
                if self._is_dead(held.engine_id):  # and if we had no router then, nobody says so
                    self._gone.add(held.engine_id)
                held.cancelled_at = now
                self._receiver.cancel(request_id, epoch, held.engine_id)

    def ledger(self) -> list[BlockHolding]:
        """Blocks that peers may still write."""
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
