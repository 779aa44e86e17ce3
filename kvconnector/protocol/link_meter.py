"""LinkMeter: measures the bandwidth to each peer from the writes of KV that the sender posts.

    post  post  end  post  end  end         a span: from a post until no write to the peer is in
    |<---------- span ---------->|          flight; bandwidth = bytes / seconds of several spans

A self-test measures a pair of nodes only once, but links get slower and faster, and pairs share
links. A new bandwidth is reported in a PEER_CONNECTED event, as after a self-test. A measured
bandwidth below the self-test's makes the router avoid the pair, so that nothing would correct the
bandwidth later. So while no KV is sent to the peer, the meter doubles the bandwidth at intervals,
up to the self-test's.

Refuses to know: requests, which transport carries the bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.telemetry.rates import format_rate
from kvconnector.base import NO_TRANSFER, TransferEvent, TransferEventKind
from kvconnector.protocol.actions import Action, Input, Posted, StateMachine, WriteEnded
from kvconnector.protocol.peers import PeerState
from kvconnector.protocol.sender import SendMachine

logger = logging.getLogger(__name__)

# A short span with few bytes measures the latency of a write, so it does not count.
MIN_SPAN_BYTES, MIN_SPAN_S = 2**20, 0.05
# Enough bytes, or enough seconds of spans, for one measurement
ENOUGH_BYTES, ENOUGH_S = 16 * 2**20, 0.5
# A bandwidth is reported if it differs from the last reported bandwidth by more than this factor.
REPORT_FACTOR = 1.5
DOUBLING_S = 10.0  # seconds without KV after which a low bandwidth doubles


@dataclass(slots=True)
class _Link:
    """The link to one peer.

    Attributes:
        tested: bandwidth that the self-test measured; all bandwidths in bytes per second.
        reported: bandwidth that was reported last.
        num_in_flight: number of writes in flight.
        began_at: when the present span began.
        span_bytes: bytes of the present span.
        is_spoilt: whether a write of the present span failed, so that the span does not count.
        num_bytes, busy_s: bytes and seconds of the spans since the last measurement.
        quiet_since: when the last span ended, or when the bandwidth doubled.
    """

    tested: float
    reported: float
    quiet_since: float
    num_in_flight: int = 0
    began_at: float = 0.0
    span_bytes: int = 0
    is_spoilt: bool = False
    num_bytes: int = 0
    busy_s: float = 0.0

    def begin_write(self, num_bytes: int, began_at: float) -> None:
        """Count a posted write."""
        if self.num_in_flight == 0:
            self.began_at, self.span_bytes, self.is_spoilt = began_at, 0, False
        self.num_in_flight += 1
        self.span_bytes += num_bytes

    def end_write(self, now: float, problem: str) -> float | None:
        """Count an ended write; return the bandwidth if a measurement is complete."""
        if self.num_in_flight == 0:  # the write was posted before the peer connected again
            return None
        self.num_in_flight -= 1
        self.is_spoilt = self.is_spoilt or bool(problem)
        if self.num_in_flight or self.is_spoilt:
            return None
        self.quiet_since = now
        span_s = now - self.began_at
        if self.span_bytes >= MIN_SPAN_BYTES or span_s >= MIN_SPAN_S:
            self.num_bytes += self.span_bytes
            self.busy_s += span_s
        if self.busy_s <= 0 or (self.num_bytes < ENOUGH_BYTES and self.busy_s < ENOUGH_S):
            return None
        bandwidth = self.num_bytes / self.busy_s
        self.num_bytes, self.busy_s = 0, 0.0
        return bandwidth

    def doubled(self, now: float) -> float | None:
        """Return twice the reported bandwidth if it is low and the link was quiet for long."""
        if self.num_in_flight or now - self.quiet_since < DOUBLING_S:
            return None
        self.quiet_since = now
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

    def handle_input(self, item: Input, now: float) -> list[Action]:
        num_before = self._sender.totals.num_bytes
        actions = self._machine.handle_input(item, now)
        self._note_connected(actions, now)
        match item:
            case Posted(problem="") if link := self._links.get(item.action.engine_id):
                num_bytes = self._sender.totals.num_bytes - num_before
                link.begin_write(num_bytes, now - item.posting_s)
                if item.is_done:
                    actions += self._end_write(item.action.engine_id, link, now, "")
            case WriteEnded(engine_id, key, problem) if key != NO_TRANSFER:
                if link := self._links.get(engine_id):
                    actions += self._end_write(engine_id, link, now, problem)
            case _:
                pass
        return actions

    def tick(self, now: float) -> list[Action]:
        actions = self._machine.tick(now)
        self._note_connected(actions, now)
        for engine_id, link in list(self._links.items()):
            if engine_id not in self._sender.peers:
                del self._links[engine_id]
            elif bandwidth := link.doubled(now):
                actions += self._report(engine_id, link, bandwidth)
        return actions

    def _end_write(self, engine_id: str, link: _Link, now: float, problem: str) -> list[Action]:
        bandwidth = link.end_write(now, problem)
        if bandwidth is None or _are_near(bandwidth, link.reported):
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
        link.reported = peer.bandwidth_bytes_per_s = bandwidth
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
                self._links[action.engine_id] = _Link(tested, tested, now)


def _are_near(one: float, other: float) -> bool:
    return max(one, other) <= REPORT_FACTOR * min(one, other)
