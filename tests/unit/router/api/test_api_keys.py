"""Unit tests of API keys over gRPC: a key decides whose a call is, and what its client may see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.access.identity import Credentials
from baton.api.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
)
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient, Client
from baton.link.words import DecodeCommand
from baton.serving.rpc import bearer, open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.gate.admission import make_admission
from router.gate.admission_options import AdmissionOptions
from router.gate.rate_limits import TOKENS
from tests.fakes.router.grpc_scene import expected, params, served
from tests.fakes.router.router_scene import asynchronous

CALLS = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "keys.toml"
    keys = (("secret-1", "alice"), ("secret-2", "alice"), ("with:colon", "bob"))
    path.write_text("\n".join(entry_text(key, name) for key, name in keys), encoding="utf-8")
    return Access(keys_file=path)


def test_a_calls_client_is_the_name_of_its_key(access: Access) -> None:
    @asynchronous
    async def run() -> None:
        async with served(access=access, api_key="with:colon") as (scene, client):
            completion = await client.generate([1], params())
            assert completion.token_ids == expected(100, 8)
            await client.generate_batch([[1], [2]], params(1))
            assert [call.terms.principal.name for call in scene.dispatcher.calls] == ["bob"] * 3
            assert len(await client.models()) == 1
            assert await client.count_tokens("x") == 1

    run()


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize("metadata", [(), bearer("secret")], ids=["no key", "wrong key"])
def test_no_call_of_the_api_goes_without_a_key(access: Access, call: str, metadata: Any) -> None:
    @asynchronous
    async def run() -> None:
        async with served(access=access) as (scene, client):
            async with open_channel(client._address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
                method = CALLS[call]
                request = getattr(inference_pb2, method.input_type.name)()
                reply = getattr(stub, call)(request, metadata=metadata)
                assert await reply.code() is grpc.StatusCode.UNAUTHENTICATED
            assert scene.dispatcher.calls == []

    run()


def test_a_limit_per_client_is_one_for_all_of_its_keys(access: Access) -> None:
    @asynchronous
    async def run() -> None:
        async with (
            served(access=access, api_key="secret-1") as (scene, alice),
            AsyncClient(alice._address, api_key="secret-2") as also_alice,
            AsyncClient(alice._address, api_key="with:colon") as bob,
        ):
            limit = AdmissionOptions(max_open_requests_per_client=1)
            scene.dispatcher.admission = make_admission(scene.pool, limit)
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


def test_what_is_only_tokenized_counts_in_the_limits_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    limits = "limits = { requests_per_minute = 4, tokens_per_minute = 1000 }\n"
    path.write_text(entry_text("secret", "alice") + limits, encoding="utf-8")

    @asynchronous
    async def run() -> None:
        async with served(access=Access(keys_file=path), api_key="secret") as (scene, client):
            await client.count_tokens([1] * 90)
            await client.tokenize([1] * 60)
            (left,) = [
                scene.dispatcher.admission.rates_of(principal)
                for principal in [
                    Access(keys_file=path).principal_of(Credentials(authorization="Bearer secret"))
                ]
            ]
            assert left[TOKENS].remaining == pytest.approx(850, abs=40)
            for _ in range(2):
                await client.count_tokens([1])
            with pytest.raises(OverloadedError, match="4 requests per minute") as refused:
                await client.tokenize([1])
            assert refused.value.retry_delay_s
            with pytest.raises(OverloadedError):
                await client.count_tokens("x")

    run()


def test_a_kept_stream_is_its_own_clients_only(access: Access) -> None:
    @asynchronous
    async def run() -> None:
        async with (
            served(access=access, api_key="secret-1") as (_, alice),
            AsyncClient(alice._address, api_key="with:colon") as bob,
            AsyncClient(alice._address, api_key="secret-2") as also_alice,
        ):
            deltas = alice.stream([1], params(), request_id="mine", resumable=True)
            assert sum([len(delta.token_ids) async for delta in deltas]) == 8
            with pytest.raises(InvalidRequestError, match="'mine' is not"):
                await anext(bob.resume("mine"))
            with pytest.raises(InvalidRequestError, match="'mine' is another request's"):
                await anext(also_alice.stream([2], params(), request_id="mine", resumable=True))
            his = [d async for d in bob.stream([1], params(3), request_id="mine", resumable=True)]
            assert sum(len(delta.token_ids) for delta in his) == 3  # his own, of the same name
            again = [delta async for delta in also_alice.resume("mine", 0)]
            assert sum(len(delta.token_ids) for delta in again) == 8

    run()


async def all_of(
    client: AsyncClient, prompt: list[int], wanted: SamplingParams, request_id: str
) -> tuple[set[str], tuple[int, ...]]:
    """Request ids and tokens of a stream."""
    deltas = [one async for one in client.stream(prompt, wanted, request_id=request_id)]
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return {delta.request_id for delta in deltas}, token_ids


def test_a_guessed_request_id_neither_blocks_nor_shows_nor_ends_anothers(access: Access) -> None:
    """Two tenants use one id at once; each gets its own tokens, and nodes tell the two apart."""

    @asynchronous
    async def run() -> None:
        async with (
            served(access=access, api_key="secret-1") as (scene, alice),
            AsyncClient(alice._address, api_key="with:colon") as bob,
        ):
            scene.talks.clear()
            hers = asyncio.create_task(all_of(alice, [1], params(), "job-1"))
            while scene.dispatcher.num_open < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            his = asyncio.create_task(all_of(bob, [1, 2], params(seed=500), "job-1"))
            while scene.dispatcher.num_open < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            with pytest.raises(InvalidRequestError, match="'job-1' is in use"):
                await all_of(alice, [1], params(), "job-1")
            commands = scene.decode.of(DecodeCommand)
            assert len({command.request_id for command in commands}) == 2
            log = scene.dispatcher.log
            assert [log.get("job-1", who).num_prompt_tokens for who in ("alice", "bob")] == [1, 2]  # type: ignore[union-attr]
            with pytest.raises(InvalidRequestError, match="alice, bob have a request 'job-1' open"):
                scene.dispatcher.abort("job-1", "a test")
            assert not scene.dispatcher.abort("job-1", "a test", tenant="carol")
            assert scene.dispatcher.abort("job-1", "a test", tenant="bob")
            with pytest.raises(RequestCancelledError):
                await his
            scene.talks.set()
            assert await hers == ({"job-1"}, expected(100, 8))

    run()


def test_an_id_that_is_used_again_and_again_is_one_request_in_the_log_of_decisions() -> None:
    @asynchronous
    async def run() -> None:
        async with served() as (scene, client):
            for _ in range(50):
                await all_of(client, [1], params(1), "same")
            assert len(scene.dispatcher.placer.decisions.get("same")) == 1

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
