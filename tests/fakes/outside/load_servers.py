"""Small real servers with scripted latencies, which note what they really did.

One speaks Baton's gRPC API, the other OpenAI's completions; for the targets of the load test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from loadtest.targets.openai_http import PROBE
from tests.fakes.outside.load_targets import Answer, Script

MODEL = "scripted"
NUM_CACHED = 5  # tokens of each prompt, says the one over HTTP
Sent = tuple[float, int]


@dataclass(slots=True)
class ServedCall:
    """One call as the server saw it; times are of `time.perf_counter`."""

    prompt: tuple[int, ...]
    body: dict[str, Any] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    received_at: float = field(default_factory=time.perf_counter)
    was_given_up: bool = False


class ScriptedServer:
    """Base of both scripted servers.

    Attributes:
        calls: calls in order of arrival.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.calls: list[ServedCall] = []

    def call_of(self, prompt: list[int]) -> ServedCall:
        [call] = [call for call in self.calls if call.prompt == tuple(prompt)]
        return call

    def _take(
        self, prompt: list[int], length: int, body: dict[str, Any] | None = None
    ) -> tuple[ServedCall, Answer]:
        answer = self._script(len(self.calls), length)
        call = ServedCall(tuple(prompt), body or {})
        self.calls.append(call)
        return call, answer

    async def _frames(self, call: ServedCall, answer: Answer) -> AsyncIterator[int]:
        """Yield each frame's size when it is due; a late frame delays no later one."""
        due_at = call.received_at
        try:
            for gap_s, num_tokens in answer.frames:
                due_at += gap_s
                await asyncio.sleep(max(due_at - time.perf_counter(), 0))
                call.sent.append((time.perf_counter(), num_tokens))
                yield num_tokens
        except (asyncio.CancelledError, GeneratorExit):
            call.was_given_up = True
            raise


class GrpcScript(ScriptedServer, inference_pb2_grpc.InferenceServicer):
    """A scripted server of Baton's gRPC API."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        call, answer = self._take(list(request.token_ids.ids), request.sampling_params.max_tokens)
        index = 0
        async with contextlib.aclosing(self._frames(call, answer)) as frames:  # type: ignore[type-var]
            async for num_tokens in frames:
                yield inference_pb2.GenerateResponse(
                    output_index=index, token_ids=range(index, index + num_tokens)
                )
                index += num_tokens
        if answer.error == "cut":
            return
        if answer.error:
            await context.abort(grpc.StatusCode[answer.error], "as scripted")
        said = answer.num_tokens if answer.says_tokens is None else answer.says_tokens
        yield inference_pb2.GenerateResponse(
            output_index=index,
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            receipt=types_pb2.Receipt(
                num_prompt_tokens=len(call.prompt),
                num_output_tokens=said,
                ttft_s=call.sent[0][0] - call.received_at,
                total_s=call.sent[-1][0] - call.received_at,
                router_queue_s=0.25,
            ),
        )

    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name=MODEL)])


class HttpScript(ScriptedServer):
    """OpenAI's API. What an event says of its tokens is as the request asks.

    Attributes:
        takes_continuous_usage: like vLLM; OpenAI's own refuses it.
    """

    takes_continuous_usage = True

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "continuous_usage_stats" in body["stream_options"] and not self.takes_continuous_usage:
            return web.Response(status=400, text="stream_options.continuous_usage_stats: unknown")
        if body.get("prompt") == PROBE:
            return web.Response(text="data: [DONE]\n\n")
        is_chat = "messages" in body
        prompt = [0] if is_chat else body["prompt"]
        call, answer = self._take(prompt, body["max_tokens"], body)
        if answer.error.isdecimal():
            return web.Response(status=int(answer.error), text="as scripted")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        total = 0
        async with contextlib.aclosing(self._frames(call, answer)) as frames:  # type: ignore[type-var]
            async for num_tokens in frames:
                total += num_tokens
                text = "word " * num_tokens
                own = {"delta": {"content": text}} if is_chat else {"text": text}
                event: dict[str, Any] = {"choices": [own | {"finish_reason": None}]}
                if "logprobs" in body:
                    event["choices"][0]["logprobs"] = {"tokens": ["word "] * num_tokens}
                if "continuous_usage_stats" in body["stream_options"]:
                    event["usage"] = _usage(call, total)
                await _send(response, event)
        if answer.error == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        if answer.error:
            await _send(response, {"error": {"message": answer.error}})
            return response
        await _send(response, {"choices": [{"text": "", "finish_reason": "length"}]})
        said = answer.num_tokens if answer.says_tokens is None else answer.says_tokens
        await _send(response, {"choices": [], "usage": _usage(call, said)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})


def _usage(call: ServedCall, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": len(call.prompt),
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": NUM_CACHED},
    }


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


@contextlib.asynccontextmanager
async def scripted_grpc(script: Script) -> AsyncIterator[tuple[GrpcScript, str]]:
    """Serve a script over gRPC; yield the server and its URL."""
    servicer = GrpcScript(script)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def scripted_http(script: Script) -> AsyncIterator[tuple[HttpScript, str]]:
    """Serve a script over HTTP; yield the server and its URL."""
    server = HttpScript(script)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


SERVERS: dict[str, Any] = {"grpc": scripted_grpc, "http": scripted_http}
