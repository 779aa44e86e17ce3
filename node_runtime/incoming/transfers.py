"""IncomingTransfers: all transfers of one kind that other nodes send, or will send, to this node.

    EXPECTED -> STARTED -> granted -> received          the owner uses the received blocks
        `----------`----------`-----> lost              the owner works without them

A node's owners are `Fetches` (cached prefixes) and, on a prefill node, `Arrivals` (encodings of
images). An owner expects a transfer when a command of the router comes. A transfer is lost when its
sender refuses, dies, is silent or takes too long. Blocks that the sender may still write go into
quarantine. Refuses to know: what is sent, and for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from baton.kv.encodings import request_of
from baton.kv.prefixes import node_of
from baton.telemetry.ledger import BlockHolding, BlockOwner
from kvconnector.base import KVReservation, TransferEvent, TransferEventKind, TransferKey
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from node_runtime.quarantine import HeldBlocks, Quarantine

# Seconds for which to remember an ended transfer, and a message that came before its command.
MEMORY_S = 60.0
MAX_EARLY = 10_000  # maximum number of early messages; their commands may never come
TICK_S = 0.1


@dataclass(slots=True, kw_only=True)
class IncomingTransfer:
    """One transfer that another node sends, or will send; owners add fields in subclasses.

    Attributes:
        engine_id: the sending end.
        received_at: when the command came.
        expires_at: when the transfer is given up.
        started: whether the sender's `Start` has come.
        held_ids: blocks to which the transfer has references, but which nobody writes.
        block_ids: blocks that the sender may write; empty before the grant.
    """

    engine_id: str
    received_at: float
    expires_at: float
    started: bool = False
    held_ids: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()


Sent = TypeVar("Sent", bound=IncomingTransfer)
OwnersSent = TypeVar("OwnersSent", bound=IncomingTransfer, contravariant=True)


class TransferOwner(Protocol[OwnersSent]):
    """Decides about the transfers of one kind. Each method but `start` must end the transfer."""

    def start(self, key: TransferKey, transfer: OwnersSent, num_tokens: int) -> None:
        """Grant blocks now or later, or lose the transfer; called once.

        Args:
            num_tokens: tokens or embeddings that the sender has; 0: the sender sends nothing.
        """

    def receive(self, key: TransferKey, transfer: OwnersSent, event: TransferEvent) -> None:
        """Use a transfer whose bytes are complete; the sender writes no more."""

    def lose(
        self, key: TransferKey, transfer: OwnersSent, why: str, *, quiet: bool = False
    ) -> None:
        """Give a transfer up.

        Args:
            quiet: whether the sender certainly writes no more for this transfer.
        """


@dataclass(frozen=True, slots=True)
class TransferWords:
    """Words about one kind of transfers, for logs and the ledger.

    Attributes:
        sender: noun for the sending node, such as holder.
        granted: name of the state after the grant.
    """

    sender: str
    granted: str


class IncomingTransfers(Generic[Sent]):
    """The transfers of one kind, and the peers that send them. Used on the node's thread.

    Args:
        owner: decides about each transfer.
        words: words about this kind.
        blocks: reference counts of the blocks that peers write.
        receiver: sends grants to peers.
        clock: returns seconds, never going back.

    Attributes:
        quarantine: blocks that peers may still write after a transfer's end.
        open: transfers that are expected, started or granted, the oldest first.
    """

    def __init__(
        self,
        owner: TransferOwner[Sent],
        words: TransferWords,
        blocks: HeldBlocks,
        receiver: Receiver,
        clock: Callable[[], float],
    ) -> None:
        self._owner, self._words, self._blocks = owner, words, blocks
        self._receiver, self._clock = receiver, clock
        self.quarantine = Quarantine(blocks, receiver, clock)
        self.open: dict[TransferKey, Sent] = {}
        self._connected: set[str] = set()  # sending ends
        # Messages that came before their commands, by transfer and sender: time of arrival, and
        # number of the sender's tokens. The oldest comes first.
        self._early: dict[tuple[TransferKey, str], tuple[float, int]] = {}
        self._ended: dict[TransferKey, float] = {}  # when each transfer ended, for a late `Start`
        self._tick_at = 0.0

    # ------------------------------------------------------------------ commands

    def can_come(self, key: TransferKey, engine_id: str) -> bool:
        """Return whether a transfer can come: its sender is connected, and it has not ended."""
        return engine_id in self._connected and key not in self._ended

    def early_tokens(self, key: TransferKey, engine_id: str) -> int | None:
        """Return the tokens that a sender has, if its message came before the command.

        Returns 0 if the sender sends nothing, None if no message has come.
        """
        early = self._early.get((key, engine_id))
        return None if early is None else early[1]

    def expect(self, key: TransferKey, transfer: Sent) -> None:
        """Expect a transfer, which may have started already."""
        early = self._early.pop((key, transfer.engine_id), None)
        self.open[key] = transfer
        if early is not None:
            self._start(key, transfer, early[1])

    def refuse(self, key: TransferKey, engine_id: str) -> None:
        """Refuse a transfer: cancel it as soon as its `Start` has come."""
        self._ended[key] = self._clock()
        if self._early.pop((key, engine_id), None) is not None:
            self._receiver.cancel(*key, engine_id)

    def note_ended(self, key: TransferKey) -> None:
        """Remember an ended request; its command or its `Start` may never come."""
        self._ended.setdefault(key, self._clock())

    def grant(
        self,
        key: TransferKey,
        transfer: Sent,
        block_ids: Iterable[int],
        first_block: int = 0,
        groups: tuple[int, ...] = (),
    ) -> None:
        """Allow a sender to write blocks; see `KVReservation` for the arguments."""
        transfer.block_ids = tuple(block_ids)
        self._receiver.grant(
            KVReservation(
                request_id=key[0],
                epoch=key[1],
                engine_id=transfer.engine_id,
                block_ids=transfer.block_ids,
                first_block=first_block,
                groups=groups,
            )
        )

    def end(self, key: TransferKey, transfer: Sent, *, quiet: bool) -> None:
        """End a transfer; free its blocks, or quarantine blocks that may still be written.

        Args:
            quiet: whether the sender certainly writes no more for this transfer.
        """
        del self.open[key]
        self._ended[key] = self._clock()
        blocks, transfer.block_ids = transfer.block_ids, ()
        if transfer.started and not quiet:
            if blocks:
                self.quarantine.hold_blocks(key, transfer.engine_id, blocks, transfer.received_at)
            self._receiver.cancel(*key, transfer.engine_id)
        # Release the last block first, so that the cache keeps the first blocks of a prefix
        # longest.
        self._blocks.release(reversed(blocks))
        self._blocks.release(reversed(transfer.held_ids))

    # ------------------------------------------------------------------ peers

    def add_peer(self, peer: PeerInfo) -> None:
        """Connect a sending end that joined the router, or joined it again."""
        self.quarantine.meet(peer)
        self._receiver.connect(peer)

    def lose_peer(self, engine_id: str) -> None:
        """Give up the transfers of a sending end that the router has lost.

        The node may be alive: it stays connected until it sends `Quiet`, or is known to be dead.
        """
        self._connected.discard(engine_id)
        self.quarantine.lose(engine_id)
        self._lose_all(engine_id, f"its {self._words.sender} is gone")

    def step(self) -> list[TransferEvent]:
        """Handle events and deadlines; return the events that concern peers."""
        peer_events = []
        for event in self._receiver.poll():
            match event.kind:
                case TransferEventKind.PEER_CONNECTED:
                    self._connected.add(event.engine_id)
                    peer_events.append(event)
                case TransferEventKind.PEER_FAILED:
                    self._connected.discard(event.engine_id)
                    self._lose_all(event.engine_id, f"its {self._words.sender} cannot be reached")
                    peer_events.append(event)
                case TransferEventKind.PEER_DRAINED:
                    self.quarantine.end_drained(event.engine_id)
                case _:
                    self._settle(event)
        self._tick()
        self._receiver.expect(bool(self.open or self.quarantine))
        return peer_events

    def _settle(self, event: TransferEvent) -> None:
        key = (event.request_id, event.epoch)
        transfer = self.open.get(key)
        if transfer is None or transfer.engine_id != event.engine_id:
            self._settle_ended(key, event)
            return
        match event.kind:
            case TransferEventKind.STARTED:
                self._start(key, transfer, event.num_tokens)
            case TransferEventKind.COMMITTED:
                self._owner.receive(key, transfer, event)
            case TransferEventKind.FAILED:
                self._owner.lose(key, transfer, event.reason or "it was cancelled", quiet=True)
            case _:  # watermarks are not needed
                pass

    def _start(self, key: TransferKey, transfer: Sent, num_tokens: int) -> None:
        """Let the owner grant blocks, only once: a `Start` may come several times."""
        if not transfer.started:
            transfer.started = True
            self._owner.start(key, transfer, num_tokens)

    def _settle_ended(self, key: TransferKey, event: TransferEvent) -> None:
        """Apply an event of a transfer that has ended here, or whose command has not come yet."""
        match event.kind:
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                self.quarantine.free(key, event.engine_id)
                self._remember_early(key, event.engine_id, 0)
            case TransferEventKind.STARTED if key in self._ended:
                self._receiver.cancel(*key, event.engine_id)
            case TransferEventKind.STARTED:
                self._remember_early(key, event.engine_id, event.num_tokens)
            case _:
                pass

    def _remember_early(self, key: TransferKey, engine_id: str, num_tokens: int) -> None:
        """Store a sender's message until the command comes; ignored if the transfer has ended."""
        # The table is sorted by time, so an entry with a new time must move to the end.
        self._early.pop((key, engine_id), None)
        if key in self._ended:
            return
        self._early[key, engine_id] = self._clock(), num_tokens
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def _lose_all(self, engine_id: str, why: str) -> None:
        """Give up all transfers of one sending end."""
        for key, transfer in list(self.open.items()):
            if transfer.engine_id == engine_id:
                self._owner.lose(key, transfer, why)

    def _tick(self) -> None:
        """Give up late transfers, run the quarantine's work, and forget old entries."""
        now = self._clock()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        for key, transfer in list(self.open.items()):
            if now > transfer.expires_at:
                waited_s = transfer.expires_at - transfer.received_at
                self._owner.lose(key, transfer, f"not here in {waited_s:.3g} s")
        self.quarantine.tick()
        oldest = now - MEMORY_S
        while self._early and next(iter(self._early.values()))[0] < oldest:
            del self._early[next(iter(self._early))]
        while self._ended and next(iter(self._ended.values())) < oldest:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Number of open transfers, and of lost transfers in quarantine."""
        return len(self.open) + len(self.quarantine)

    def held(self) -> list[BlockHolding]:
        """Return the blocks of open transfers and the quarantine, for the ledger."""
        now = self._clock()
        granted = [
            BlockHolding(
                owner=BlockOwner.GRANT,
                block_ids=(*transfer.held_ids, *transfer.block_ids),
                request_id=key[0],
                epoch=key[1],
                state=self._words.granted,
                peer=transfer.engine_id,
                age_s=now - transfer.received_at,
            )
            for key, transfer in self.open.items()
            if transfer.block_ids
        ]
        return [
            replace(one, request_id=request_of(one.request_id), peer=node_of(one.peer))
            for one in (*granted, *self.quarantine.ledger())
        ]
