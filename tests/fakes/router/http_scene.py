"""The HTTP API on a socket over hand-driven nodes, for tests that say when nodes speak and fail."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import aiohttp
import msgspec

from baton.api.outputs import FinishReason, RequestDelta, TokenLogprobs
from baton.link.words import PrefillCommand, RequestError
from baton.text.tokenizer import Tokenizer
from router.api.http_server import HttpServer
from router.api.ui.page import StatusPage
from router.calls.recovery.recovery import Recoveries
from router.gate.overload import Overload
from router.intake.images.image_options import ImageOptions
from router.intake.images.image_reader import ImageReader
from router.intake.metrics import RouterMetrics
from router.intake.parsers.choice import OutputParsers
from router.names.defaults import NameDefaults
from router.names.metrics_page import MetricsPage
from router.policies.least_tokens import LeastTokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.image_tokenizer import image_tokenizer, rows_layout
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT, join_pair, make_pool
from tests.fakes.router.router_scene import NO_RETRIES, RecordingDispatcher

TOKENIZER = Tokenizer(DEMO_MODEL)
MODEL = "demo"


class HttpScene:
    """A router's HTTP API with one pair of nodes that a test speaks for.

    Attributes:
        session: an HTTP client; ``url`` is where the API is.
        headers: headers of every posted request.

    Args:
        images: limits of images; None: the model reads text only.
    """

    def __init__(
        self,
        *,
        pair: bool = True,
        timeout_s: float = 60.0,
        parsers: OutputParsers | None = None,
        max_model_len: int = 100,
        sampling_defaults: Mapping[str, float | int] | None = None,
        trusts_templates: bool = False,
        served: Mapping[str, NameDefaults] | None = None,
        images: ImageOptions | None = None,
        encodes_images: bool = False,
        **options: Any,
    ) -> None:
        self.pool = make_pool(max_model_len=20_000)
        if pair:
            self.prefill, self.decode = join_pair(
                self.pool, max_model_len=max_model_len, encodes_images=encodes_images
            )
        self.dispatcher = RecordingDispatcher(
            self.pool, LeastTokens(), Recoveries(self.pool, NO_RETRIES)
        )
        self.metrics = RouterMetrics(self.pool)
        self.intake = intake = make_intake(
            self.dispatcher,
            TOKENIZER if images is None else image_tokenizer(),
            vocab_size=4096 if images is None else 4200,
            default_timeout_s=timeout_s,
            metrics=self.metrics,
            parsers=parsers,
            sampling_defaults=sampling_defaults,
            trusts_templates=trusts_templates,
            images=None if images is None else ImageReader(rows_layout(), images),
        )
        self.names = one_base(self.dispatcher, intake, self.metrics, name=MODEL, served=served)
        self.page = StatusPage(self.names, policy=lambda: "least_tokens", overload=Overload())
        page = MetricsPage({MODEL: self.metrics})
        self.server = HttpServer(self.names, page, status_page=self.page, images=images, **options)
        self.headers: dict[str, str] = {}
        self.session: aiohttp.ClientSession
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HttpScene]:
        self.url = f"http://{await self.server.start('127.0.0.1:0')}"
        async with aiohttp.ClientSession() as self.session:
            yield self
        await self.server.stop()
        self.intake.close()

    def post(self, path: str = "/v1/completions", **body: Any) -> Awaitable[aiohttp.ClientResponse]:
        """Start a POST request, of a completion by default."""
        given = {"model": MODEL, "prompt": "x"} if path == "/v1/completions" else {"model": MODEL}
        return asyncio.ensure_future(self._post(path, {**given, **body}))

    async def _post(self, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self.session.post(self.url + path, json=body, headers=self.headers)

    async def command(self, number: int = 1) -> PrefillCommand:
        """Wait until the prefill node has this many commands; return the last one."""
        await until(lambda: len(self.prefill.of(PrefillCommand)) >= number)
        return self.prefill.of(PrefillCommand)[number - 1]

    def say(
        self,
        command: PrefillCommand,
        index: int,
        text: str,
        *,
        last: FinishReason | None = None,
        top: tuple[tuple[int, float], ...] = (),
    ) -> int:
        """Have the nodes send a text's tokens from an output index on; return the next index."""
        token_ids = TOKENIZER.encode(text)
        end = index + len(token_ids)
        for token_id in token_ids:
            is_last = last is not None and index == end - 1
            output = RequestDelta(
                command.request_id,
                index,
                (token_id,),
                last if is_last else None,
                () if command.sampling_params.logprobs is None else (TokenLogprobs(-0.5, top),),
                epoch=command.epoch,
            )
            if index == 0:
                delta = msgspec.structs.replace(output, prefill=PREFILL_RECEIPT)
                self.prefill.say(delta)
            else:
                decode = DECODE_RECEIPT if is_last else None
                self.decode.say(msgspec.structs.replace(output, decode=decode))
            index += 1
        return index

    def fail(self, command: PrefillCommand, code: str, message: str) -> None:
        """Have the decode node fail a request."""
        error = RequestError(code, message)
        self.decode.say(RequestDelta(command.request_id, 0, (), epoch=command.epoch, error=error))


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.001)


def on_http(**options: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    """Run a coroutine as a test, with a running `HttpScene` as its first argument."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def within(arguments: dict[str, Any]) -> None:
            async with asyncio.timeout(30), HttpScene(**options).running() as scene:
                await test(scene, **arguments)

        @wraps(test)
        def run(**arguments: Any) -> None:
            asyncio.run(within(arguments))

        # pytest asks for fixtures and parameters by name, and the scene is no fixture.
        of_test = inspect.signature(test)
        del run.__wrapped__
        run.__signature__ = of_test.replace(parameters=[*of_test.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


def events_of(text: str) -> list[Any]:
    """Return the decoded data of server-sent events; "[DONE]" stays text."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
