"""Tests of client certificates in place of keys: over gRPC and HTTPS, they name the caller."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import grpc
import pytest

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.access.tls import ServerContext, TlsFiles, TlsOptions, read_tls
from baton.link import wire
from baton.link.words import NodeRole
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer, bearer, open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc, node_pb2, node_pb2_grpc
from router.api.admin.service import AdminService
from router.api.grpc.link_service import NodeLinkService
from tests.fakes.network.certificates import Authority
from tests.fakes.router.http_scene import HttpScene, on_http
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import make_registration
from tests.fakes.router.router_scene import Scene, asynchronous

pytestmark = pytest.mark.medium


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def client_context(options: TlsOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.ca)
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return context


def test_over_https_a_certificate_counts_if_no_key_is_shown(
    authority: Authority, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry_text("a key to look", "ops", roles=["look"]), encoding="utf-8")
    access = Access(keys_file=keys, by_certificate=True)
    tls = ServerContext.of(TlsFiles(authority.issue("router")), require_client_certs=False)
    nobody = TlsOptions(ca=str(authority.ca_file))
    alice = authority.issue("alice", "infer/alice")
    unnamed = authority.issue("unnamed")
    looking = {"Authorization": "Bearer a key to look"}

    @on_http(access=access, tls=tls)
    async def run(scene: HttpScene) -> None:
        url = scene.url.replace("http://", "https://")
        cases = [
            (nobody, {}, "/v1/models", 401),
            (alice, {}, "/v1/models", 200),
            (alice, {}, "/metrics", 403),
            (alice, {}, "/nothing", 404),
            (alice, looking, "/metrics", 200),
            (alice, looking, "/v1/models", 403),
            (alice, {"Authorization": "Bearer wrong"}, "/v1/models", 401),
            (unnamed, {}, "/v1/models", 403),
            (unnamed, {}, "/nothing", 403),
            (nobody, {}, "/health", 200),
        ]
        for options, headers, path, status in cases:
            async with (
                aiohttp.ClientSession() as session,
                session.get(url + path, headers=headers, ssl=client_context(options)) as response,
            ):
                assert response.status == status, (options.cert, headers, path)

    run()


def test_over_grpc_a_certificate_is_a_role_and_a_nodes_binds_its_name(
    authority: Authority,
) -> None:
    @asynchronous
    async def run() -> None:
        scene = Scene()
        access = Access(node_token="t", by_certificate=True)
        intake = make_intake(scene.dispatcher, None, vocab_size=100, default_timeout_s=60)
        admin = AdminService(one_base(scene.dispatcher, intake), policy="least_tokens")

        def register(one: grpc.aio.Server) -> None:
            admin_pb2_grpc.add_AdminServicer_to_server(admin, one)  # type: ignore[no-untyped-call]  # generated
            links = NodeLinkService(scene.pool, access)
            node_pb2_grpc.add_NodeLinkServicer_to_server(links, one)  # type: ignore[no-untyped-call]  # generated

        server = RpcServer(
            [],
            register,
            CallGate(access),
            tls=TlsFiles(authority.issue("router")),
            require_client_certs=True,
        )
        address = await server.start("127.0.0.1:0")
        operator = authority.issue("ops", "look/ops")
        async with open_channel(address, read_tls(operator)) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)
            drain = stub.Drain(admin_pb2.NodeRequest(node="d0"), timeout=10)
            assert await drain.code() is grpc.StatusCode.PERMISSION_DENIED
        node = authority.issue("d7", "node/decode/d7")
        problems = {}
        async with open_channel(address, read_tls(node)) as channel:
            links = node_pb2_grpc.NodeLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
            for name, token in (("d7", ""), ("d8", ""), ("d8", "t")):
                link = links.Link(metadata=bearer(token))
                message = wire.registration_to_proto(make_registration(name, NodeRole.DECODE))
                await link.write(message)
                reply = await link.read()
                assert isinstance(reply, node_pb2.RouterMessage)
                problems[name, token] = reply.registered.problem
                link.cancel()
        assert problems["d7", ""] == ""
        for shown in ("", "t"):  # the token does not free it from its certificate's name
            assert "not for node/decode/d8" in problems["d8", shown]
        await server.stop(0)

    run()
