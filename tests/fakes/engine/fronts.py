"""Fronts: `LLM` and `AsyncLLM` behind one blocking interface, so that tests run over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

from baton.api.outputs import Completion, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from engine import LLM, AsyncLLM
from engine.engine import Engine

FRONTS = ("LLM", pytest.param("AsyncLLM", marks=pytest.mark.medium))  # loops open sockets


class Front(Protocol):
    """The methods that both classes have."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def generate(
        self, prompts: Any, params: Any = None, *, priority: int | Sequence[int] = 0
    ) -> list[Completion]: ...
    def chat(self, conversations: Any, params: Any = None) -> list[Completion]: ...
    def stream(
        self, prompt: Any, params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]: ...


class BlockingAsyncLLM:
    """An `AsyncLLM` whose calls block, each on an event loop of its own."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm, self.engine, self.tokenizer = llm, llm.engine, llm.tokenizer

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        return asyncio.run(self.llm.generate(prompts, params, priority=priority))

    def chat(self, conversations: Any, params: SamplingParams | None = None) -> list[Completion]:
        return asyncio.run(self.llm.chat(conversations, params))

    def stream(
        self, prompt: Any, params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Yield the pieces; returns or closes once the engine's thread has ended the request."""
        with asyncio.Runner() as runner:
            pieces = self.llm.stream(prompt, params)

            async def next_piece() -> TextDelta | None:
                return await anext(pieces, None)

            try:
                while (piece := runner.run(next_piece())) is not None:
                    yield piece
            finally:
                runner.run(pieces.aclose())
                self.llm._thread.call(lambda: None).result()


async def until(condition: Callable[[], object]) -> None:
    """Wait, on an event loop, until a condition of another thread is true."""
    while not condition():  # noqa: ASYNC110  # another thread makes it true
        await asyncio.sleep(0.001)


@contextmanager
def open_front(name: str, model: str, **options: Any) -> Iterator[Front]:
    """Open a front by the name of its class, and close it."""
    if name == "LLM":
        yield LLM(model, **options)  # type: ignore[misc]  # takes more than the protocol
        return
    llm = AsyncLLM(model, **options)
    try:
        yield BlockingAsyncLLM(llm)
    finally:
        asyncio.run(llm.close())
