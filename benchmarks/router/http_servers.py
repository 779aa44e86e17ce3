"""Compare the CPU cost of a streamed token on aiohttp and on uvicorn with Starlette.

Each server runs in its own process on one core with uvloop, and streams the same SSE events: each
tick adds one token to every stream, as an engine's step does. The results are the process's CPU
time per token, and the CPU time of the same program without HTTP.

    python -m benchmarks http_servers [--streams 64 256] [--tokens 150] [--repeats 3]
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.runner.environment import summary
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.run import Document, Run

TICK_S = 0.03
_DONE = b"data: [DONE]\n\n"
_REQUEST = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class _Delta(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    object: str = "chat.completion.chunk"


class Ticker:
    """Adds one token per tick to every stream, once all streams are open."""

    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._queues: list[asyncio.Queue[str | None]] = []
        self._encoder = msgspec.json.Encoder()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the SSE events of one new stream."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.append(queue)
        if len(self._queues) == self._num_streams:
            task = asyncio.create_task(self._tick(self._queues))
            task.add_done_callback(lambda done: done.result())
            self._queues = []
        while (text := await queue.get()) is not None:
            chunk = _Chunk("chatcmpl-0123456789abcdef", 1, "model", [_Choice(0, _Delta(text))])
            yield b"data: " + self._encoder.encode(chunk) + b"\n\n"
        yield _DONE

    async def _tick(self, queues: list[asyncio.Queue[str | None]]) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        for _ in range(self._num_tokens):
            at += TICK_S
            await asyncio.sleep(at - loop.time())
            for queue in queues:
                queue.put_nowait(" token")
        for queue in queues:
            queue.put_nowait(None)


# ---------------------------------------------------------------------- servers


async def serve_nothing(ticker: Ticker, listener: socket.socket, num_streams: int) -> None:
    """Make the events and drop them; the extra time of the other servers is the cost of HTTP."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)

    async def drop() -> None:
        async for _ in ticker.events():
            pass

    while True:
        connection, _ = await loop.sock_accept(listener)
        await asyncio.gather(*(drop() for _ in range(num_streams)))
        await loop.sock_sendall(connection, b"done")
        connection.close()


async def serve_aiohttp(ticker: Ticker, listener: socket.socket, num_streams: int) -> None:
    from aiohttp import web

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        async for event in ticker.events():
            await response.write(event)
        return response

    app = web.Application()
    app.router.add_get("/stream", stream)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


async def serve_starlette(
    ticker: Ticker, listener: socket.socket, num_streams: int, *, http: str = "httptools"
) -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(ticker.events(), headers=_HEADERS)

    await _serve_uvicorn(Starlette(routes=[Route("/stream", stream)]), listener, http)


async def serve_starlette_h11(ticker: Ticker, listener: socket.socket, num_streams: int) -> None:
    await serve_starlette(ticker, listener, num_streams, http="h11")


async def serve_bare_asgi(ticker: Ticker, listener: socket.socket, num_streams: int) -> None:
    """Serve with uvicorn and no framework, which is the cheapest way to use uvicorn."""
    headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in ticker.events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    await _serve_uvicorn(app, listener, "httptools")


async def _serve_uvicorn(app: Any, listener: socket.socket, http: Any) -> None:
    import uvicorn

    config = uvicorn.Config(app, http=http, access_log=False, log_level="warning", lifespan="off")
    await uvicorn.Server(config).serve(sockets=[listener])


Server = Callable[[Ticker, socket.socket, int], Coroutine[Any, Any, None]]
SERVERS: dict[str, Server] = {
    "no HTTP": serve_nothing,
    "aiohttp": serve_aiohttp,
    "uvicorn (httptools), no framework": serve_bare_asgi,
    "uvicorn (httptools), Starlette": serve_starlette,
    "uvicorn (h11), Starlette": serve_starlette_h11,
}


def serve(name: str, streams: str, tokens: str) -> None:
    """Run the server ``name`` in this process; print its port."""
    num_streams, num_tokens = int(streams), int(tokens)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)  # clients that connect earlier wait until the server accepts
        print(listener.getsockname()[1], flush=True)
        ticker = Ticker(num_streams, num_tokens)
        uvloop.run(SERVERS[name](ticker, listener, num_streams))


# ---------------------------------------------------------------------- client


async def read_streams(port: int, num_streams: int, num_tokens: int) -> None:
    """Read all streams to their end; raise RuntimeError if one lacks an event."""

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_REQUEST)
        text = await reader.readuntil(b"[DONE]")
        writer.close()
        if text.count(b"data: ") != num_tokens + 1:
            raise RuntimeError(f"a stream has {text.count(b'data: ')} events")

    await asyncio.gather(*(read() for _ in range(num_streams)))


async def read_nothing(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.read()
    writer.close()


def measure(name: str, num_streams: int, num_tokens: int) -> float:
    """Return the server process's CPU microseconds per token, after a warm-up round."""
    words = call_words("benchmarks.router.http_servers:serve", name, num_streams, num_tokens)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=own_environment()
    ) as process:
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        assert process.stdout is not None
        port = int(process.stdout.readline())
        spent = []
        try:
            for _ in range(2):
                before = cpu_ns(process.pid)
                if name == "no HTTP":
                    uvloop.run(read_nothing(port))
                else:
                    uvloop.run(read_streams(port, num_streams, num_tokens))
                spent.append(cpu_ns(process.pid) - before)
        finally:
            process.kill()
    return spent[-1] / (num_streams * num_tokens) / 1e3


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process in ns, with the kernel's precision."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in files)


def run(
    run: Run, streams: Sequence[int] = (64, 256), tokens: int = 150, repeats: int = 3
) -> Document:
    """Measure the servers in turns, so that other programs slow all of them equally."""
    samples: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for num_streams in streams:
            for name in SERVERS:
                cost_us = measure(name, num_streams, tokens)
                samples.setdefault((name, num_streams), []).append(cost_us)
    results = [
        {"server": name, "num_streams": num_streams, "cpu_us_per_token": summary(costs)}
        for (name, num_streams), costs in samples.items()
    ]
    run.show("CPU us per token", results)
    settings = {"tokens_per_stream": tokens, "tick_s": TICK_S, "repeats": repeats}
    return {"settings": settings, "results": results}
