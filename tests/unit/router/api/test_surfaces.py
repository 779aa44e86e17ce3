"""Unit tests that a router with credentials refuses every call without one, on all its APIs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.access.audit_log import AuditLog
from baton.access.call_roles import ANY, INFER, LOOK, OPEN, OPERATE, ROLES_OF_CALL
from baton.access.identity import ANYBODY_HERE, Role
from baton.link import wire
from baton.link.words import NodeRole
from baton.serving.call_gate import CallGate
from baton.serving.rpc import RpcServer, bearer, open_channel
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from router.api.admin.service import AdminService
from router.api.grpc.inference_service import InferenceService
from router.api.grpc.link_service import NodeLinkService
from router.api.http_server import NOT_SERVED, POOLED
from tests.fakes.router.http_scene import HttpScene, on_http, until
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import make_registration
from tests.fakes.router.router_scene import Scene, asynchronous

FILES = (inference_pb2, node_pb2, admin_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES
    for method in service.methods
}
KEYS = {role: f"a key with the role {role}" for role in Role}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    text = "\n".join(entry_text(key, role.value, roles=[role]) for role, key in KEYS.items())
    path.write_text(text, encoding="utf-8")
    return path


@contextlib.asynccontextmanager
async def served(access: Access) -> AsyncIterator[tuple[Scene, grpc.aio.Channel]]:
    """All services of a router on one port of this machine."""
    scene = Scene()
    intake = make_intake(scene.dispatcher, None, vocab_size=100, default_timeout_s=60)
    names = one_base(scene.dispatcher, intake)
    admin = AdminService(names, policy="least_tokens")

    def register(one: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(names), one)  # type: ignore[no-untyped-call]  # generated
        node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(scene.pool, access), one)  # type: ignore[no-untyped-call]  # generated
        admin_pb2_grpc.add_AdminServicer_to_server(admin, one)  # type: ignore[no-untyped-call]  # generated

    server = RpcServer(SERVICES, register, CallGate(access, ANYBODY_HERE))
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        async with open_channel(address) as channel:
            yield scene, channel
    finally:
        await server.stop(0)


async def ask(
    channel: grpc.aio.Channel, path: str, key: str = "", request: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """How a call ends; bytes out, bytes in, so that there need not be such a call."""
    call: Any = cast(Any, channel).unary_stream(path)(request, metadata=bearer(key), timeout=5)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code(), await call.details() or ""


def test_the_table_has_every_call_of_our_protos_and_nothing_else() -> None:
    ours = {call for call in ROLES_OF_CALL if call.startswith("/baton.")}
    assert ours == set(METHODS)
    assert all(roles is not OPEN for call, roles in ROLES_OF_CALL.items() if call in ours)


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_the_table_has_every_service_that_a_server_serves(keys_file: Path, version: str) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (_, channel):
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            replies = cast(Any, channel).stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )(iter([question]), metadata=bearer(KEYS[Role.LOOK]), timeout=5)
            reply = await anext(aiter(replies))
        pool = descriptor_pool.Default()
        for service in reply.list_services_response.service:
            for method in pool.FindServiceByName(service.name).methods:
                assert f"/{service.name}/{method.name}" in ROLES_OF_CALL

    run()


@pytest.mark.parametrize(
    "path",
    [
        *sorted(METHODS),
        "/baton.v1.Admin/Nothing",
        "/no.Such/Call",
        "/",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
@pytest.mark.parametrize("key", ["", "a guess"])
def test_no_call_there_is_or_not_tells_strangers_anything(
    keys_file: Path, path: str, key: str
) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (scene, channel):
            code, details = await ask(channel, path, key, b"\xff not a message")
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert details.startswith("authorization: ")
            assert [node.name for node in scene.pool.nodes] == ["d0", "p0"]

    run()


def test_each_role_may_call_what_the_table_says_and_nothing_else(keys_file: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (_, channel):
            for path in METHODS:
                roles = ROLES_OF_CALL[path]
                assert roles is not None
                for role, key in KEYS.items():
                    if path.endswith("/Profile") and role in roles:
                        continue  # (takes its time)
                    code, _ = await ask(channel, path, key)
                    denied = code is grpc.StatusCode.PERMISSION_DENIED
                    # An operator who may only look ends nobody's request; a client may end its own.
                    assert denied == (role not in roles), (path, role)
            assert (await ask(channel, "/no.Such/Call", KEYS[Role.INFER]))[0] is (
                grpc.StatusCode.UNIMPLEMENTED
            )

    run()


def test_what_strangers_send_to_health_is_not_in_the_log(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (_, channel):
            check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
            long = b"\xf8\x07\x01" * 30_000  # fields of nobody, which take time to be read
            for message, problem in ((b"\xff" * 100, "no message"), (long, "at most 65536 bytes")):
                with pytest.raises(grpc.aio.AioRpcError, match=problem) as error:
                    await check(message, timeout=5)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_health_is_open_so_that_probes_need_no_key(keys_file: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (_, channel):
            code, _ = await ask(channel, "/grpc.health.v1.Health/Check")
            assert code is grpc.StatusCode.OK
            # A stream that stays open is not for strangers.
            code, _ = await ask(channel, "/grpc.health.v1.Health/Watch")
            assert code is grpc.StatusCode.UNAUTHENTICATED
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            watch = stub.Watch(request, metadata=bearer(KEYS[Role.LOOK]), timeout=5)
            status = await anext(aiter(watch))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()

    run()


def test_who_is_unknown_is_told_so_before_the_body_is_sent(keys_file: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file)) as (_, channel):
            generate = cast(Any, channel).stream_unary("/baton.v1.Inference/Generate")
            call = generate(timeout=5)
            # Nothing is sent, and the stream stays open: the answer does not wait for it.
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    run()


# ---------------------------------------------------------------- with --api-keys-file alone


def keys_of_clients(tmp_path: Path) -> Access:
    path = tmp_path / "keys.toml"
    path.write_text(entry_text("alice's", "alice") + entry_text("bob's", "bob"), encoding="utf-8")
    return Access(keys_file=path)


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("ListRequests", admin_pb2.ListRouterRequestsRequest()),
        ("Explain", admin_pb2.ExplainRequest(prompt="a guess of what others asked")),
        ("Explain", admin_pb2.ExplainRequest(num_prompt_tokens=5)),
        ("SetPolicy", admin_pb2.SetPolicyRequest(policy="cost")),
    ],
    ids=["list requests", "explain a prompt", "explain so many tokens", "set the policy"],
)
def test_neither_strangers_nor_clients_see_or_change_what_is_not_theirs(
    tmp_path: Path, call: str, request_: Any
) -> None:
    @asynchronous
    async def run() -> None:
        async with served(keys_of_clients(tmp_path)) as (scene, channel):
            await scene.call("hers")
            path = f"/baton.v1.Admin/{call}"
            code, _ = await ask(channel, path, "", request_.SerializeToString())
            assert code is grpc.StatusCode.UNAUTHENTICATED
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            policy = scene.dispatcher.placer.policy
            if call == "ListRequests":  # those of its own: none
                listed = await stub.ListRequests(request_, metadata=bearer("bob's"), timeout=5)
                assert list(listed.requests) == []
            else:
                code, _ = await ask(channel, path, "bob's", request_.SerializeToString())
                assert code is grpc.StatusCode.PERMISSION_DENIED
            assert scene.dispatcher.placer.policy is policy

    run()


@pytest.mark.parametrize("key", ["", "alice's"])
def test_a_stranger_or_a_client_cannot_join_as_a_node(tmp_path: Path, key: str) -> None:
    @asynchronous
    async def run() -> None:
        async with served(keys_of_clients(tmp_path)) as (scene, channel):
            before = list(scene.pool.nodes)
            message = wire.registration_to_proto(make_registration("evil", NodeRole.DECODE))
            code, _ = await ask(
                channel, "/baton.v1.NodeLink/Link", key, message.SerializeToString()
            )
            expected = grpc.StatusCode.PERMISSION_DENIED if key else grpc.StatusCode.UNAUTHENTICATED
            assert code is expected
            assert scene.pool.nodes == before

    run()


def test_clients_trace_explain_and_end_requests_of_their_own_tenant_only(tmp_path: Path) -> None:
    @asynchronous
    async def run() -> None:
        access = keys_of_clients(tmp_path)
        async with served(access) as (scene, channel):
            await scene.call("job", tenant="alice")
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            trace = admin_pb2.TraceRequest(request_id="job")
            explain = admin_pb2.ExplainRequest(request_id="job")
            abort = admin_pb2.AbortRequest(request_id="job")
            hers = {"metadata": bearer("alice's"), "timeout": 5}
            assert (await stub.Trace(trace, **hers)).tenant == "alice"
            assert len((await stub.Explain(explain, **hers)).decisions) == 1
            for path, request in (("Trace", trace), ("Explain", explain), ("Abort", abort)):
                code, _ = await ask(
                    channel, f"/baton.v1.Admin/{path}", "bob's", request.SerializeToString()
                )
                assert code is grpc.StatusCode.NOT_FOUND
                request.tenant = "alice"
                code, _ = await ask(
                    channel, f"/baton.v1.Admin/{path}", "bob's", request.SerializeToString()
                )
                assert code is grpc.StatusCode.PERMISSION_DENIED
            assert scene.dispatcher.num_open == 1
            await stub.Abort(admin_pb2.AbortRequest(request_id="job"), **hers)
            assert scene.task is not None
            await asyncio.gather(scene.task, return_exceptions=True)
            assert scene.dispatcher.num_open == 0

    run()


# ---------------------------------------------------------------- the audit log


def test_who_looked_changed_joined_and_failed_is_in_the_audit_log(
    keys_file: Path, tmp_path: Path
) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"), program="router")

    @asynchronous
    async def run() -> None:
        async with served(Access(keys_file=keys_file, audit=log)) as (_, channel):
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            look = {"metadata": bearer(KEYS[Role.LOOK]), "timeout": 5}
            for _ in range(5):
                await stub.GetNode(admin_pb2.NodeRequest(node="d0"), **look)
            with contextlib.suppress(grpc.aio.AioRpcError):
                secret = admin_pb2.ExplainRequest(prompt="what nobody may read")
                await stub.Explain(secret, **look)
            drain = admin_pb2.NodeRequest(node="d0").SerializeToString()
            await ask(channel, "/baton.v1.Admin/Drain", KEYS[Role.OPERATE], drain)
            await ask(channel, "/baton.v1.Admin/Drain", KEYS[Role.LOOK], drain)
            await ask(channel, "/baton.v1.Admin/Drain", "a wrong key", drain)
            nobody = admin_pb2.NodeRequest(node="d9").SerializeToString()
            await ask(channel, "/baton.v1.Admin/Drain", KEYS[Role.OPERATE], nobody)
            links = node_pb2_grpc.NodeLinkStub(channel)  # type: ignore[no-untyped-call]  # generated
            link = links.Link(metadata=bearer(KEYS[Role.JOIN]))
            await link.write(wire.registration_to_proto(make_registration("d7", NodeRole.DECODE)))
            await link.read()
            link.cancel()
            await until(lambda: '"left"' in (tmp_path / "audit.jsonl").read_text())

    run()
    log.close()
    text = (tmp_path / "audit.jsonl").read_text(encoding="utf-8")
    assert "what nobody may read" not in text
    assert "a wrong key" not in text
    assert not any(key in text for key in KEYS.values())
    events = [json.loads(line) for line in text.splitlines()]
    told = [
        (event["event"], event["who"], event["call"].rpartition("/")[2],
         event.get("arguments", {}).get("node", ""))
        for event in events
    ]  # fmt: skip
    assert told == [
        ("looked", "look", "GetNode", "d0"),
        ("looked", "look", "Explain", ""),
        ("changed", "operate", "Drain", "d0"),
        ("refused", "look", "Drain", ""),
        ("failed", "", "Drain", ""),
        ("changed", "operate", "Drain", "d9"),
        ("joined", "join", "Link", "d7"),
        ("left", "join", "Link", "d7"),
    ]
    assert events[1]["arguments"]["prompt"] == "20 characters"
    assert events[5]["problem"].startswith("there is no node 'd9': none of this name has joined")
    assert all(event["address"] == "127.0.0.1" for event in events)


# ---------------------------------------------------------------- HTTP

HTTP_ROLES = {
    ("POST", "/v1/completions"): INFER,
    ("POST", "/v1/chat/completions"): INFER,
    ("POST", "/v1/responses"): INFER,
    ("POST", "/v1/messages"): INFER,
    ("POST", "/v1/messages/count_tokens"): INFER,
    **{("POST", f"/{one}tokenize"): INFER for one in ("", "de")},
    **{("POST", f"/v1/sessions/{one}"): INFER for one in ("prefetch", "drop")},
    **{("POST", path): INFER for path in (*POOLED, *NOT_SERVED)},
    ("GET", "/v1/models"): INFER,
    ("GET", "/v1/models/{model}"): INFER,
    ("GET", "/health"): OPEN,
    ("GET", "/ping"): OPEN,
    ("POST", "/ping"): OPEN,
    ("GET", "/ready"): OPEN,
    ("GET", "/version"): ANY,
    ("GET", "/load"): LOOK,
    ("GET", "/metrics"): LOOK,
    **{("POST", f"/v1/{one}_lora_adapter"): OPERATE for one in ("load", "unload")},
    ("GET", "/"): OPEN,  # sends browsers to the page, which asks for a key
    ("GET", "/ui"): LOOK,
    ("GET", "/ui/requests/{request_id}"): LOOK,
    ("GET", "/ui/{name}"): OPEN,  # what pages are drawn with: it says nothing of this router
}
STRANGE = [
    b"GET /v1/models HTTP/1.1\r\nHost: a/?\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: /health\r\n",
    b"GET http://x/v1/models HTTP/1.1\r\nHost: /health?\r\n",
    b"GET //v1/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /V1/Models HTTP/1.1\r\nHost: x\r\n",
    b"GET /health/../v1/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /health/..%2fv1/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1%2fmodels HTTP/1.1\r\nHost: x\r\n",
    b"GET /%76%31/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1/models/../../health HTTP/1.1\r\nHost: x\r\n",
    b"GET /health;/v1/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1/models?x=/health HTTP/1.1\r\nHost: x\r\n",
    b"GET /health%00 HTTP/1.1\r\nHost: x\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n",
    b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\n",
    b"PUT /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"DELETE /health HTTP/1.1\r\nHost: x\r\n",
    b"POST /ready HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    b"GET /METRICS HTTP/1.1\r\nHost: x\r\n",
    b"GET /metrics/ HTTP/1.1\r\nHost: x\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: x\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: ::1\r\nX-Original-URL: /health\r\n",
    b"GET /v1/models HTTP/1.0\r\n",
]  # fmt: skip


async def raw(scene: HttpScene, head: bytes) -> bytes:
    """The answer to a request as it was written."""
    host, port = scene.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"Connection: close\r\n\r\n")
    reply = await reader.read()
    writer.close()
    return reply


@pytest.mark.medium
def test_every_path_wants_the_role_that_is_written_here(keys_file: Path) -> None:
    @on_http(access=Access(keys_file=keys_file))
    async def run(scene: HttpScene) -> None:
        app = scene.server._runner.app
        routes = {
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
        }
        assert routes == set(HTTP_ROLES)
        for (method, path), roles in HTTP_ROLES.items():
            url = scene.url + path.format(model="demo", request_id="r", name="ui.css")
            async with scene.session.request(method, url, allow_redirects=False) as response:
                assert (response.status == 401) == (roles is not OPEN), path
            for role, key in KEYS.items():
                headers = {"Authorization": f"Bearer {key}"}
                async with scene.session.request(
                    method, url, headers=headers, allow_redirects=False
                ) as response:
                    denied = roles is not OPEN and role not in roles
                    assert (response.status == 403) == denied, (path, role)
                    assert response.status != 401

    run()


@pytest.mark.medium
@pytest.mark.parametrize("head", STRANGE, ids=lambda head: head.split(b"\r\n")[0].decode())
def test_no_way_of_writing_a_path_gets_around_the_key(keys_file: Path, head: bytes) -> None:
    @on_http(access=Access(keys_file=keys_file))
    async def run(scene: HttpScene) -> None:
        reply = await raw(scene, head)
        status = reply.split(b" ")[1]
        assert status in (b"401", b"400"), reply
        assert b"demo" not in reply
        assert b"baton_router" not in reply

    run()


@pytest.mark.medium
def test_ready_tells_strangers_no_more_than_yes_or_no(keys_file: Path) -> None:
    @on_http(access=Access(keys_file=keys_file), pair=False)
    async def run(scene: HttpScene) -> None:
        async with scene.session.get(scene.url + "/ready") as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"] == "no nodes are ready"

    run()


@pytest.mark.medium
def test_many_wrong_keys_are_429_and_say_when_to_come_again(keys_file: Path) -> None:
    @on_http(access=Access(keys_file=keys_file))
    async def run(scene: HttpScene) -> None:
        statuses = []
        for number in range(30):
            headers = {"Authorization": f"Bearer guess {number}"}
            async with scene.session.get(scene.url + "/v1/models", headers=headers) as response:
                statuses.append(response.status)
        assert (statuses[0], statuses[-1]) == (401, 429)
        assert response.headers["Retry-After"] == "1"

    run()
