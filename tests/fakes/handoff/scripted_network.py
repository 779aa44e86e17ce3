"""A network in which every message and every write moves by hand, in any order or not at all.

Stands in for NIXL where a test wants each interleaving. As there, a posted write reads its source
and writes its destination at any time until it is done, and nothing can call it back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange, check_block_ids, check_layers
from kvconnector.layout import KVMemory
from kvconnector.peer_info import NUM_SLOTS, PeerInfo, RankMemory
from kvconnector.protocol.messages import Message
from kvconnector.protocol.seals import HEADER_BYTES, Channels, peek
from kvconnector.transports.scratch import Scratch


@dataclass(slots=True, eq=False)
class ScriptedWrite:
    """One posted write: `land` it or `fail` it."""

    source: ScriptedTransport
    target: ScriptedTransport
    local_block_ids: list[int]
    remote_block_ids: list[int]
    layers: LayerRange | None = None
    done: bool = False
    failed: bool = False

    def is_done(self) -> bool:
        if self.failed:
            raise TransferError("the write failed")
        return self.done

    def land(self) -> None:
        """Move the bytes now, even if the blocks at an end have another owner by now."""
        part = slice(None) if self.layers is None else slice(*self.layers)
        with torch.inference_mode():
            moved = self.source.kv_cache[self.local_block_ids, part]
            self.target.kv_cache[self.remote_block_ids, part] = moved
        self.done = True


@dataclass(slots=True, eq=False)
class ScriptedTestWrite:
    """One posted write of a self-test."""

    source: Scratch
    target: Scratch
    slot: int
    done: bool = False
    failed: bool = False

    def is_done(self) -> bool:
        if self.failed:
            raise TransferError("the write failed")
        return self.done

    def land(self) -> None:
        with torch.inference_mode():
            self.target.memory[1 + self.slot] = self.source.memory[0]
        self.done = True


@dataclass(slots=True, eq=False)
class ScriptedMessage:
    """One message on its way."""

    source: str
    target: str
    payload: bytes


@dataclass(slots=True)
class ScriptedNetwork:
    """Messages and writes in flight between scripted transports.

    Attributes:
        seen: the latest messages that were sent, as anybody on the network may have copied them.
        late: messages that everything else overtakes until `arrive` or `release`.
        delays: kinds of message of which the next one will be late; with True only a double of it.
        holds_tests: whether the writes of self-tests, which land at once otherwise, are held.
    """

    ends: dict[str, ScriptedTransport] = field(default_factory=dict)
    messages: list[ScriptedMessage] = field(default_factory=list)
    late: list[ScriptedMessage] = field(default_factory=list)
    delays: dict[type[Message], bool] = field(default_factory=dict)
    writes: list[ScriptedWrite] = field(default_factory=list)
    holds_tests: bool = False
    test_writes: list[ScriptedTestWrite] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # blocks of targets, as their writes landed
    seen: deque[ScriptedMessage] = field(default_factory=lambda: deque(maxlen=200))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Deliver one message; with ``keep`` its sender will send it once more."""
        message = self.messages[index]
        if keep:
            self.messages[index] = self.said_again(message)
        else:
            del self.messages[index]
        self._put_into_inbox(message)

    def said_again(self, message: ScriptedMessage) -> ScriptedMessage:
        """Seal a message's content again, as receivers drop an exact copy of a message."""
        source = self.ends.get(message.source)
        if source is None or source.channels is None:
            return message
        body = message.payload[HEADER_BYTES:]
        payload = source.channels[message.target].seal(body)
        return ScriptedMessage(message.source, message.target, payload)

    def _put_into_inbox(self, message: ScriptedMessage) -> None:
        if message.target in self.ends:
            self.ends[message.target].inbox.append((message.source, message.payload))

    def send(self, message: ScriptedMessage) -> None:
        """Put a node's message on its way."""
        self.seen.append(message)
        kind = type(peek(message.payload))
        if kind not in self.delays:
            self.messages.append(message)
            return
        self.late.append(message)
        if self.delays.pop(kind):
            self.messages.append(self.said_again(message))

    def arrive(self, index: int) -> None:
        """Let a late message arrive."""
        self._put_into_inbox(self.late.pop(index))

    def release(self) -> None:
        """Put late messages before all others, and delay no more messages."""
        self.delays.clear()
        self.messages = self.late + self.messages
        self.late = []

    def drop(self, index: int) -> None:
        del self.messages[index]

    def land(self, index: int) -> None:
        write = self.writes.pop(index)
        write.land()
        if write.layers is None or write.layers[0] == 0:  # a block that comes in parts counts once
            self.written += write.remote_block_ids

    def land_damaged(self, index: int, place: int, byte: int, bit: int) -> None:
        """Land the write with one wrong bit; ``place`` and ``byte`` wrap around."""
        write = self.writes.pop(index)
        write.land()
        block_id = write.remote_block_ids[place % len(write.remote_block_ids)]
        part = slice(None) if write.layers is None else slice(*write.layers)
        written = write.target.kv_cache[block_id, part].view(-1).view(torch.uint8)
        with torch.inference_mode():
            written[byte % len(written)] ^= 1 << bit

    def fail(self, index: int, *, landed: bool) -> None:
        """End a write with an error; its bytes may have arrived all the same."""
        write = self.writes.pop(index)
        if landed:
            write.land()
        write.failed = True

    def kill(self, engine_id: str) -> None:
        """End a process: its writes stop, writes to it fail, and its messages are not read.

        What it had sent of its writes lies in the sockets of their targets, which read it later.
        """
        self.ends.pop(engine_id)
        for write in self.writes:
            write.failed |= write.target.engine_id == engine_id
            if write.source.engine_id == engine_id:
                write.target.socket.append(write)
        self.writes = [
            write
            for write in self.writes
            if engine_id not in (write.source.engine_id, write.target.engine_id)
        ]


