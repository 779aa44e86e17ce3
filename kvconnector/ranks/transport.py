"""RanksTransport: presents the transports of all ranks of a node as one transport.

    write ──┬── the transport of this process's rank       each rank writes its own slices; a write
            └── the other ranks' transports, by messages   is complete when all ranks' parts are

The leading processes of two nodes exchange protocol messages over their own transports. A reported
failure means that a write is not in flight. If a rank's process has ended, this is unknown, so no
failure is reported. Instead the whole node ends, and its peers notice the end.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.ranks.messages import (
    ENCODER,
    FROM_RANK,
    Answer,
    Call,
    DigestSlices,
    DigestSlot,
    Ended,
    Forget,
    Learn,
    LendSlot,
    Permit,
    Prohibit,
    Ready,
    ToRank,
    WriteBlocks,
    WriteSlot,
)
from kvconnector.transports.base import KVTransport, PendingWrite, SelfTestMemory
from kvconnector.transports.write_parts import WriteParts

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0
_NOBODY_WAITS = 0  # the call number of every call whose answer nobody awaits


class OtherRank:
    """Another rank's transport, as the leading process sees it.

    Args:
        rank: the rank's number.
        connection: connection to the rank's `RankService`.

    Attributes:
        is_gone: whether the connection is broken; messages to the rank are then dropped.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.is_gone = False
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._memory: RankMemory | None = None
        self._awaited: set[int] = set()  # numbers of calls; other calls' answers are dropped
        self._answers: dict[int, Answer] = {}
        self._ended: dict[int, str] = {}

    def say(self, message: ToRank) -> None:
        """Send a message to the rank; do nothing if the rank is gone."""
        try:
            self._connection.send_bytes(ENCODER.encode(message))
        except OSError:
            self.is_gone = True

    def hear(self, wait_s: float = 0.0) -> None:
        """Receive all messages from the rank that wait; wait up to ``wait_s`` for the first."""
        try:
            while not self.is_gone and self._poll.poll(wait_s * 1e3):
                wait_s = 0.0
                message = FROM_RANK.decode(self._connection.recv_bytes())
                match message:
                    case Ready(memory=memory):
                        self._memory = memory
                    case Answer(call=call):
                        if call in self._awaited:
                            self._answers[call] = message
                    case Ended(number=number, problem=problem):
                        self._ended[number] = problem
        except (EOFError, OSError):
            self.is_gone = True

    @contextlib.contextmanager
    def awaited(self, call: int) -> Iterator[None]:
        """Keep the answer to a call until the end of the ``with`` block; drop a later answer."""
        self._awaited.add(call)
        try:
            yield
        finally:
            self._awaited.remove(call)
            self._answers.pop(call, None)

    def answer(self, call: int, deadline: float) -> Any:
        """Wait until ``deadline`` for an `awaited` call's answer.

        Raises TransferError if no answer comes, or if the answer is a problem.
        """
        self._wait(lambda: call in self._answers, deadline)
        answer = self._answers[call]
        if answer.problem:
            raise TransferError(answer.problem)
        return answer.value

    def memory(self, deadline: float) -> RankMemory:
        """Wait until the rank is ready, and return the addresses of its memory."""
        self._wait(lambda: self._memory is not None, deadline)
        assert self._memory is not None
        return self._memory

    def take_end(self, number: int) -> str | None:
        """Return why a write failed; empty: the write is complete; None: it is still in flight."""
        if number not in self._ended:
            self.hear()
        return self._ended.pop(number, None)

    def hang_up(self) -> None:
        """Close the connection, which ends the rank's service."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self.is_gone = True

    def _wait(self, is_there: Callable[[], bool], deadline: float) -> None:
        while not is_there():
            left_s = deadline - time.monotonic()
            if self.is_gone or left_s <= 0:
                what = "is gone" if self.is_gone else "does not answer"
                raise TransferError(f"the transport of rank {self.rank} {what}")
            self.hear(left_s)


class _RankWrite:
    """One rank's part of a write, which the rank was told to post."""

    def __init__(self, rank: OtherRank, number: int) -> None:
        self._rank, self._number = rank, number

    def is_done(self) -> bool:
        """Return whether the write is complete; if the rank is gone, the write stays in flight."""
        problem = self._rank.take_end(self._number)
        if problem:
            raise TransferError(problem)
        return problem is not None


