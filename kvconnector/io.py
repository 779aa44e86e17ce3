"""IoLoop: the KV I/O thread, which carries out the actions of the protocol's state machine.

Only this thread uses the transport and the state machine; other threads queue wishes for the
thread. If the transport has a descriptor for its events, the thread sleeps until an event comes.
Otherwise the thread polls: often while bytes are in flight (without pauses if a GPU writes KV),
less often while messages may arrive, and rarely at rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.api.errors import EngineDeadError, TransferError
from baton.telemetry.round_watch import Rounds
from kvconnector.base import (
    NO_TRANSFER,
    ConnectorMetrics,
    TransferEvent,
    TransferEventKind,
    TransferKey,
)
from kvconnector.protocol import messages
from kvconnector.protocol.actions import (
    Action,
    Allow,
    Connect,
    ConnectEnded,
    Disconnect,
    Forbid,
    Forbidden,
    Input,
    LendSlot,
    Pause,
    PauseEnded,
    Posted,
    ProbePosted,
    ReadFailed,
    ReadSlot,
    Result,
    Send,
    SendEnded,
    SlotRead,
    StateMachine,
    Wish,
    Write,
    WriteEnded,
    WriteProbe,
)
from kvconnector.protocol.inbox import Inbox
from kvconnector.protocol.peers import Peers, PeerState
from kvconnector.protocol.seals import Channels, Refusal
from kvconnector.transports.base import KVTransport, PendingWrite, QueueFullError
from kvconnector.waker import make_waker

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.025  # pause while a peer is not connected
REST_POLL_S = 0.1  # pause while all peers are connected; much shorter than a lease


@dataclass(frozen=True, slots=True)
class Pauses:
    """Longest pauses between two rounds, in seconds.

    Attributes:
        in_flight: while bytes are in flight, or wait to be posted.
        expecting: while messages may arrive.
        rest: while all peers are connected and no transfer is open.
    """

    in_flight: float
    expecting: float
    rest: float


POLLING = Pauses(in_flight=0.0001, expecting=0.0005, rest=REST_POLL_S)
# The descriptor does not show every event, such as the end of a copy; these pauses bound how late
# the thread notices such an event. Messages are shown, so the thread seldom looks while it only
# expects messages: each look costs the computing thread of a prefill 0.1 to 0.2 ms.
LISTENING = Pauses(in_flight=0.001, expecting=0.01, rest=1.0)
MAX_READ_FAILURES = 100  # consecutive failed reads after which the transport counts as broken
_WARM_S = 2.0  # seconds of fast polling after a new peer was added

Answer = TypeVar("Answer")


class Core(StateMachine, Protocol):
    """The state machine of one end of the hand-off, with the properties that the I/O loop reads."""

    peers: Peers

    @property
    def is_expecting(self) -> bool:
        """Return whether messages may arrive soon."""

    @property
    def is_moving(self) -> bool:
        """Return whether bytes are in flight, or wait to be posted: the loop then polls fast."""


class IoLoop:
    """Runs one state machine over one transport, and collects events.

    Args:
        transport: moves the bytes; the loop's thread closes it.
        core: the state machine, which decides what is sent and written, and when.
        channels: authenticate the messages.
        machine: ``core`` inside its filters, which gets all inputs; None: there are no filters.
        on_event: called on the I/O thread when `poll` has new events, to wake the node.
        on_death: called once on the I/O thread with an unexpected error; the process must then end.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        transport: KVTransport,
        core: Core,
        channels: Channels,
        machine: StateMachine | None = None,
        *,
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._core = core
        self._machine = core if machine is None else machine
        self._peers = core.peers
        self.channels = channels
        self._clock = clock
        self._on_event = on_event
        self._on_death = on_death
        self._inbox = Inbox(core.peers, channels)
        self._wishes: deque[Wish] = deque()
        self._events: deque[TransferEvent] = deque()
        # Writes in flight by peer and transfer, in the order of posting. Writes of probes have the
        # key `NO_TRANSFER`.
        self._writes: dict[tuple[str, TransferKey], deque[PendingWrite]] = {}
        # The scratch memory is on the KV cache's device
        self._is_on_device = transport.scratch.is_on_device
        self._wake = make_waker(getattr(transport, "descriptor", None))
        # A resting sender reads the answers to its beats only when it sends the next beat, because
        # each wake costs a fifth of a millisecond
        self._wait_for_wish: Callable[[float], object] | None = getattr(
            self._wake, "wait_for_flag", None
        )
        self._expecting = False
        self._num_read_failures = 0
        self._num_peer_failures = 0
        self._warm_until = 0.0
        self._closing = False
        self._num_rounds = 0
        self._in_round = False
        self._has_posted = False  # whether this round has posted a write of KV
        self._thread = threading.Thread(target=self._run, name="kv-io", daemon=True)

    def start(self) -> None:
        """Start the I/O thread. An owner that does not start the thread calls `round` itself."""
        self._thread.start()

    # ------------------------------------------------------------------ from the node's thread

    def submit(self, wish: Wish) -> None:
        """Queue a node's wish (such as a push) for the state machine; thread-safe."""
        self._wishes.append(wish)
        self._wake.set()

    @property
    def has_wishes(self) -> bool:
        """Return whether the node's wishes wait for the next round."""
        return bool(self._wishes)

    def expect(self, expecting: bool) -> None:
        """Set whether messages may arrive soon, so that the loop polls more often."""
        wake = expecting and not self._expecting
        self._expecting = expecting
        if wake:
            self._wake.set()

    def poll(self) -> list[TransferEvent]:
        """Return the events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def metrics(self) -> ConnectorMetrics:
        """Return the number of peers, connections, failures and refused messages; thread-safe."""
        refused = self._inbox.num_refused
        return ConnectorMetrics(
            pairs=Counter((peer.state.value, peer.path) for peer in self._peers),
            connections=self._transport.num_connections,
            peer_failures=self._num_peer_failures,
            # Reasons with count 0 are included: Prometheus sees the first refusal as an increase
            # only after a 0.
            refused_messages={reason.value: refused.get(reason, 0) for reason in Refusal},
        )

    @property
    def rounds(self) -> Rounds:
        """Return how many rounds of the loop have ended, and whether a round runs; thread-safe."""
        return Rounds(self._num_rounds, self._in_round)

    def close(self) -> None:
        """End the I/O thread if it was started, and close the transport."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is None:
            self._transport.close()
        else:
            self._thread.join()

    # ------------------------------------------------------------------ on the I/O thread

    def _run(self) -> None:
        try:
            self._loop()
        # Catch everything: without this thread, no request would end
        except BaseException as error:
            self._on_death(error if isinstance(error, Exception) else EngineDeadError(repr(error)))
            logger.critical("the KV I/O thread cannot continue", exc_info=error)
        finally:
            self._transport.close()

    def _loop(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._in_round = True
            self.round()
            self._num_rounds += 1
            self._in_round = False
            if self._wishes or self._inbox:
                continue
            pause_s = self._pause_s()
            if not pause_s:
                time.sleep(0)  # lets other threads run
            elif self._reads_late() and self._wait_for_wish is not None:
                self._wait_for_wish(pause_s)
            else:
                self._wake.wait(pause_s)

    def _pause_s(self) -> float:
        """Return how many seconds to pause before the next round.

        Returns 0 if a GPU writes KV, or if all writes of this round are complete and more blocks
        wait. After a round that posted nothing, for example without a lease, the loop pauses.
        """
        if self._is_on_device and any(key != NO_TRANSFER for _, key in self._writes):
            return 0.0
        if self._has_posted and self._core.is_moving and not self._writes:
            return 0.0
        pauses = LISTENING if getattr(self._wake, "listens", False) else POLLING
        if self._core.is_moving:
            return pauses.in_flight
        if self._is_warm:
            return pauses.expecting
        if self._is_at_rest():
            return min(pauses.rest, max(0.001, self._peers.rest_s()))
        return IDLE_POLL_S

    @property
    def _is_warm(self) -> bool:
        """Return whether messages may arrive soon."""
        return self._expecting or self._core.is_expecting or self._clock() < self._warm_until

    def _is_at_rest(self) -> bool:
        """Return whether nothing but beats and their answers is to come."""
        is_open = self._core.is_moving or self._is_warm
        return not is_open and all(peer.state is PeerState.CONNECTED for peer in self._peers)

    def _reads_late(self) -> bool:
        """Return whether answers to beats need not be read before the next beat is sent."""
        peers = self._peers
        return peers.greets and not peers.has_late_answers and self._is_at_rest()

    def round(self) -> None:
        """Give the state machine wishes, messages, ended writes and a tick; do its actions."""
        self._has_posted = False
        while self._wishes:
            self._tell(self._wishes.popleft())
        self._read()
        for message in self._inbox.pop_round(self._clock()):
            if message.engine_id in self._peers:  # the peer may have left after sending
                self._tell(message)
        self._settle()
        self._do(self._machine.tick(self._clock()))

    def _read(self) -> None:
        """Put messages in the inbox; raise TransferError after several failures in a row."""
        try:
            payloads = self._transport.take_notifications()
        except TransferError as error:
            self._num_read_failures += 1
            if self._num_read_failures >= MAX_READ_FAILURES:
                raise
            logger.warning("cannot read messages: %s", error)
            self._tell(ReadFailed())
            return
        self._num_read_failures = 0
        for sender, payload in payloads:
            self._inbox.put(sender, payload, self._clock())

    def _settle(self) -> None:
        """Report completed writes to the state machine, in the order of posting."""
        for (engine_id, key), writes in list(self._writes.items()):
            while writes:
                problem = ""
                try:
                    if not writes[0].is_done():
                        break
                except TransferError as error:
                    problem = str(error)
                writes.popleft()
                self._tell(WriteEnded(engine_id, key, problem))
            if not writes:
                del self._writes[engine_id, key]

    def _tell(self, item: Input) -> None:
        self._do(self._machine.handle_input(item, self._clock()))

    def _do(self, actions: list[Action]) -> None:
        """Carry out actions in order; actions that a result causes come before the others."""
        actions.reverse()  # reversed, so that `pop` returns the first action
        while actions:
            result = self._do_one(actions.pop())
            if result is not None:
                actions += reversed(self._machine.handle_input(result, self._clock()))

    def _do_one(self, action: Action) -> Result | None:
        match action:
            case Pause():
                return PauseEnded()
            case Send():
                return self._send(action)
            case Write():
                return self._write(action)
            case TransferEvent():
                self._num_peer_failures += action.kind is TransferEventKind.PEER_FAILED
                self._events.append(action)
                self._on_event()
            case WriteProbe():
                return self._write_probe(action)
            case Allow(engine_id=engine_id, key=key, block_ids=block_ids):
                self._transport.allow(engine_id, key, block_ids)
            case Forbid(engine_id=engine_id, key=key, wants_result=wants_result):
                if _attempt(lambda: self._transport.forbid(engine_id, key), False) and wants_result:
                    return Forbidden(action)
            case LendSlot(slot=slot, engine_id=engine_id):
                _attempt(lambda: self._transport.scratch.lend(slot, engine_id), None)
            case ReadSlot(slot=slot):
                digest = _attempt(lambda: self._transport.scratch.digest_of(slot), b"")
                return SlotRead(action, digest)
            case Connect():
                return self._connect(action)
            case Disconnect(engine_id=engine_id):
                self._transport.disconnect(engine_id)
        return None

    def _send(self, action: Send) -> Result | None:
        payload = self.channels[action.engine_id].seal(messages.encode(action.message))
        try:
            self._transport.notify(action.engine_id, payload)
        except TransferError as error:
            return SendEnded(action, str(error), is_queue_full=isinstance(error, QueueFullError))
        return SendEnded(action) if action.wants_result else None

    def _connect(self, action: Connect) -> Result:
        peer = action.peer
        try:
            if action.then is None:
                self._warm_until = self._clock() + _WARM_S
                self.channels.learn(peer, self._peers)
            else:
                self._transport.disconnect(peer.engine_id)
            return ConnectEnded(action, self._transport.connect(peer))
        except TransferError as error:
            return ConnectEnded(action, problem=str(error))

    def _write(self, action: Write) -> Result:
        place = action.engine_id, action.key
        started = self._clock()
        try:
            pending = self._transport.write(
                action.engine_id,
                action.piece.block_ids,
                action.remote_block_ids,
                action.piece.layers,
                action.key,
                action.groups,
            )
            posting_s = self._clock() - started
            is_done = place not in self._writes and pending.is_done()
        except (TransferError, ValueError) as error:
            return Posted(action, problem=str(error))
        self._has_posted = True
        if not is_done:
            self._writes.setdefault(place, deque()).append(pending)
        trip_s = 0.0 if is_done else self._transport.round_trip_s(action.engine_id)
        return Posted(action, posting_s, is_done, round_trip_s=trip_s)

    def _write_probe(self, action: WriteProbe) -> Result:
        """Post probe writes until ``max_writes`` or ``max_s`` is reached; other peers wait."""
        writes = self._writes.setdefault((action.engine_id, NO_TRANSFER), deque())
        num_before, until = len(writes), self._clock() + action.max_s
        problem = ""
        try:
            for _ in range(action.max_writes):
                writes.append(self._transport.write_scratch(action.engine_id, action.slot))
                if self._clock() >= until:
                    break
        except (TransferError, ValueError) as error:
            problem = str(error)
        return ProbePosted(action, len(writes) - num_before, problem)


def _attempt(call: Callable[[], Answer], default: Answer) -> Answer:
    """Call a function of the transport; return ``default`` if it raises TransferError."""
    try:
        return call()
    except TransferError as error:
        logger.warning("the transport does not answer: %s", error)
        return default
