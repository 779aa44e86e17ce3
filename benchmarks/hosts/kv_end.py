"""One end of the KV connector without an engine, run on a host by `full_link.py`.

    python -m benchmarks.hosts.kv_end ROLE NAME CONNECTOR LISTEN NUM_BLOCKS

Reads orders from standard input and writes answers to standard output, one JSON object per line.
The first answer is the end's peer info. A sender (ROLE "send") then gets the peer info of each
receiver, and any number of orders to load links. A receiver gets the sender's peer info, and grants
each transfer until its input ends.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.testing.transports import memory_of
from baton_kernels.huge_pages import huge_pages
from kvconnector.base import BlockPush, HandoffRecord, KVReservation, TransferEventKind
from kvconnector.ends import Receiver, Sender
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol import peers as peers_module
from kvconnector.protocol.peers import Peers
from kvconnector.transports.base import KVTransport, TransportOptions

BLOCK_SHAPE = (8, 2, 4, 16, 32)  # layers, k and v, heads, tokens, head_dim
BLOCK_BYTES, BLOCK_TOKENS = 2**17, 16
NUM_OPEN = 2  # number of transfers open to each receiver at a time, so that the link has no pauses
BEAT_INTERVAL_S = 0.01  # short, to measure many round trips of control messages
TIMEOUT_S = 60.0


def open_transport(
    connector: str, name: str, listen: str, num_blocks: int
) -> tuple[KVTransport, torch.Tensor]:
    """Open a transport over new, populated KV memory; return both."""
    memory = huge_pages(num_blocks * BLOCK_BYTES).fill_(1).view(torch.float32)
    tensor = memory.view(num_blocks, *BLOCK_SHAPE)
    options = TransportOptions(listen=listen)
    if connector == "tls":
        from kvconnector.transports.sockets.transport import TlsTransport

        return TlsTransport(name, memory_of(tensor), options), tensor
    from kvconnector.transports.nixl.transport import NixlTransport

    return NixlTransport(name, memory_of(tensor), options), tensor


round_trips: dict[str, list[float]] = defaultdict(list)  # seconds by engine id


class TimedPeers(Peers):
    """A table of peers that also records the round trips of control messages."""

    def renew(self, engine_id: str, sent_at_s: float) -> None:
        round_trips[engine_id].append(self._turn.now - sent_at_s)
        super().renew(engine_id, sent_at_s)


@dataclass(slots=True)
class Stream:
    """The transfers of one load to one receiver.

    Attributes:
        began_at: when the first transfer began.
        ended_at: when the last transfer was complete.
        pushed: time of the push of each open transfer, by request id.
        times_s: seconds from each push until the sender's COMMITTED event.
    """

    began_at: float = 0.0
    ended_at: float = 0.0
    num_started: int = 0
    num_bytes: int = 0
    pushed: dict[str, float] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)


class SendingEnd:
    """A sender that pushes transfers as fast as the link carries them."""

    def __init__(self, connector: str, name: str, listen: str, num_blocks: int) -> None:
        peers_module.BEAT_INTERVAL_S = BEAT_INTERVAL_S
        transport, self._memory = open_transport(connector, name, listen, num_blocks)
        self._woken = threading.Event()
        self.sender = Sender(transport, self._woken.set, end_process, make_peers=TimedPeers)
        self.sender.loop.start()
        self._number = 0

    def meet(self, info: bytes) -> dict[str, Any]:
        """Connect to a receiver; return its engine id and the self-test's bandwidth."""
        peer = PeerInfo.decode(info)
        self.sender.connect(peer)
        for event in self._events():
            if event.kind is TransferEventKind.PEER_CONNECTED:
                rate = event.bandwidth_bytes_per_s
                return {"engine_id": peer.engine_id, "path": event.transport, "rate": rate}
        raise TimeoutError("the ends did not meet")

    def load(self, num_blocks: int, seconds: float, engine_ids: list[str]) -> dict[str, Any]:
        """Push transfers of ``num_blocks`` to the receivers for some seconds; return figures."""
        round_trips.clear()
        streams = {engine_id: Stream() for engine_id in engine_ids}
        by_request: dict[str, str] = {}
        until = time.monotonic() + seconds

        def push_more(engine_id: str) -> None:
            stream = streams[engine_id]
            while len(stream.pushed) < NUM_OPEN and time.monotonic() < until:
                stream.began_at = stream.began_at or time.monotonic()
                by_request[self._push(engine_id, stream, num_blocks)] = engine_id

        for engine_id in engine_ids:
            push_more(engine_id)
        for event in self._events(seconds + TIMEOUT_S):
            if event.kind is TransferEventKind.FAILED:
                raise RuntimeError(event.reason)
            if event.kind is TransferEventKind.COMMITTED:
                engine_id = by_request.pop(event.request_id)
                stream = streams[engine_id]
                stream.ended_at = time.monotonic()
                stream.times_s.append(stream.ended_at - stream.pushed.pop(event.request_id))
                stream.num_bytes += num_blocks * BLOCK_BYTES
                push_more(engine_id)
            if not by_request:
                break
        return {engine_id: self._figures(engine_id, streams[engine_id]) for engine_id in engine_ids}

    def _push(self, engine_id: str, stream: Stream, num_blocks: int) -> str:
        self._number += 1
        request_id, place = f"r{self._number}", stream.num_started % NUM_OPEN * num_blocks
        num_tokens = num_blocks * BLOCK_TOKENS
        self.sender.start(request_id, 0, engine_id, num_tokens=num_tokens, num_blocks=num_blocks)
        block_ids = tuple(range(place, place + num_blocks))
        record = HandoffRecord(num_tokens=num_tokens, token_id=0)
        self.sender.push(
            BlockPush(request_id=request_id, epoch=0, first_block=0, block_ids=block_ids,
                      num_tokens=num_tokens, record=record)
        )  # fmt: skip
        stream.num_started += 1
        stream.pushed[request_id] = time.monotonic()
        return request_id

    def _figures(self, engine_id: str, stream: Stream) -> dict[str, Any]:
        return {
            "num_bytes": stream.num_bytes,
            "seconds": stream.ended_at - stream.began_at,
            "transfer_s": stream.times_s,
            "round_trips_s": list(round_trips[engine_id]),
            "known_rate": self.sender.machine.peers[engine_id].bandwidth_bytes_per_s,
            "most_in_flight": self.sender.machine.peers.limit_bytes(engine_id, 2**25),
        }

    def _events(self, timeout_s: float = TIMEOUT_S) -> Iterator[Any]:
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            self._woken.wait(0.1)
            self._woken.clear()
            yield from self.sender.poll()
        raise TimeoutError(f"no event in {timeout_s:g} s")