class ScriptedTransport:
    """See `KVTransport` for the contract.

    Args:
        engine_id: name of this end.
        memory: memory that peers write to.
        network: moves what this end sends.
    """

    def __init__(self, engine_id: str, memory: KVMemory, network: ScriptedNetwork) -> None:
        self.engine_id = engine_id
        self.kv_cache = memory.tensor
        self.scratch = Scratch(engine_id, memory.tensor, slot_bytes=64)
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.channels: Channels | None = None  # of the end that owns this, if messages are doubled
        self.socket: list[ScriptedWrite] = []  # sent by processes that have ended
        self._network = network
        self._peers: set[str] = set()
        self.peer_info = PeerInfo(
            engine_id=engine_id,
            connector="scripted",
            host="one",
            pid=0,
            manifest=memory.manifest,
            num_blocks=len(memory.tensor),
            ranks=(RankMemory(),),
            scratch_bytes=self.scratch.memory.nbytes,
        )
        network.ends[engine_id] = self

    @property
    def num_connections(self) -> int:
        return len(self._peers)

    def connect(self, peer: PeerInfo) -> str:
        if peer.engine_id not in self._network.ends:
            raise TransferError(f"{peer.engine_id} does not answer")
        self._peers.add(peer.engine_id)
        return "scripted"

    def disconnect(self, engine_id: str) -> None:
        self._peers.discard(engine_id)

    def round_trip_s(self, engine_id: str) -> float:
        return 0.0

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> ScriptedWrite:
        target = self._target(engine_id)
        check_block_ids(local_block_ids, len(self.kv_cache))
        check_block_ids(remote_block_ids, len(target.kv_cache))
        assert len(local_block_ids) == len(remote_block_ids) > 0
        check_layers(layers, self.kv_cache.shape[1])
        write = ScriptedWrite(self, target, list(local_block_ids), list(remote_block_ids), layers)
        self._network.writes.append(write)
        return write

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return False

    def write_scratch(self, engine_id: str, slot: int) -> ScriptedTestWrite:
        check_block_ids([slot], NUM_SLOTS)
        write = ScriptedTestWrite(self.scratch, self._target(engine_id).scratch, slot)
        if self._network.holds_tests:
            self._network.test_writes.append(write)
        else:
            write.land()
        return write

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._target(engine_id)
        self._network.send(ScriptedMessage(self.engine_id, engine_id, payload))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        num_read = (len(self.socket) + 1) // 2  # of what is there; the kernel hands over the rest
        for write in self.socket[:num_read]:
            write.land()
        del self.socket[:num_read]
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def close(self) -> None:
        self._network.ends.pop(self.engine_id, None)

    def _target(self, engine_id: str) -> ScriptedTransport:
        target = self._network.ends.get(engine_id)
        if engine_id not in self._peers or target is None:
            raise TransferError(f"{engine_id} cannot be reached")
        return target
