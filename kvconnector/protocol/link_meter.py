"""LinkMeter: measures the bandwidth to each peer from the writes of KV that the sender posts.

    post  post  end  post  end  end         a span: from a post until no write to the peer is in
    |<---------- span ---------->|          flight; bandwidth = bytes / seconds of several spans

A busy link always has a write in flight. So after `ENOUGH_S` a span ends once nearly all of its
bytes have arrived, and the next span begins at once. The writes still in flight then count in
neither span, because the bandwidth must not seem higher than it is.

A self-test measures a pair of nodes only once, but links get slower and faster, and pairs share
links. A new bandwidth is reported in a PEER_CONNECTED event, as after a self-test. A measured
bandwidth below the self-test's makes the router avoid the pair, so that nothing would correct the
bandwidth later. So while no span counts, the meter doubles the bandwidth at intervals, up to the
self-test's.

A busy process can be slower than the link: all writes have ended before the process looks, and
pieces wait to be posted. Such a span is *starved*. A bandwidth of starved spans is reported, but
does not lower the limit of bytes in flight (`Peers.limit_bytes`). Otherwise the limit would make
pieces smaller, more pieces would cost the process more time, and the next bandwidth would be lower.

Refuses to know: requests, which transport carries the bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.telemetry.rates import format_rate
from kvconnector.base import NO_TRANSFER, TransferEvent, TransferEventKind, TransferKey
from kvconnector.protocol.actions import Action, Input, Posted, StateMachine, WriteEnded
from kvconnector.protocol.peers import PeerState
from kvconnector.protocol.sender import SendMachine

logger = logging.getLogger(__name__)

# A short span with few bytes measures the latency of a write. A long span with very few bytes
# measures how busy this process is. Neither span counts, unless the span is faster than the
# reported bandwidth.
MIN_SPAN_BYTES, MIN_SPAN_S = 2**20, 0.05
MIN_LONG_SPAN_BYTES = 2**16
# Enough bytes, or enough seconds of spans, for one measurement
ENOUGH_BYTES, ENOUGH_S = 16 * 2**20, 0.5
# Least seconds between two measurements, unless the bandwidth has grown by `REPORT_FACTOR`.
# Bandwidths of a few writes differ a lot, and each report costs the router time and this node a
# line in the log.
INTERVAL_S = 1.0
# A bandwidth is reported if it differs from the last reported bandwidth by more than this factor.
REPORT_FACTOR = 1.5
# A lower bandwidth limits the bytes in flight only if it is lower by more than this factor.
LIMIT_FACTOR = 1.2
# A span of a busy link ends if this many times as many of its bytes have arrived as are in flight.
ARRIVED_FACTOR = 4
# Least seconds between two looks at all links. A round of I/O may take only 0.1 ms.
LOOK_S = 0.05
DOUBLING_S = 10.0  # seconds without a span that counts after which a low bandwidth doubles


@dataclass(slots=True)
class _Link:
    """The link to one peer.

    Attributes:
        tested: bandwidth that the self-test measured; all bandwidths in bytes per second.
        reported: bandwidth that was reported last.
        counted_at: when the last span that counts ended, or when the bandwidth doubled.
        in_flight: bytes of each write in flight, in the order of posting, by transfer; 0 if the
            write was posted before the present span began.
        began_at: when the present span began.
        span_bytes: bytes of the present span's writes that have ended.
        is_spoilt: whether a write of the present span failed, so that the span does not count.
        measured_at: when the last measurement was complete, or when the self-test had passed.
        num_bytes, busy_s: bytes and seconds of the spans since the last measurement.
        starved_bytes: bytes of the starved spans since the last measurement.
        num_ended: number of writes that have ended since the last post.
        is_starved: whether half of the last measurement's bytes were bytes of starved spans.
    """

    tested: float
    reported: float
    counted_at: float
    in_flight: dict[TransferKey, deque[int]] = field(default_factory=dict)
    began_at: float = 0.0
    span_bytes: int = 0
    is_spoilt: bool = False
    measured_at: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0
    starved_bytes: int = 0
    num_ended: int = 0
    is_starved: bool = False

    def begin_write(self, key: TransferKey, num_bytes: int, began_at: float) -> None:
        """Count a posted write."""
        if not self.in_flight:
            self.began_at = began_at
        self.in_flight.setdefault(key, deque()).append(num_bytes)
        self.num_ended = 0

    def end_write(
        self, key: TransferKey, now: float, problem: str, waits: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Count the end of a transfer's oldest write; return a complete measurement's bandwidth.

        Args:
            waits: returns whether pieces wait to be posted.
        """
        sizes = self.in_flight.get(key)
        if sizes is None:  # the write was posted before the link was known
            return None
        self.span_bytes += sizes.popleft()
        if not sizes:
            del self.in_flight[key]
        self.is_spoilt = self.is_spoilt or bool(problem)
        self.num_ended += 1
        if self.in_flight:
            return None
        return self._end_span(now, is_starved=self.num_ended > 1 and waits())

    def end_busy_span(self, now: float) -> float | None:
        """End a long span if nearly all of its bytes have arrived; return as `end_write` does."""
        if not self.in_flight or now - self.began_at < ENOUGH_S:
            return None
        if self.span_bytes < ARRIVED_FACTOR * sum(map(sum, self.in_flight.values())):
            return None
        self.in_flight = self.without_bytes()
        return self._end_span(now)

    def without_bytes(self) -> dict[TransferKey, deque[int]]:
        """Return the writes in flight, with 0 bytes each, so that no later span counts them."""
        return {key: deque([0] * len(sizes)) for key, sizes in self.in_flight.items()}

    def _end_span(self, now: float, *, is_starved: bool = False) -> float | None:
        """Begin a new span; return the bandwidth if a measurement is complete."""
        span_bytes, span_s, is_spoilt = self.span_bytes, now - self.began_at, self.is_spoilt
        self.began_at, self.span_bytes, self.is_spoilt = now, 0, False
        if is_spoilt or not self._counts(span_bytes, span_s):
            return None
        self.counted_at = now
        self.num_bytes += span_bytes
        self.busy_s += span_s
        self.starved_bytes += span_bytes if is_starved else 0
        is_enough = self.num_bytes >= ENOUGH_BYTES or self.busy_s >= ENOUGH_S
        if not is_enough or self.busy_s <= 0:
            return None
        bandwidth = self.num_bytes / self.busy_s
        has_grown = bandwidth > REPORT_FACTOR * self.reported
        if now - self.measured_at < INTERVAL_S and not has_grown:
            return None
        self.is_starved = 2 * self.starved_bytes >= self.num_bytes
        self.measured_at, self.num_bytes, self.busy_s, self.starved_bytes = now, 0, 0.0, 0
        return bandwidth

    def _counts(self, span_bytes: int, span_s: float) -> bool:
        """Return whether a span measures the link, and not latency or a busy process.

        Any span is a lower bound of the link's bandwidth, so a span that is faster than the
        reported bandwidth counts, however small the span is. A low bandwidth limits the bytes in
        flight (`Peers.limit_bytes`), so a fast link with a low bandwidth has only small spans.
        """
        if span_bytes >= MIN_SPAN_BYTES or span_bytes > self.reported * span_s:
            return True
        return span_s >= MIN_SPAN_S and span_bytes >= MIN_LONG_SPAN_BYTES

    def doubled(self, now: float) -> float | None:
        """Return twice the reported bandwidth if it is low and no span has counted for long."""
        if self.in_flight or now - self.counted_at < DOUBLING_S:
            return None
        self.counted_at = now
        return min(2 * self.reported, self.tested) if self.reported < self.tested else None


