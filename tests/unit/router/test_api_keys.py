"""Unit tests of API keys: whom a file lets in, over gRPC; and that no call forgets to ask."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient, Client
from baton.errors import ConfigError, InvalidRequestError, OverloadedError, UnauthenticatedError
from baton.identity import ANYBODY
from baton.rpc import bearer, open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.admission import Admission, AdmissionOptions
from router.api_keys import ApiKeys
from router.capacity import Capacity
from tests.fakes.grpc_scene import expected, params, served
from tests.fakes.router_scene import asynchronous

FILE = """
# Who may call.
alice:secret-1
alice: secret-2
bob:  with:colon
"""
CALLS = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys"
    found.write_text(FILE, encoding="utf-8")
    return found


def test_a_key_is_the_client_whose_line_it_is_in(path: Path) -> None:
    keys = ApiKeys(path)
    assert keys.principal_of("Bearer secret-1").name == "alice"
    assert keys.principal_of("bearer secret-2").name == "alice"
    assert keys.principal_of("Bearer with:colon").name == "bob"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "secret-1",
        "Basic secret-1",
        "Bearer",
        "Bearer ",
        "Bearer secret-",
        "Bearer secret-11",
        "Bearer alice",
        "Bearer s\udce9cret",
    ],
)
def test_whoever_brings_none_is_nobody_and_the_error_tells_no_key(
    path: Path, authorization: str
) -> None:
    with pytest.raises(UnauthenticatedError, match=r"^authorization: ") as caught:
        ApiKeys(path).principal_of(authorization)
    assert "ecret" not in str(caught.value)


def test_without_a_file_anybody_may_call_and_has_no_name() -> None:
    assert ApiKeys().principal_of("") == ApiKeys().principal_of("Bearer x") == ANYBODY


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no key"),
        ("# alice:secret", "has no key"),
        ("\nsecret-1", "line 2: must be name:key"),
        (":secret-1", "line 1: must be name:key"),
        ("alice:", "line 1: must be name:key"),
        ("alice:secret 1", "line 1: must be name:key"),
        ("alice:s\u00e9cret", "line 1: must be name:key"),
        ("alice:secret-1\nbob:secret-1", "line 2: the key is there twice"),
    ],
)
def test_a_wrong_file_is_one_line_that_tells_no_key(path: Path, text: str, problem: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^api_keys_file: .*{problem}") as caught:
        ApiKeys(path)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^api_keys_file: cannot read"):
        ApiKeys(tmp_path / "nothing")


def test_read_again_it_knows_the_new_keys_and_keeps_the_old_ones_if_it_is_wrong(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(path)
    path.write_text("carol:secret-3", encoding="utf-8")
    with caplog.at_level(logging.INFO):
        keys.reload()
        assert keys.principal_of("Bearer secret-3").name == "carol"
        with pytest.raises(UnauthenticatedError):
            keys.principal_of("Bearer secret-1")
        path.write_text("nonsense", encoding="utf-8")
        keys.reload()
    assert keys.principal_of("Bearer secret-3").name == "carol"
    assert "line 1: must be name:key" in caplog.text
    assert "secret" not in caplog.text


# ---------------------------------------------------------------- over gRPC


def test_a_calls_client_is_the_name_of_its_key(path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with served(api_keys=ApiKeys(path), api_key="with:colon") as (scene, client):
            completion = await client.generate([1], params())
            assert completion.token_ids == expected(100, 8)
            await client.generate_batch([[1], [2]], params(1))
            assert [call.principal.name for call in scene.dispatcher.calls] == ["bob"] * 3
            assert len(await client.models()) == 1
            assert await client.count_tokens("x") == 1

    run()


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize("metadata", [(), bearer("secret")], ids=["no key", "wrong key"])
def test_no_call_of_the_api_goes_without_a_key(path: Path, call: str, metadata: Any) -> None:
    @asynchronous
    async def run() -> None:
        async with served(api_keys=ApiKeys(path)) as (scene, client):
            async with open_channel(client._address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
                method = CALLS[call]
                request = getattr(inference_pb2, method.input_type.name)()
                reply = getattr(stub, call)(request, metadata=metadata)
                assert await reply.code() is grpc.StatusCode.UNAUTHENTICATED
            assert scene.dispatcher.calls == []

    run()


def test_a_limit_per_client_is_one_for_all_of_its_keys(path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with (
            served(api_keys=ApiKeys(path), api_key="secret-1") as (scene, alice),
            AsyncClient(alice._address, api_key="secret-2") as also_alice,
            AsyncClient(alice._address, api_key="with:colon") as bob,
        ):
            limit = AdmissionOptions(max_open_requests_per_client=1)
            scene.dispatcher.admission = Admission(Capacity(lambda: scene.pool.fleet), limit)
            scene.talks.clear()
            first = asyncio.create_task(alice.generate([1], params()))
            while scene.dispatcher.num_open == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            with pytest.raises(OverloadedError):
                await also_alice.generate([1], params())
            scene.talks.set()
            assert (await bob.generate([2], params())).token_ids == expected(100, 8)
            await first

    run()


def test_a_kept_stream_is_its_own_clients_only(path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with (
            served(api_keys=ApiKeys(path), api_key="secret-1") as (_, alice),
            AsyncClient(alice._address, api_key="with:colon") as bob,
            AsyncClient(alice._address, api_key="secret-2") as also_alice,
        ):
            deltas = alice.stream([1], params(), request_id="mine", resumable=True)
            assert sum([len(delta.token_ids) async for delta in deltas]) == 8
            with pytest.raises(InvalidRequestError, match="'mine' is not"):
                await anext(bob.resume("mine"))
            with pytest.raises(InvalidRequestError, match="'mine' is another request's"):
                await anext(bob.stream([1], params(), request_id="mine", resumable=True))
            again = [delta async for delta in also_alice.resume("mine", 0)]
            assert sum(len(delta.token_ids) for delta in again) == 8

    run()


def test_clients_take_the_key_from_the_environment_if_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret-1")
    with Client() as client, Client(api_key="") as without, Client(api_key="k") as other:
        assert client._metadata == bearer("secret-1")
        assert without._metadata == ()
        assert other._metadata == bearer("k")
    with pytest.raises(ConfigError, match=r"^api_key: must be printable ASCII$"):
        Client(api_key="a\nb")
