"""Injected faults: a transport that loses, delays, duplicates and reorders messages on request.

Faults are for tests and drills. Faults are off by default; a warning is logged when they are on.
The sender and the receiver do not know that their transport is wrapped. Random numbers are drawn in
the order of events: the same seed and the same order of events give the same faults.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.api.errors import ConfigError, TransferError
from baton.telemetry.logs import close_logging
from kvconnector.base import TransferKey
from kvconnector.layout import KVMemory
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.messages import (
    Commit,
    Digests,
    Grant,
    HelloAck,
    Message,
    SelfTest,
    SelfTestResult,
)
from kvconnector.protocol.seals import peek
from kvconnector.transports.base import KVTransport, PendingWrite, SelfTestMemory

logger = logging.getLogger(__name__)

OPTION = "inject_faults"
WRITE = "Write"  # the name of a write in kill points; other names are types of messages
MESSAGE_NAMES = tuple(kind.__name__ for kind in typing.get_args(Message))
MAX_SWAP_S = 0.1  # maximum number of seconds that a reordered message waits for the next message
MAX_REMEMBERED_GRANTS = 1000


@dataclass(frozen=True, slots=True)
class KillPoint:
    """The moment at which this process kills itself: just before an event's ``count``-th time.

    Attributes:
        name: the event: the type of a message, or ``Write``.
        when: ``send``: the message is sent; ``recv``: it is received.
    """

    name: str
    when: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """The faults to inject. A probability applies to each message, write or commit.

    Attributes:
        drop: probability that a message is lost.
        duplicate: probability that a message is delivered twice.
        reorder: probability that a message is sent only after the next message to the same peer.
        delay_s: minimum and maximum of the seconds by which each sent message is delayed.
        alter: probability that one bit of a message is flipped on arrival, as an attacker could do.
        corrupt: probability that one bit of a transfer's arrived blocks is flipped before the
            Digests or Commit message about them is read.
        fail_post: probability that a write cannot be posted.
        corrupt_test: probability that one bit of a self-test's arrived bytes is flipped before they
            are checked.
        drop_test: probability that a SelfTest or SelfTestResult message is lost, in addition to
            ``drop``.
        kill: the moment at which this process kills itself; None: never.
        hang_engine: number of the engine's rounds with work after which its thread hangs; 0: never.
        poison: if a request's id contains this text, the process ends after it has computed a part
            of the request; empty: never.
        seed: seed of all random numbers.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    alter: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    corrupt: float = 0.0
    fail_post: float = 0.0
    corrupt_test: float = 0.0
    drop_test: float = 0.0
    kill: KillPoint | None = None
    hang_engine: int = 0
    poison: str = ""
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultSpec | None:
        """Parse text such as ``drop=0.01,delay=1ms-20ms,kill=Commit:send:2``; return None if empty.

        Raises ConfigError.
        """
        if not text.strip():
            return None
        fields: dict[str, Any] = {}
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            parser = _PARSERS.get(name)
            if parser is None:
                raise ConfigError(f"{OPTION}: must be among {', '.join(_PARSERS)}, got {item!r}")
            key = "delay_s" if name == "delay" else name
            if key in fields:
                raise ConfigError(f"{OPTION}: {name} must be given once, got {text!r}")
            fields[key] = parser(name, value)
        return cls(**fields)


def _probability(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{OPTION}: {name} must be a probability from 0 to 1, got {value!r}")
    return number


def _delay(name: str, value: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)(?:-(\d+(?:\.\d+)?)(ms|s))?", value)
    units = {"ms": 1e-3, "s": 1.0}
    if match is not None:
        low = float(match[1]) * units[match[2]]
        high = low if match[3] is None else float(match[3]) * units[match[4]]
        if low <= high:
            return low, high
    raise ConfigError(f"{OPTION}: {name} must be a time or a range like 1ms-20ms, got {value!r}")


def _kill(name: str, value: str) -> KillPoint:
    event, when, count, *rest = [*value.split(":"), "", "", ""]
    names = (WRITE, *MESSAGE_NAMES)
    is_whole = event in names and not any(rest) and count.isdecimal() and int(count) > 0
    if not is_whole or when not in (("send",) if event == WRITE else ("send", "recv")):
        raise ConfigError(
            f"{OPTION}: {name} must be NAME:send:N or NAME:recv:N with a name of "
            f"{', '.join(names)}, got {value!r}"
        )
    return KillPoint(event, when, int(count))


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"{OPTION}: {name} must be a number of 0 or more, got {value!r}")
    return int(value)


