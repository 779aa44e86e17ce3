"""Journal: keeps the streams of resumable requests; a stream outlives the calls that read it.

A client that reconnects reads the stored pieces of its stream again. The number and the size of
kept streams are limited. The journal does not know gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from baton.api.errors import BatonError, InvalidRequestError, OverloadedError
from baton.api.outputs import TextDelta, count_logprobs, join_deltas

# Maximum number of calls that read one stream. A call whose connection is lost counts as a reader
# until the loss is noticed.
MAX_READERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions:
    """Limits of the journal.

    Attributes:
        grace_s: seconds that a stream without readers is kept, whether it runs or has ended.
        max_streams: maximum number of streams kept for all tenants together; one tenant may use
            half.
        max_bytes: maximum number of bytes kept for all tenants together; one tenant may use half,
            one stream a quarter.
    """

    grace_s: float = 10.0
    max_streams: int = 1024
    max_bytes: int = 64 * 2**20


_Key = tuple[str, str]  # (tenant, request id), because two tenants may use the same request id


@dataclass(slots=True, eq=False)
class _Stream:
    digest: bytes  # hash of the request's content
    task: asyncio.Task[None] | None = None
    deltas: list[TextDelta] = field(default_factory=list)
    is_done: bool = False
    error: BatonError | None = None
    num_readers: int = 0
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None


class Journal:
    """The streams of all resumable requests of one router."""

    def __init__(self, options: JournalOptions | None = None) -> None:
        self._options = options or JournalOptions()
        self._streams: dict[_Key, _Stream] = {}  # oldest first

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes that all kept streams have together."""
        return sum(stream.num_bytes for stream in self._streams.values())

    @property
    def num_streams(self) -> int:
        """Number of kept streams, whether they run or have ended."""
        return len(self._streams)

    def holds(self, request_id: str, content: bytes, *, tenant: str = "") -> bool:
        """Return whether the journal keeps the stream of this request.

        A stream that failed is forgotten, so a client that sends the request again starts it anew.

        Raises InvalidRequestError if the kept request with this id has another content.
        """
        key = (tenant, request_id)
        stream = self._streams.get(key)
        if stream is None:
            return False
        if stream.digest != _digest(content):
            raise InvalidRequestError("request_id", f"{request_id!r} is another request's")
        if stream.error is not None:
            self._forget(key, stream)
        return stream.error is None

    def keep(
        self,
        request_id: str,
        content: bytes,
        deltas: AsyncGenerator[TextDelta, None],
        *,
        tenant: str = "",
    ) -> None:
        """Start a stream and keep it, so that all calls of its tenant may read it.

        Raises OverloadedError if the journal is full.
        """
        self._make_room(tenant)
        key = (tenant, request_id)
        stream = self._streams[key] = _Stream(_digest(content))
        stream.task = asyncio.create_task(self._run(stream, deltas))
        self._expect_reader(key, stream)

    async def read(
        self, request_id: str, output_index: int, *, tenant: str = ""
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the rest of a stream from an output index on; stored pieces are joined into one.

        Raises InvalidRequestError for an unknown id or an index that is not the beginning of a
        piece, OverloadedError for too many readers, and the error with which the stream ended.
        """
        key = (tenant, request_id)
        stream = self._streams.get(key)
        if stream is None:
            raise InvalidRequestError("request_id", f"{request_id!r} is not (or no longer) kept")
        position = _position(stream.deltas, output_index)
        if stream.num_readers >= MAX_READERS:
            raise OverloadedError(f"resumable: {MAX_READERS} calls read {request_id!r} already")
        stream.num_readers += 1
        if stream.expiry is not None:
            stream.expiry.cancel()
        try:
            while True:
                if position < len(stream.deltas):
                    pieces, position = stream.deltas[position:], len(stream.deltas)
                    yield join_deltas(pieces)
                elif stream.error is not None:
                    raise stream.error
                elif stream.is_done:
                    assert stream.task is not None
                    # Raises the error if the stream ended with an unexpected error
                    await stream.task
                    return
                else:
                    await stream.changed.wait()
        finally:
            stream.num_readers -= 1
            self._expect_reader(key, stream)

    # ------------------------------------------------------------------ inside

    async def _run(self, stream: _Stream, deltas: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async for delta in deltas:
                stream.deltas.append(delta)
                stream.num_bytes += _num_bytes(delta)
                _note_change(stream)
                if stream.num_bytes > self._options.max_bytes // 4:
                    raise OverloadedError(
                        "resumable: the request's output is too long to keep: "
                        f"{stream.num_bytes} bytes are kept"
                    )
        except BatonError as error:
            stream.error = error
        finally:
            await deltas.aclose()
            stream.is_done = True
            _note_change(stream)

    def _expect_reader(self, key: _Key, stream: _Stream) -> None:
        """Forget a stream without readers if no call reads it within the grace time."""
        if stream.num_readers == 0 and self._streams.get(key) is stream:
            loop = asyncio.get_running_loop()
            grace_s = self._options.grace_s
            stream.expiry = loop.call_later(grace_s, self._forget, key, stream)

    def _forget(self, key: _Key, stream: _Stream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
        if stream.expiry is not None:
            stream.expiry.cancel()
        if stream.task is not None:
            stream.task.cancel()  # cancelling the task cancels the request on its nodes

    def _make_room(self, tenant: str) -> None:
        """Make room for one more stream; forget ended streams without readers, oldest first.

        A tenant at its own limit loses only its own streams. Other tenants' streams are forgotten
        only if all tenants together exceed the limit, so no tenant can lock out others.

        Raises OverloadedError if too few streams can be forgotten.
        """
        own = {key: stream for key, stream in self._streams.items() if key[0] == tenant}
        parts = (
            [(own, 2, "of this tenant")] if tenant else []
        )  # without tenants, all streams belong to one tenant
        for part, share, whose in (*parts, (self._streams, 1, "of all")):
            max_streams = max(self._options.max_streams // share, 1)
            max_bytes = self._options.max_bytes // share
            num_streams = len(part)
            num_bytes = sum(stream.num_bytes for stream in part.values())
            for key, stream in list(part.items()):
                if num_streams < max_streams and num_bytes < max_bytes:
                    break
                if stream.is_done and stream.num_readers == 0:
                    num_streams -= 1
                    num_bytes -= stream.num_bytes
                    self._forget(key, stream)
            if num_streams >= max_streams or num_bytes >= max_bytes:
                raise OverloadedError(
                    f"resumable: no room: {num_streams} requests, {num_bytes} bytes {whose}"
                )


def _digest(content: bytes) -> bytes:
    """Return a hash of a request's content, which is kept instead of the content."""
    return hashlib.sha256(content).digest()


def _position(deltas: Sequence[TextDelta], output_index: int) -> int:
    """Return the position of the piece that begins at an output index."""
    end = 0
    for position, delta in enumerate(deltas):
        if delta.output_index == output_index:
            return position
        end = delta.output_index + len(delta.token_ids)
    if output_index != end:
        raise InvalidRequestError(
            "next_output_index", f"must be where a response ended, got {output_index}"
        )
    return len(deltas)


def _num_bytes(delta: TextDelta) -> int:
    num_bytes = 300 + 36 * len(delta.token_ids) + 4 * len(delta.text)
    return num_bytes + 150 * count_logprobs(delta)


def _note_change(stream: _Stream) -> None:
    stream.changed.set()
    stream.changed = asyncio.Event()
