"""Tests of TLS between real servers and clients: accepted clients, and messages for others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web

from baton.access.certificates import certificate_principal
from baton.access.tls import (
    NO_TLS,
    ServerContext,
    TlsFiles,
    TlsOptions,
    client_context,
    read_material,
    read_tls,
)
from baton.access.tls_refusal import why_refused
from baton.api.errors import NodeUnavailableError
from baton.client.client import AsyncClient, Client
from baton.serving.rpc import RpcServer, open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes.network.certificates import FAR_AHEAD, LONG_AGO, Authority, replace

pytestmark = pytest.mark.medium

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    return run


class WhoAmI(inference_pb2_grpc.InferenceServicer):
    """Tells callers in a model's name who they are."""

    async def ListModels(self, request: object, context: Any) -> inference_pb2.ListModelsResponse:
        principal = certificate_principal(context)
        name = "nobody" if principal is None else f"{principal.tenant}/{principal.name}"
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name=name)])


@contextlib.asynccontextmanager
async def grpc_server(options: TlsOptions, *, requires: bool) -> AsyncIterator[str]:
    server = RpcServer(
        [SERVICE],
        lambda it: inference_pb2_grpc.add_InferenceServicer_to_server(WhoAmI(), it),  # type: ignore[no-untyped-call]  # generated
        tls=TlsFiles(options) if options else None,
        require_client_certs=requires,
    )
    address = await server.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def https_server(options: TlsOptions, *, requires: bool) -> AsyncIterator[str]:
    async def who(request: web.Request) -> web.Response:
        principal = certificate_principal(request.transport)
        return web.Response(text="nobody" if principal is None else principal.name)

    app = web.Application()
    app.add_routes([web.get("/", who)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = ServerContext.of(TlsFiles(options), require_client_certs=requires)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def name_over_grpc(address: str, options: TlsOptions) -> str:
    async with AsyncClient(address, tls=options) as client:
        [model] = await client.models()
        return model.name


async def name_over_https(address: str, options: TlsOptions) -> str:
    context = client_context(read_material(options))
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://{address}/", ssl=context) as response,
    ):
        return await response.text()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    folder = tmp_path / "stranger"
    folder.mkdir()
    return Authority(folder)


@pytest.mark.parametrize(
    ("serve", "name"), [(grpc_server, name_over_grpc), (https_server, name_over_https)]
)
@asynchronous
async def test_who_shows_a_certificate_is_who_it_says(
    authority: Authority, serve: Any, name: Any
) -> None:
    bob = authority.issue("bob", "tenant/acme/infer/bob")
    async with serve(authority.issue("router"), requires=True) as address:
        assert (await name(address, bob)).endswith("bob")


@asynchronous
async def test_of_grpc_without_the_requirement_nobody_is_asked_and_of_https_who_wants_to(
    authority: Authority,
) -> None:
    bob, nobody = authority.issue("bob", "infer/bob"), TlsOptions(ca=str(authority.ca_file))
    async with grpc_server(authority.issue("router"), requires=False) as address:
        assert await name_over_grpc(address, nobody) == "nobody"
        assert await name_over_grpc(address, bob) == "nobody"
    async with https_server(authority.issue("router"), requires=False) as address:
        assert await name_over_https(address, nobody) == "nobody"
        assert await name_over_https(address, bob) == "bob"


@pytest.mark.parametrize("serve", [grpc_server, https_server])
@asynchronous
async def test_each_refusal_is_told_in_one_line(
    authority: Authority, stranger: Authority, serve: Any
) -> None:
    bob = authority.issue("bob", "infer/bob")
    router = authority.issue("router")
    async with serve(router, requires=True) as address:
        cases = {
            stranger.issue("bob", trusts=authority): "it hangs up on our certificate",
            authority.issue("bob", trusts=stranger): "its certificate is of no CA in",
            TlsOptions(ca=str(authority.ca_file)): "it wants a client certificate (--tls-cert",
            TlsOptions(ca="system"): "its certificate is of no CA in this machine's CAs",
            authority.issue("old", now=LONG_AGO): "has expired",
            authority.issue("early", now=FAR_AHEAD): "is not valid before",
            NO_TLS: "it speaks TLS, and --tls-ca (or BATON_TLS_CA) is not given",
        }
        for options, words in cases.items():
            why = await asyncio.to_thread(why_refused, address, options)
            assert words in why, options
            assert "\n" not in why
        assert await asyncio.to_thread(why_refused, address, bob) == ""
    far = authority.issue("far", hosts=("router.example",))
    async with serve(far, requires=True) as address:
        why = await asyncio.to_thread(why_refused, address, bob)
        assert why == "its certificate is not for 127.0.0.1"
        assert await asyncio.to_thread(why_refused, address, bob, "router.example") == ""


@asynchronous
async def test_a_server_without_tls_is_told_apart_and_one_that_is_not_there_is_not_tls(
    authority: Authority,
) -> None:
    bob = authority.issue("bob")
    async with grpc_server(NO_TLS, requires=False) as address:
        assert await asyncio.to_thread(why_refused, address, bob) == "it speaks no TLS"
        assert await asyncio.to_thread(why_refused, address, NO_TLS) == ""
    assert await asyncio.to_thread(why_refused, address, bob) == ""


@pytest.mark.parametrize("resets", [False, True])
def test_a_server_that_hangs_up_before_a_word_refuses_nothing(
    authority: Authority, resets: bool
) -> None:
    """Hang up as a stopping router does; a gRPC server sends an alert before it refuses."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    tries = [authority.issue("bob"), TlsOptions(ca=str(authority.ca_file)), NO_TLS] * 20

    def run() -> None:
        for _ in tries:
            connection, _ = listening.accept()
            if resets:  # at once: before the client has sent anything, or just behind that
                now = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            connection.close()

    thread = threading.Thread(target=run)
    with listening:
        thread.start()
        assert {why_refused(address, options) for options in tries} == {""}
        thread.join()


def serve_raw(context: ssl.SSLContext) -> tuple[str, threading.Thread]:
    """Make one handshake with a server that does not check its own files."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)

    def run() -> None:
        with listening, contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1)

    thread = threading.Thread(target=run)
    thread.start()
    return f"127.0.0.1:{listening.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("now", "why"),
    [(LONG_AGO, "its certificate has expired"), (FAR_AHEAD, "its certificate is not valid yet")],
)
def test_a_server_whose_certificate_is_out_of_time_is_refused(
    authority: Authority, now: Any, why: str
) -> None:
    wrong = authority.issue("router", now=now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(wrong.cert, wrong.key)
    address, thread = serve_raw(context)
    assert why_refused(address, TlsOptions(ca=str(authority.ca_file))) == why
    thread.join()


@asynchronous
async def test_a_clients_error_says_why(authority: Authority, stranger: Authority) -> None:
    bob = authority.issue("bob", "infer/bob")
    eve = stranger.issue("bob", "infer/bob", trusts=authority)
    async with grpc_server(authority.issue("router"), requires=True) as address:
        with pytest.raises(NodeUnavailableError) as caught:
            await name_over_grpc(address, eve)
        assert str(caught.value) == (
            f"the router at {address} cannot be reached: it hangs up on our certificate "
            f"{eve.cert}; does it trust the CA of that?"
        )

        def ask(options: TlsOptions) -> str:
            with Client(address, tls=options) as client:
                return client.models()[0].name

        assert await asyncio.to_thread(ask, bob) == "bob/bob"
        with pytest.raises(NodeUnavailableError, match="it speaks TLS, and --tls-ca"):
            await asyncio.to_thread(ask, NO_TLS)


@asynchronous
async def test_a_grpc_server_name_other_than_the_address_can_be_wanted(
    authority: Authority,
) -> None:
    bob = authority.issue("bob", "infer/bob")
    async with grpc_server(
        authority.issue("router", hosts=("router.example",)), requires=True
    ) as address:
        for name, code in (("router.example", None), ("", grpc.StatusCode.UNAVAILABLE)):
            async with open_channel(address, read_tls(bob), server_name=name) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
                call = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
                assert (await call.code()) is (code or grpc.StatusCode.OK)


@asynchronous
async def test_a_new_ca_takes_over_without_a_failed_call(tmp_path: Path) -> None:
    """The usual order: trust both, then new certificates, then only the new CA."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    both = tmp_path / "ca.crt"

    def trust(*authorities: Authority) -> None:
        replace(both, b"".join(one.ca_file.read_bytes() for one in authorities))

    def issue(authority: Authority, name: str, uri_path: str = "") -> TlsOptions:
        options = authority.issue(name, uri_path)
        return TlsOptions(cert=options.cert, key=options.key, ca=str(both))

    trust(old)
    router = issue(old, "router")
    bob = issue(old, "bob", "infer/bob")
    kept = old.issue("kept", "infer/kept")
    kept = TlsOptions(cert=kept.cert, key=kept.key, ca=str(both))
    num_calls = 0
    stopping = asyncio.Event()

    async def call_on(client: AsyncClient) -> None:
        nonlocal num_calls
        while not stopping.is_set():
            [model] = await client.models()
            assert model.name == "bob/bob"
            num_calls += 1
            await asyncio.sleep(0.01)

    async def anew() -> None:
        nonlocal num_calls
        while not stopping.is_set():
            assert await name_over_grpc(address, bob) == "bob/bob"
            assert await name_over_https(https, bob) == "bob"
            num_calls += 2
            await asyncio.sleep(0.05)

    async with (
        grpc_server(router, requires=True) as address,
        https_server(router, requires=True) as https,
        AsyncClient(address, tls=bob) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(call_on(client))
        group.create_task(anew())
        await asyncio.sleep(0.3)
        for step in (
            lambda: trust(old, new),
            lambda: (issue(new, "bob", "infer/bob"), issue(new, "router")),
            lambda: trust(new),
        ):
            step()
            await asyncio.sleep(1.3)  # servers and clients look twice a second
        before = num_calls
        while num_calls <= before + 2:  # noqa: ASYNC110  # each of the two goes on calling
            await asyncio.sleep(0.05)
        stopping.set()
        # Certificates of the old CA are refused now.
        why = "it hangs up on our certificate"
        for server in (address, https):
            assert why in await asyncio.to_thread(why_refused, server, kept)
        with pytest.raises(aiohttp.ClientError):
            await name_over_https(https, kept)
        with pytest.raises(NodeUnavailableError, match=why):
            await name_over_grpc(address, kept)