class RanksScratch:
    """The scratch memory of all ranks. A slot has one digest only if all ranks' digests agree."""

    def __init__(self, own: SelfTestMemory, call: Callable[..., list[Any]]) -> None:
        self._own, self._call = own, call

    @property
    def memory(self) -> torch.Tensor:
        return self._own.memory

    @property
    def is_on_device(self) -> bool:
        return self._own.is_on_device

    @property
    def digest(self) -> bytes:
        return self._own.digest

    def lend(self, slot: int, engine_id: str) -> None:
        self._call(
            lambda call: LendSlot(call, slot, engine_id), lambda: self._own.lend(slot, engine_id)
        )

    def digest_of(self, slot: int) -> bytes:
        found = self._call(lambda call: DigestSlot(call, slot), lambda: self._own.digest_of(slot))
        return b"" if len(set(found)) > 1 else bytes(found[0])


class RanksTransport:
    """Commands the transports of all ranks of a node as one `KVTransport`.

    Args:
        local: the transport of this process's rank; this object closes it.
        connections: connections to the other ranks' services, by rank.
    """

    def __init__(self, local: KVTransport, connections: Mapping[int, Connection]) -> None:
        self._local = local
        self._others = [OtherRank(rank, link) for rank, link in sorted(connections.items())]
        self._numbers = itertools.count(1)
        deadline = time.monotonic() + START_TIMEOUT_S
        own = local.peer_info
        memories = {other.rank: other.memory(deadline) for other in self._others}
        memories[own.manifest.leader] = own.ranks[0]
        self.peer_info = msgspec.structs.replace(
            own, ranks=tuple(memories[rank] for rank in range(own.manifest.num_ranks))
        )
        self.scratch = RanksScratch(local.scratch, self.call)

    def call(self, make: Callable[[int], Call], own: Callable[[], Any]) -> list[Any]:
        """Call all other ranks, and run ``own`` here; return this rank's answer, then the others.

        ``make`` returns the message for the number of the call.

        Raises TransferError if a rank does not answer, or answers with a problem.
        """
        deadline = time.monotonic() + CALL_TIMEOUT_S
        number = next(self._numbers)
        with contextlib.ExitStack() as waits:
            for other in self._others:
                waits.enter_context(other.awaited(number))
                other.say(make(number))
            answer = own()
            return [answer, *(other.answer(number, deadline) for other in self._others)]

    def digest(self, make: Callable[[int], DigestSlices]) -> dict[int, list[bytes]]:
        """Send each other rank the message that ``make`` returns; return the digests by rank."""
        _, *found = self.call(make, lambda: None)
        ranks = [other.rank for other in self._others]
        return dict(zip(ranks, found, strict=True))

    @property
    def num_connections(self) -> int:
        return self._local.num_connections

    def connect(self, peer: PeerInfo) -> str:
        blob = peer.encode()
        paths: list[str] = self.call(
            lambda call: Learn(call, blob), lambda: self._local.connect(peer)
        )
        return next((path for path in paths[1:] if path != paths[0]), paths[0])

    def disconnect(self, engine_id: str) -> None:
        for other in self._others:
            other.say(Forget(engine_id))
        self._local.disconnect(engine_id)

    def round_trip_s(self, engine_id: str) -> float:
        return self._local.round_trip_s(engine_id)

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PendingWrite:
        own, remote = list(local_block_ids), list(remote_block_ids)
        return self._write(
            lambda number: WriteBlocks(
                number, engine_id, own, remote, layers, *transfer, list(groups)
            ),
            lambda: self._local.write(engine_id, own, remote, layers, transfer, groups),
        )

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        return self._write(
            lambda number: WriteSlot(number, engine_id, slot),
            lambda: self._local.write_scratch(engine_id, slot),
        )

    def _write(
        self,
        make: Callable[[int], WriteBlocks | WriteSlot],
        post: Callable[[], PendingWrite],
    ) -> PendingWrite:
        """Post a write on all ranks; return the write that consists of all ranks' parts."""
        number, parts, problem = next(self._numbers), list[PendingWrite](), ""
        for other in self._others:
            other.say(make(number))
            parts.append(_RankWrite(other, number))
        try:
            parts.append(post())
        except (TransferError, ValueError) as error:
            problem = str(error) or "it failed"
        return WriteParts(parts, problem)

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        for other in self._others:
            other.say(Permit(engine_id, *transfer, list(block_ids)))
        self._local.allow(engine_id, transfer, block_ids)

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        own = self._local.forbid(engine_id, transfer)
        if own:
            return all(self.call(lambda call: Prohibit(call, engine_id, *transfer), lambda: own))
        for other in self._others:
            other.say(Prohibit(_NOBODY_WAITS, engine_id, *transfer))
        return False

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._local.notify(engine_id, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        for other in self._others:
            other.hear()
        return self._local.take_notifications()

    def close(self) -> None:
        for other in self._others:
            other.hang_up()
        self._local.close()
