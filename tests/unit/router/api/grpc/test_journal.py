"""Unit tests of the journal: what one tenant keeps leaves room for others, and is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.api.errors import OverloadedError
from baton.api.outputs import FinishReason, TextDelta
from router.api.grpc.journal import MAX_READERS, Journal, JournalOptions
from tests.fakes.router.router_scene import Scene, asynchronous


async def running() -> AsyncGenerator[TextDelta, None]:
    yield TextDelta("r", 0, (1,), "x")
    await asyncio.Event().wait()


async def ended() -> AsyncGenerator[TextDelta, None]:
    yield TextDelta("r", 0, (1,), "x", FinishReason.STOP)


async def endless() -> AsyncGenerator[TextDelta, None]:
    for index in range(10_000):
        yield TextDelta("r", index, (1,), "x" * 100)


@asynchronous
async def test_a_tenant_has_half_of_the_journal_and_takes_nothing_from_others() -> None:
    journal = Journal(JournalOptions(max_streams=8))
    journal.keep("kept", b"", ended(), tenant="b")
    for number in range(4):
        journal.keep(f"{number}", b"", running(), tenant="a")
    with pytest.raises(OverloadedError, match=r"4 requests, .* of this tenant$"):
        journal.keep("more", b"", running(), tenant="a")
    journal.keep("other", b"", running(), tenant="b")
    await Scene.pause()
    assert journal.holds("kept", b"", tenant="b")


@asynchronous
async def test_what_a_tenant_keeps_makes_room_for_its_own() -> None:
    journal = Journal(JournalOptions(max_streams=8))
    journal.keep("kept", b"", ended(), tenant="b")
    for number in range(20):
        journal.keep(f"{number}", b"", ended(), tenant="a")
        await Scene.pause()
    assert journal.holds("kept", b"", tenant="b")
    assert journal.num_streams == 5


@asynchronous
async def test_one_stream_is_bounded_while_it_runs() -> None:
    journal = Journal(JournalOptions(max_bytes=2**16))
    journal.keep("long", b"", endless(), tenant="a")
    with pytest.raises(OverloadedError, match=r"^resumable: the request's output is too long"):
        async for _ in journal.read("long", 0, tenant="a"):
            pass
    assert journal.num_bytes < 2**15


@asynchronous
async def test_a_stream_has_few_readers() -> None:
    """Each is told every piece: 2,000 calls that resume one request held up everybody."""
    journal = Journal()
    journal.keep("r", b"", running())
    readers = [journal.read("r", 0) for _ in range(MAX_READERS + 1)]
    for reader in readers[:MAX_READERS]:
        assert (await anext(reader)).text == "x"
    with pytest.raises(OverloadedError, match="16 calls read 'r' already"):
        await anext(readers[-1])
    await readers[0].aclose()
    assert (await anext(journal.read("r", 0))).text == "x"
    for reader in readers:
        await reader.aclose()