def receive(connector: str, name: str, listen: str, num_blocks: int) -> None:
    """Grant blocks to all transfers until standard input ends."""
    transport, _ = open_transport(connector, name, listen, num_blocks)
    woken = threading.Event()
    receiver = Receiver(transport, woken.set, end_process)
    receiver.loop.start()
    answer({"info": base64.b64encode(receiver.describe()).decode()})
    open_places: dict[str, int] = {}
    known: set[str] = set()
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # do not wait for UCX's threads
            receiver.connect(PeerInfo.decode(base64.b64decode(json.loads(line)["peer"])))
        for event in receiver.poll():
            if event.kind is TransferEventKind.STARTED:
                if event.request_id in known:  # a repeated Start of a transfer that has ended
                    continue
                known.add(event.request_id)
                size = event.num_tokens // BLOCK_TOKENS
                place = next(i for i in range(NUM_OPEN) if i not in open_places.values())
                open_places[event.request_id] = place
                receiver.expect(True)
                receiver.grant(
                    KVReservation(
                        request_id=event.request_id, epoch=event.epoch, engine_id=event.engine_id,
                        block_ids=tuple(range(place * size, (place + 1) * size)),
                    )
                )  # fmt: skip
            elif event.kind in (TransferEventKind.COMMITTED, TransferEventKind.FAILED):
                open_places.pop(event.request_id, None)
                receiver.expect(bool(open_places))
        woken.wait(0.1)
        woken.clear()


def answer(values: dict[str, Any]) -> None:
    """Write one line of JSON to standard output."""
    print(json.dumps(values), flush=True)


def end_process(error: Exception) -> None:
    """Print an error that ended the I/O thread, and end this process: no order can be executed."""
    print(repr(error), file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may wait for standard input


def send(connector: str, name: str, listen: str, num_blocks: int) -> None:
    """Execute the orders of standard input until it ends."""
    end = SendingEnd(connector, name, listen, num_blocks)
    answer({"info": base64.b64encode(end.sender.describe()).decode()})
    for line in sys.stdin:
        order = json.loads(line)
        if "peer" in order:
            answer(end.meet(base64.b64decode(order["peer"])))
        else:
            answer(end.load(order["num_blocks"], order["seconds"], order["engine_ids"]))


if __name__ == "__main__":
    role, name, connector, listen, num_blocks = sys.argv[1:]
    {"send": send, "receive": receive}[role](connector, name, listen, int(num_blocks))
