"""Tests of two base models at one address: each API sends a request to its model's nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.api.errors import (
    NodeUnavailableError,
    NotFoundError,
    PermissionDeniedError,
)
from baton.serving.rpc import open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from router.names.served_name import ServedName
from tests.fakes.router.grpc_scene import params
from tests.fakes.router.named_models import NamedModel, NamedModels

pytestmark = pytest.mark.medium
DIGEST = "0123456789abcdef" * 4
AT_ONCE_S = 5.0  # far below the 30 s for which a request waits for nodes


def on_models(
    make: Callable[[], NamedModels] = NamedModels,
) -> Callable[[Callable[[NamedModels], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run a coroutine as a test, with running `NamedModels` as its argument."""

    def decorate(test: Callable[[NamedModels], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def within() -> None:
            async with asyncio.timeout(30), make().running() as models:
                await test(models)

        @functools.wraps(test)
        def run() -> None:
            asyncio.run(within())

        del run.__wrapped__
        return run

    return decorate


@on_models()
async def test_over_http_a_request_reaches_the_nodes_of_its_name_only(models: NamedModels) -> None:
    for name, counts in (("b", (0, 1)), ("a", (1, 1)), ("b", (1, 2))):
        status, body = await models.complete(name)
        assert status == 200, body
        assert (models.a.num_prompts, models.b.num_prompts) == counts


@on_models()
async def test_over_grpc_a_request_reaches_the_nodes_of_its_name_only(models: NamedModels) -> None:
    async with models.client() as client:
        await client.generate([1, 2], params(), model="b")
        await client.generate_batch([[1], [2]], params(), model="b")
        await client.generate([1, 2], params())
        assert [one.name for one in await client.models()] == ["a", "b"]
        assert await client.tokenize("hello", model="b") == await client.tokenize("hello")
        with pytest.raises(NotFoundError, match=r"'c' does not exist here, 'a', 'b' are served"):
            await client.generate([1, 2], params(), model="c")
        with pytest.raises(NotFoundError):
            await client.count_tokens("hello", model="c")
    assert (models.a.num_prompts, models.b.num_prompts) == (1, 3)


@on_models()
async def test_an_unknown_name_is_404_and_one_line_on_every_path(models: NamedModels) -> None:
    messages = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        async with models.session.post(models.url + path, json={**body, "model": "c"}) as response:
            assert response.status == 404, path
            message = (await response.json())["error"]["message"]
        assert message == "model: 'c' does not exist here, 'a', 'b' are served"
    async with models.session.get(f"{models.url}/v1/models/c") as response:
        assert response.status == 404


@on_models(lambda: NamedModels([NamedModel("a"), NamedModel("b", has_nodes=False)]))
async def test_a_name_without_nodes_is_503_at_once_and_others_are_served(
    models: NamedModels,
) -> None:
    async with asyncio.timeout(AT_ONCE_S):
        status, body = await models.complete("b")
    assert status == 503
    assert body["error"]["message"] == "model: no node of 'b' has joined"
    async with models.client() as client, asyncio.timeout(AT_ONCE_S):
        with pytest.raises(NodeUnavailableError, match=r"no node of 'b' has joined"):
            await client.generate([1], params(), model="b")
    assert (await models.complete("a"))[0] == 200
    async with models.session.get(f"{models.url}/ready") as response:
        assert response.status == 200
    assert [one.pool.num_nodes for one in models.table.bases] == [2, 0]
    text = models.b.base.metrics.text().decode()
    assert 'baton_router_requests_total{outcome="unavailable"} 2.0' in text


def test_a_key_may_be_limited_to_names(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entries = [
        entry_text("key-b", "only-b", models=["b"]),
        entry_text("key-x", "other", models=["x"]),
        entry_text("key-all", "all"),
    ]
    path.write_text("\n".join(entries), encoding="utf-8")

    @on_models(lambda: NamedModels(access=Access(keys_file=path)))
    async def run(models: NamedModels) -> None:
        statuses = {
            (key, name): (await models.complete(name, key))[0]
            for key in ("key-b", "key-x", "key-all")
            for name in ("a", "b")
        }
        assert statuses == {
            ("key-b", "a"): 403, ("key-b", "b"): 200,
            ("key-x", "a"): 403, ("key-x", "b"): 403,
            ("key-all", "a"): 200, ("key-all", "b"): 200,
        }  # fmt: skip
        for key, names in (("key-b", ["b"]), ("key-all", ["a", "b"])):
            headers = {"Authorization": f"Bearer {key}"}
            async with models.session.get(f"{models.url}/v1/models", headers=headers) as response:
                assert [one["id"] for one in (await response.json())["data"]] == names
        async with models.client("key-b") as client:
            assert [one.name for one in await client.models()] == ["b"]
            with pytest.raises(PermissionDeniedError, match=r"only-b may not use 'a'"):
                await client.generate([1], params(), model="a")
            await client.generate([1], params())
        assert (models.a.num_prompts, models.b.num_prompts) == (1, 3)

    run()


def test_a_key_may_be_limited_to_an_adapter(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry_text("key-c", "only-c", models=["c"]), encoding="utf-8")

    @on_models(lambda: NamedModels(access=Access(keys_file=path)))
    async def run(models: NamedModels) -> None:
        adapted = ServedName(name="c", base=models.b.base, adapter=DIGEST)
        await models.table.set_name(adapted)
        await models.table.set_name(dataclasses.replace(adapted, name="d"))
        for node in models.b.nodes:
            node.node.load.adapters = frozenset({DIGEST})
        statuses = {name: (await models.complete(name, "key-c"))[0] for name in ("b", "c", "d")}
        assert statuses == {"b": 403, "c": 200, "d": 403}
        async with models.client("key-c") as client:
            (one,) = await client.models()
            receipt = (await client.generate([1], params())).receipt  # the first that it may use
        assert (one.name, one.parent, one.adapter) == ("c", "b", DIGEST)
        assert receipt is not None
        assert (receipt.model, receipt.adapter) == ("c", DIGEST)
        text = models.b.base.metrics.text().decode()
        labels = 'adapter="0123456789ab",model="c"'
        assert f"baton_router_adapter_requests_total{{{labels}}} 2.0" in text
        assert 'baton_router_adapter_nodes{adapter="0123456789ab"} 2.0' in text

    run()


@on_models()
async def test_the_list_tells_what_each_name_stands_for(models: NamedModels) -> None:
    adapted = ServedName(name="c", base=models.b.base, adapter=DIGEST)
    await models.table.set_name(adapted)
    await models.table.set_name(dataclasses.replace(adapted, name="d"))
    await models.table.set_name(dataclasses.replace(models.table.find("a"), name="alias-of-a"))
    async with models.session.get(f"{models.url}/v1/models") as response:
        listed = (await response.json())["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        ("a", "a", None), ("b", "b", None), ("c", DIGEST, "b"), ("d", DIGEST, "b"),
        ("alias-of-a", "a", None),
    ]  # fmt: skip
    await models.table.remove("b")
    async with models.session.get(f"{models.url}/v1/models/c") as response:
        assert (await response.json())["parent"] == "b", "no name is left, and --model was b"


@on_models()
async def test_an_operator_lists_sets_and_removes_names(models: NamedModels) -> None:
    async with open_channel(models.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        await admin.SetName(
            admin_pb2.SetNameRequest(name="c", target="b", request_defaults="max_tokens=2")
        )
        await admin.SetName(admin_pb2.SetNameRequest(name="d", target="c", adapter="0" * 64))
        listed = (await admin.ListNames(admin_pb2.ListNamesRequest())).names
        told = [(one.name, one.model, one.request_defaults, one.problem) for one in listed]
        problem = "model: no node of 'b' can load the adapter 000000000000: its folder is not known"
        assert told == [
            ("a", "a", "", ""),
            ("b", "b", "", ""),
            ("c", "b", "max_tokens=2", ""),
            ("d", "b", "max_tokens=2", problem),
        ]
        assert (await models.complete("c"))[0] == 200
        assert (await models.complete("d"))[0] == 503
        assert (models.a.num_prompts, models.b.num_prompts) == (0, 1)
        await admin.RemoveName(admin_pb2.RemoveNameRequest(name="c"))
        assert (await models.complete("c"))[0] == 404
    async with models.client() as client:
        assert [one.name for one in await client.models()] == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "c", "target": "x"}, "model: 'x' does not exist here"),
        ({"name": "", "target": "a"}, "name: must have 1 to 256 printable characters"),
        ({"name": "c", "target": "a", "adapter": "AB"}, "adapter: must be 64 hex characters"),
        ({"name": "c", "target": "a", "request_defaults": "x=1"}, "request_defaults: must have"),
        ({"name": "c", "target": "a", "chat_template": "{{"}, "the chat template in c is broken"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_line(
    fields: dict[str, str], problem: str
) -> None:
    @on_models()
    async def run(models: NamedModels) -> None:
        async with open_channel(models.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            with pytest.raises(Exception, match=problem):
                await admin.SetName(admin_pb2.SetNameRequest(**cast("dict[str, Any]", fields)))
        assert models.table.names == ("a", "b")

    run()


@on_models()
async def test_a_switch_under_load_fails_no_request_and_mixes_no_models(
    models: NamedModels,
) -> None:
    """Running requests end on the nodes they began on, and each later one is whole, too."""
    num_done = 0

    async def ask(client: Any) -> None:
        nonlocal num_done
        for seed in range(40):
            completion = await client.generate([1, 2, 3], params(seed=seed), model="a")
            assert len(completion.token_ids) == 8
            num_done += 1

    async def switch() -> None:
        targets = [models.b.base, models.a.base] * 50
        for base in targets:
            await models.table.set_name(ServedName(name="a", base=base))
            await asyncio.sleep(0.002)

    async with models.client() as client:
        await asyncio.gather(switch(), *(ask(client) for _ in range(4)))
    assert num_done == 160
    assert models.a.num_prompts + models.b.num_prompts == 160
    assert min(models.a.num_prompts, models.b.num_prompts) > 0
    for model in (models.a, models.b):
        prompts = {call.request_id for call in model.dispatcher.calls}
        assert len(prompts) == model.num_prompts


@on_models()
async def test_a_running_request_ends_as_it_began_when_its_name_is_removed(
    models: NamedModels,
) -> None:
    models.a.talks.clear()
    asked = asyncio.create_task(models.complete("a"))
    while not models.a.num_prompts:  # noqa: ASYNC110 - a node sets no event
        await asyncio.sleep(0.001)
    await models.table.remove("a")
    assert (await models.complete("a"))[0] == 404
    models.a.talks.set()
    assert (await asked)[0] == 200


@on_models()
async def test_a_name_may_have_a_chat_template_and_a_request_may_not(models: NamedModels) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    served = ServedName(name="c", base=models.b.base, chat_template=template)
    await models.table.set_name(served)
    messages = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"model": "c", "messages": messages}
    texts = []
    for model in ("b", "c"):
        async with models.session.post(
            f"{models.url}/tokenize", json={**body, "model": model}
        ) as response:
            assert response.status == 200, await response.text()
            token_ids = (await response.json())["tokens"]
        async with models.session.post(
            f"{models.url}/detokenize", json={"tokens": token_ids}
        ) as response:
            texts.append((await response.json())["prompt"])
    assert "<hello>" in texts[1]
    assert "<hello>" not in texts[0]
    async with models.session.post(
        f"{models.url}/tokenize", json={**body, "chat_template": "{{ 1 }}"}
    ) as response:
        assert response.status == 400


@on_models()
async def test_operators_see_the_nodes_and_requests_of_both_base_models(
    models: NamedModels,
) -> None:
    for name in ("a", "b", "b"):
        assert (await models.complete(name))[0] == 200
    async with open_channel(models.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        listed = await admin.ListNodes(admin_pb2.ListNodesRequest())
        assert [(one.node_name, one.model) for one in listed.nodes] == [
            ("decode", "a"), ("prefill", "a"), ("decode", "b"), ("prefill", "b"),
        ]  # fmt: skip
        assert listed.model == "a, b"
        for model, number in (("", 3), ("a", 1), ("b", 2)):
            stats = await admin.GetStats(admin_pb2.GetStatsRequest(model=model))
            assert (stats.num_finished, stats.num_finished_in_window) == (number, number)
        requests = (await admin.ListRequests(admin_pb2.ListRouterRequestsRequest())).requests
        assert len(requests) == 3
        assert [one.received_at for one in requests] == sorted(
            (one.received_at for one in requests), reverse=True
        )
        assert [one.model for one in requests] == ["b", "b", "a"]
        trace = await admin.Trace(admin_pb2.TraceRequest(request_id=requests[0].request_id))
        assert (trace.state, trace.model, trace.receipt.model) == ("finished", "b", "b")
        rollout = await admin.GetRollout(admin_pb2.GetRolloutRequest(model="b"))
        assert (rollout.model, rollout.state) == ("b", "steady")
        explained = await admin.Explain(admin_pb2.ExplainRequest(num_prompt_tokens=4, model="b"))
        assert explained.decisions[0].decode_node == "decode"
        policy = await admin.SetPolicy(admin_pb2.SetPolicyRequest(policy="round_robin"))
        assert policy.policy == "round_robin"
    policies = {type(base.dispatcher.placer.policy).__name__ for base in models.table.bases}
    assert policies == {"RoundRobin"}
