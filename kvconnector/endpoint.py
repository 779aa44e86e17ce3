"""Endpoint: the KV I/O thread. It alone touches the transport; others leave it calls to make.

Polls quickly while something is in flight, slowly while something may come, and sleeps (a tick
now and then) when nothing is expected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from baton.errors import TransferError
from kvconnector import messages
from kvconnector.base import KVTransport, TransferEvent, TransferEventKind
from kvconnector.messages import Message
from kvconnector.peer_info import PeerInfo

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
    """

    def __init__(
        self,
        transport: KVTransport,
        *,
        on_message: Callable[[Message], None],
        progress: Callable[[], bool],
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
    ) -> None:
        self.transport = transport
        self.peers: dict[str, PeerInfo] = {}
        self.paths: dict[str, str] = {}  # engine_id -> name of the path bytes take
        self._on_message = on_message
        self._progress = progress
        self._on_event = on_event
        self._on_death = on_death
        self._calls: deque[Callable[[], None]] = deque()
        self._events: deque[TransferEvent] = deque()
        self._wake = threading.Event()
        self._expecting = False
        self._num_read_failures = 0
        self._warm_until = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-io", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on the owner's callbacks are called."""
        self._thread.start()

    # ------------------------------------------------------------------ from the node's thread

    def submit(self, call: Callable[[], None]) -> None:
        """Have ``call`` made on the I/O thread, in order; safe from any thread."""
        self._calls.append(call)
        self._wake.set()

    def expect(self, expecting: bool) -> None:
        """Whether messages may come soon."""
        wake = expecting and not self._expecting
        self._expecting = expecting
        if wake:
            self._wake.set()

    def poll(self) -> list[TransferEvent]:
        """Events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """End the thread and the transport."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    # ------------------------------------------------------------------ on the I/O thread

    def add_peer(self, peer: PeerInfo) -> None:
        """Learn a peer; PEER_FAILED if the transport cannot."""
        try:
            self.paths[peer.engine_id] = self.transport.connect(peer)
        except TransferError as error:
            self.fail_peer(peer.engine_id, str(error))
            return
        self.peers[peer.engine_id] = peer
        self._warm_until = time.monotonic() + _WARM_S

    def remove_peer(self, engine_id: str) -> None:
        self.peers.pop(engine_id, None)
        self.paths.pop(engine_id, None)
        self.transport.disconnect(engine_id)

    def fail_peer(self, engine_id: str, reason: str) -> None:
        """Report a peer as unreachable."""
        self.emit(
            TransferEvent(kind=TransferEventKind.PEER_FAILED, engine_id=engine_id, reason=reason)
        )

    def send(self, engine_id: str, message: Message) -> bool:
        """Send a message; False when the peer cannot be reached, not even by connecting anew."""
        peer = self.peers.get(engine_id)
        if peer is None:
            return False
        payload = messages.encode(message)
        try:
            self.transport.notify(engine_id, payload)
        except TransferError:
            # A connection that failed stays failed; the peer may be well.
            try:
                self.transport.disconnect(engine_id)
                self.paths[engine_id] = self.transport.connect(peer)
                self.transport.notify(engine_id, payload)
            except TransferError as error:
                logger.warning("cannot reach %s: %s", engine_id, error)
                return False
        return True

    def emit(self, event: TransferEvent) -> None:
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
            in_flight = self._round()
            if self._calls:
                continue
            if in_flight:
                timeout = IN_FLIGHT_POLL_S
            elif self._expecting or time.monotonic() < self._warm_until:
                timeout = EXPECTING_POLL_S
            else:
                timeout = IDLE_POLL_S
            self._wake.wait(timeout)

    def _take_notifications(self) -> list[bytes]:
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
        return payloads

    def _round(self) -> bool:
        while self._calls:
            self._calls.popleft()()
        for payload in self._take_notifications():
            try:
                message = messages.decode(payload)
            except TransferError as error:  # from the network: data, not a bug
                logger.warning("dropped a message: %s", error)
                continue
            if message.engine_id in self.peers:
                self._on_message(message)
        return self._progress()