def _name(name: str, value: str) -> str:
    if not value:
        raise ConfigError(f"{OPTION}: {name} must be a part of a request id, got {value!r}")
    return value


_PARSERS: dict[str, Callable[[str, str], object]] = {
    "drop": _probability,
    "duplicate": _probability,
    "reorder": _probability,
    "alter": _probability,
    "delay": _delay,
    "corrupt": _probability,
    "fail_post": _probability,
    "corrupt_test": _probability,
    "drop_test": _probability,
    "kill": _kill,
    "hang_engine": _number,
    "poison": _name,
    "seed": _number,
}


@dataclass(slots=True)
class _Waiting:
    """A message that is delayed, and sent later."""

    engine_id: str
    payload: bytes
    due_at: float
    is_swapped: bool  # whether the message is sent right after the next message to the same peer


def _end_process() -> None:
    close_logging()  # writes out the log, which shows why the process ended
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyTransport:
    """A transport that wraps another transport, and adds only the specified faults.

    Args:
        transport: the wrapped transport, which moves bytes; this object closes it.
        memory: the KV memory that peers write to.
        spec: the faults, or a function that returns the present faults.
        clock: returns monotonic seconds.
        end_process: kills this process at the kill point.
    """

    def __init__(
        self,
        transport: KVTransport,
        memory: KVMemory,
        spec: FaultSpec | Callable[[], FaultSpec],
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[], None] = _end_process,
    ) -> None:
        logger.warning("FAULTS ARE INJECTED into the KV connector: %s", spec)
        self._transport = transport
        self._bytes = memory.tensor.view(torch.uint8).flatten(1)  # [num_blocks, block_bytes]
        self._find_spec = None if isinstance(spec, FaultSpec) else spec
        self._spec = spec if isinstance(spec, FaultSpec) else spec()
        self._clock = clock
        self._end_process = end_process
        self._random = random.Random(self._spec.seed)
        self._waiting: list[_Waiting] = []
        # Granted transfers whose blocks `corrupt` may damage, and the keys of those with digests
        self._granted: dict[tuple[str, int], Grant] = {}
        self._digested: set[tuple[str, int]] = set()
        self._slots: dict[str, int] = {}  # slots that `corrupt_test` may damage, by engine id
        self._num_until_kill = 0 if self._spec.kill is None else self._spec.kill.count

    @property
    def peer_info(self) -> PeerInfo:
        return self._transport.peer_info

    @property
    def scratch(self) -> SelfTestMemory:
        return self._transport.scratch

    @property
    def num_connections(self) -> int:
        return self._transport.num_connections

    def connect(self, peer: PeerInfo) -> str:
        return self._transport.connect(peer)

    def disconnect(self, engine_id: str) -> None:
        self._transport.disconnect(engine_id)

    def round_trip_s(self, engine_id: str) -> float:
        return self._transport.round_trip_s(engine_id)

    def close(self) -> None:
        self._transport.close()

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        *rest: Any,
    ) -> PendingWrite:
        self._count_event(WRITE, "send")
        if self._happens(self._spec.fail_post):
            raise TransferError("injected fault: the write is not posted")
        return self._transport.write(engine_id, local_block_ids, remote_block_ids, *rest)

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        self._transport.allow(engine_id, transfer, block_ids)

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return self._transport.forbid(engine_id, transfer)

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        return self._transport.write_scratch(engine_id, slot)

    def notify(self, engine_id: str, payload: bytes) -> None:
        message = peek(payload)
        self._count_event(type(message).__name__, "send")
        if isinstance(message, Grant) and self._spec.corrupt:
            self._granted[message.request_id, message.epoch] = message
            if len(self._granted) > MAX_REMEMBERED_GRANTS:
                oldest = next(iter(self._granted))
                del self._granted[oldest]
                self._digested.discard(oldest)
        spec = self._spec
        dropped, doubled, swapped = map(self._happens, (spec.drop, spec.duplicate, spec.reorder))
        # Always draw two numbers, so that later random numbers do not depend on ``doubled``
        delays = [self._random.uniform(*spec.delay_s) for _ in range(2)]
        if isinstance(message, HelloAck) and message.slot is not None:
            self._slots[engine_id] = message.slot
        if isinstance(message, SelfTest | SelfTestResult):
            dropped |= self._happens(spec.drop_test)
        if dropped:
            return
        now = self._clock()
        for delay_s in delays if doubled else delays[:1]:
            if swapped:
                later = _Waiting(engine_id, payload, now + delay_s + MAX_SWAP_S, True)
                self._waiting.append(later)
            elif delay_s:
                self._waiting.append(_Waiting(engine_id, payload, now + delay_s, False))
            else:
                self._transport.notify(engine_id, payload)
        if not swapped:
            for waiting in self._waiting:
                if waiting.is_swapped and waiting.engine_id == engine_id:
                    waiting.due_at = now + delays[0]
        self._send_due()

    def take_notifications(self) -> list[tuple[str, bytes]]:
        if self._find_spec is not None and (spec := self._find_spec()) is not self._spec:
            self._spec = spec
            self._num_until_kill = 0 if spec.kill is None else spec.kill.count
        self._send_due()
        payloads = self._transport.take_notifications()
        if self._spec.alter:
            payloads = [(sender, self._altered(payload)) for sender, payload in payloads]
        for _, payload in payloads:
            try:
                message = peek(payload)
            except TransferError:  # cannot be decoded: the inbox refuses it
                continue
            self._count_event(type(message).__name__, "recv")
            if isinstance(message, Commit | Digests):
                self._corrupt_blocks(message)
            elif isinstance(message, SelfTest) and message.engine_id in self._slots:
                self._corrupt_test(self._slots.pop(message.engine_id))
        return payloads

    # ------------------------------------------------------------------ inside

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _count_event(self, name: str, when: str) -> None:
        """Count an event; kill this process if the spec's kill point is reached."""
        kill = self._spec.kill
        if kill is None or (kill.name, kill.when) != (name, when):
            return
        self._num_until_kill -= 1
        if self._num_until_kill == 0:
            logger.critical("injected fault: killed before %s:%s:%d", name, when, kill.count)
            self._end_process()

    def _send_due(self) -> None:
        now = self._clock()
        due = [waiting for waiting in self._waiting if waiting.due_at <= now]
        if not due:
            return
        self._waiting = [waiting for waiting in self._waiting if waiting.due_at > now]
        for waiting in sorted(due, key=lambda waiting: waiting.due_at):
            try:
                self._transport.notify(waiting.engine_id, waiting.payload)
            except TransferError as error:  # the router may have lost the peer
                logger.warning("a delayed message to %s is lost: %s", waiting.engine_id, error)

    def _altered(self, payload: bytes) -> bytes:
        if not payload or not self._happens(self._spec.alter):
            return payload
        changed = bytearray(payload)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _corrupt_blocks(self, message: Commit | Digests) -> None:
        """Flip a bit in the blocks that a message reports, before this node reads the blocks."""
        key = (message.request_id, message.epoch)
        grant = self._granted.get(key)
        block_ids = [] if grant is None else grant.block_ids
        # With digests, the blocks are compared now, not at the Commit
        if isinstance(message, Digests):
            if grant is not None:
                self._digested.add(key)
                places = [index - grant.first_block for index in message.indices]
                block_ids = [block_ids[i] for i in places if 0 <= i < len(block_ids)]
        else:
            self._granted.pop(key, None)
            if key in self._digested:
                self._digested.discard(key)
                return
        if not block_ids or not self._happens(self._spec.corrupt):
            return
        block_id = self._random.choice(block_ids)
        offset = self._random.randrange(self._bytes.shape[1])
        bit = 1 << self._random.randrange(8)
        with torch.inference_mode():
            self._bytes[block_id, offset] ^= bit
        logger.warning("injected fault: a bit of block %d is flipped", block_id)

    def _corrupt_test(self, slot: int) -> None:
        if not self._happens(self._spec.corrupt_test):
            return
        row = self.scratch.memory[1 + slot]
        with torch.inference_mode():
            row[self._random.randrange(len(row))] ^= 1 << self._random.randrange(8)
        logger.warning("injected fault: a bit of a self-test is flipped")
