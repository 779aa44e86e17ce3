"""Unit tests of choices: n outputs of one prompt are n requests whose streams run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.prompt import choice_seed
from baton.sampling_params import MAX_SEED, SamplingParams
from router.choices import merge_streams, split_choices
from router.intake import GenerationRequest


def request(params: SamplingParams, request_id: str = "a") -> GenerationRequest:
    return GenerationRequest(
        prompt="x", sampling_params=params, request_id=request_id, received_at=0.0
    )


def test_one_output_is_the_request_itself() -> None:
    one = request(SamplingParams())
    assert split_choices(one) == [one]


def test_each_output_has_its_own_id_and_the_next_seed() -> None:
    parts = split_choices(request(SamplingParams(n=3, seed=7, top_k=5)))
    assert [part.request_id for part in parts] == ["a", "a-1", "a-2"]
    assert [part.sampling_params for part in parts] == [
        SamplingParams(seed=seed, top_k=5) for seed in (7, 8, 9)
    ]


def test_without_id_and_seed_they_are_drawn_once_for_all() -> None:
    first, second = split_choices(request(SamplingParams(n=2), request_id=""))
    assert second.request_id == f"{first.request_id}-1"
    assert first.sampling_params.seed is not None
    assert second.sampling_params.seed == choice_seed(first.sampling_params.seed, 1)


def test_seeds_wrap_around_and_stay_seeds() -> None:
    assert choice_seed(MAX_SEED, 1) == -MAX_SEED - 1
    assert choice_seed(-1, 1) == 0
    SamplingParams(seed=choice_seed(MAX_SEED, 127))


class Stream:
    """Yields what it is fed; remembers that it was closed."""

    def __init__(self) -> None:
        self.fed: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.fed.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


def test_streams_are_merged_as_they_come_and_end_together() -> None:
    async def run() -> None:
        streams = [Stream(), Stream()]
        merged = merge_streams([stream.items() for stream in streams])
        streams[1].fed.put_nowait(10)
        assert await anext(merged) == (1, 10)
        streams[0].fed.put_nowait(20)
        streams[0].fed.put_nowait(None)
        assert await anext(merged) == (0, 20)
        streams[1].fed.put_nowait(11)
        streams[1].fed.put_nowait(None)
        assert [item async for item in merged] == [(1, 11)]
        assert all(stream.closed for stream in streams)

    asyncio.run(run())


@pytest.mark.parametrize("fails", [True, False], ids=["one fails", "the reader leaves"])
def test_when_it_ends_early_every_stream_is_closed(fails: bool) -> None:
    async def run() -> None:
        streams = [Stream(), Stream(), Stream()]
        merged = merge_streams([stream.items() for stream in streams])
        streams[0].fed.put_nowait(1)
        assert await anext(merged) == (0, 1)
        if fails:
            streams[1].fed.put_nowait(ValueError("x"))
            with pytest.raises(ValueError, match="x"):
                await anext(merged)
        else:
            await merged.aclose()
        assert all(stream.closed for stream in streams)

    asyncio.run(run())