class LinkMeter:
    """A filter around the sender's state machine, which reports changes of peers' bandwidths.

    Args:
        sender: the sender's state machine, which counts posted bytes.
        machine: the sender's state machine inside its other filters.
    """

    def __init__(self, sender: SendMachine, machine: StateMachine) -> None:
        self._sender = sender
        self._machine = machine
        self._links: dict[str, _Link] = {}
        self._look_at = 0.0

    def handle_input(self, item: Input, now: float) -> list[Action]:
        num_before = self._sender.totals.num_bytes
        actions = self._machine.handle_input(item, now)
        self._note_connected(actions, now)
        match item:
            case Posted(problem="") if link := self._links.get(item.action.engine_id):
                num_bytes = self._sender.totals.num_bytes - num_before
                link.begin_write(item.action.key, num_bytes, now - item.posting_s)
                if item.is_done:
                    link.num_ended += 1  # the write ended before the sender could post the next
                    waits = partial(self._has_waiting_pieces, item.action.engine_id)
                    bandwidth = link.end_write(item.action.key, now, "", waits)
                    actions += self._note_measured(item.action.engine_id, link, bandwidth)
            case WriteEnded(engine_id, key, problem) if key != NO_TRANSFER:
                if link := self._links.get(engine_id):
                    bandwidth = link.end_write(
                        key, now, problem, partial(self._has_waiting_pieces, engine_id)
                    )
                    actions += self._note_measured(engine_id, link, bandwidth)
            case _:
                pass
        return actions

    def tick(self, now: float) -> list[Action]:
        actions = self._machine.tick(now)
        self._note_connected(actions, now)
        if now < self._look_at:
            return actions
        self._look_at = now + LOOK_S
        for engine_id, link in list(self._links.items()):
            if engine_id not in self._sender.peers:
                del self._links[engine_id]
                continue
            actions += self._note_measured(engine_id, link, link.end_busy_span(now))
            if bandwidth := link.doubled(now):
                actions += self._report(engine_id, link, bandwidth)
        return actions

    def _has_waiting_pieces(self, engine_id: str) -> bool:
        """Return whether pieces for a peer wait to be posted."""
        transfers = self._sender.transfers.values()
        return any(one.engine_id == engine_id and one.can_post for one in transfers)

    def _note_measured(self, engine_id: str, link: _Link, bandwidth: float | None) -> list[Action]:
        """Report a measured bandwidth that differs from the reported bandwidth."""
        if bandwidth is None or engine_id not in self._sender.peers:
            return []
        peer = self._sender.peers[engine_id]
        known = peer.bandwidth_bytes_per_s
        # A limit that is too low keeps the link from filling, so of two similar bandwidths, the
        # higher one counts.
        if bandwidth > known or (LIMIT_FACTOR * bandwidth < known and not link.is_starved):
            peer.bandwidth_bytes_per_s = bandwidth
        if _are_near(bandwidth, link.reported):
            return []
        logger.info(
            "writes to %s: %s (before: %s)",
            engine_id,
            format_rate(bandwidth),
            format_rate(link.reported),
        )
        return self._report(engine_id, link, bandwidth)

    def _report(self, engine_id: str, link: _Link, bandwidth: float) -> list[Action]:
        if engine_id not in self._sender.peers:
            return []
        peer = self._sender.peers[engine_id]
        if peer.state is not PeerState.CONNECTED:
            return []
        link.reported = bandwidth
        peer.bandwidth_bytes_per_s = max(peer.bandwidth_bytes_per_s, bandwidth)
        return [
            TransferEvent(
                kind=TransferEventKind.PEER_CONNECTED,
                engine_id=engine_id,
                transport=peer.path,
                bandwidth_bytes_per_s=bandwidth,
            )
        ]

    def _note_connected(self, actions: list[Action], now: float) -> None:
        """Begin to measure the links to peers whose self-tests have passed."""
        for action in actions:
            if (
                isinstance(action, TransferEvent)
                and action.kind is TransferEventKind.PEER_CONNECTED
            ):
                tested = action.bandwidth_bytes_per_s
                before = self._links.get(action.engine_id)
                in_flight = {} if before is None else before.without_bytes()
                link = _Link(tested, tested, now, in_flight, began_at=now, measured_at=now)
                self._links[action.engine_id] = link


def _are_near(one: float, other: float) -> bool:
    return max(one, other) <= REPORT_FACTOR * min(one, other)
