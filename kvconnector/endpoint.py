"""Endpoint: the KV I/O thread. It alone touches the transport; others leave it calls to make.

Polls quickly while something is in flight (at once where a GPU writes), slowly while something may
come, and sleeps (a tick now and then) when nothing is expected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from baton.api.errors import TransferError
from baton.link.round_watch import Rounds
from baton.telemetry.node_metrics import ConnectorMetrics
from kvconnector.base import TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import start_time
from kvconnector.protocol.inbox import Inbox
from kvconnector.protocol.messages import Message
from kvconnector.protocol.peers import Peers
from kvconnector.transports.base import KVTransport

logger = logging.getLogger(__name__)

IN_FLIGHT_POLL_S = 0.0001
EXPECTING_POLL_S = 0.0005
IDLE_POLL_S = 0.025
MAX_READ_FAILURES = 100  # in a row; then the transport is broken for good
_WARM_S = 2.0  # polls as if expecting for this long after a peer was learnt


class Endpoint:
    """One transport, its thread, its peers and its events.

    Args:
        transport: owned from now on; closed on the thread.
        on_message: called on the thread for each message that came in.
        progress: called on the thread in each round; returns whether something is in flight.
        on_event: called on the thread after events were added; wakes the node.
        on_death: called on the thread, once, with what nobody expected; the process must end.
        greets: whether this end says Hello to its peers.
        is_busy: whether something posted to a peer is still in flight.
        on_lost: called on the thread when a peer is not reached any more, with the reason.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        transport: KVTransport,
        *,
        on_message: Callable[[Message], None],
        progress: Callable[[], bool],
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
        greets: bool = False,
        is_busy: Callable[[str], bool] = lambda engine_id: False,
        on_lost: Callable[[str, str], None] = lambda engine_id, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.peers = Peers(
            transport, self.emit, clock, greets=greets, is_busy=is_busy, on_lost=on_lost
        )
        self._inbox = Inbox(self.peers, clock)
        self._clock = clock
        self._on_message = on_message
        self._progress = progress
        self._on_event = on_event
        self._on_death = on_death
        self._calls: deque[Callable[[], object]] = deque()
        self._events: deque[TransferEvent] = deque()
        self._wake = threading.Event()
        self._expecting = False
        self._hurrying = False
        self._num_read_failures = 0
        self._num_peer_failures = 0
        self.num_reads = 0  # that went well
        self._warm_until = 0.0
        self._closing = False
        self._num_rounds = 0
        self._in_round = False
        self._thread = threading.Thread(target=self._run, name="kv-io", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on the owner's callbacks are called."""
        self._thread.start()

    # ------------------------------------------------------------------ from the node's thread

    def submit(self, call: Callable[[], object]) -> None:
        """Have ``call`` made on the I/O thread, in order; safe from any thread."""
        self._calls.append(call)
        self._wake.set()

    def expect(self, expecting: bool) -> None:
        """Whether messages may come soon."""
        wake = expecting and not self._expecting
        self._expecting = expecting
        if wake:
            self._wake.set()

    def hurry(self, hurrying: bool) -> None:
        """Whether the next round is to begin at once: a GPU's writes end within microseconds."""
        self._hurrying = hurrying

    def poll(self) -> list[TransferEvent]:
        """Events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    @property
    def peer_info(self) -> PeerInfo:
        """How the transport presents us, with our public key, and since when we live."""
        info = self.transport.peer_info
        return msgspec.structs.replace(
            info,
            public_key=self.peers.channels.public_key,
            started_at=start_time(info.pid) if info.pid else 0,
        )

    def metrics(self) -> ConnectorMetrics:
        """Of peers and messages alone; safe from any thread."""
        return ConnectorMetrics(
            pairs=Counter((peer.state.value, peer.path) for peer in self.peers),
            peer_failures=self._num_peer_failures,
            refused_messages={
                reason.value: count for reason, count in self._inbox.num_refused.items()
            },
        )

    @property
    def rounds(self) -> Rounds:
        """How many rounds have ended, and whether one is in progress; safe from any thread."""
        return Rounds(self._num_rounds, self._in_round)

    def close(self) -> None:
        """End the thread and the transport."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    # ------------------------------------------------------------------ on the I/O thread

    def add_peer(self, peer: PeerInfo) -> None:
        """Learn a peer, or greet a known one anew; PEER_FAILED if the transport cannot."""
        self.peers.add(peer)
        self._warm_until = self._clock() + _WARM_S

    def emit(self, event: TransferEvent) -> None:
        self._num_peer_failures += event.kind is TransferEventKind.PEER_FAILED
        self._events.append(event)
        self._on_event()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # the loop's top: without this thread nothing would end
            logger.critical("the KV I/O thread cannot continue", exc_info=error)
            self._on_death(error)
        finally:
            self.transport.close()

    def _loop(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._in_round = True
            in_flight = self._round()
            self._num_rounds += 1
            self._in_round = False
            if self._calls or self._inbox:
                continue
            if self._hurrying:
                time.sleep(0)  # other threads' turn, no more
                continue
            if in_flight:
                timeout = IN_FLIGHT_POLL_S
            elif self._expecting or self._clock() < self._warm_until:
                timeout = EXPECTING_POLL_S
            else:
                timeout = IDLE_POLL_S
            self._wake.wait(timeout)

    def _take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that came in; raises TransferError when reading fails again and again."""
        try:
            payloads = self.transport.take_notifications()
        except TransferError as error:
            self._num_read_failures += 1
            if self._num_read_failures >= MAX_READ_FAILURES:
                raise
            logger.warning("cannot read messages: %s", error)
            return []
        self._num_read_failures = 0
        self.num_reads += 1
        return payloads

    def _round(self) -> bool:
        while self._calls:
            self._calls.popleft()()
        for sender, payload in self._take_notifications():
            self._inbox.put(sender, payload)
        for message in self._inbox.take():
            if message.engine_id in self.peers:  # it may have gone since
                self._on_message(message)
        self.peers.tick()
        return self._progress()
