"""Unit tests of hints that name a session: all APIs send nodes the same name for a session."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import cast

import grpc
import pytest

from baton.access.identity import Principal
from baton.api.errors import InvalidRequestError
from baton.link.words import DecodeCommand, KVCacheEvents, PrefillCommand, SessionHint
from baton.serving.call_gate import Context
from baton.serving.rpc import bearer
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from router.calls.call import Call
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes
from router.gate.admission_options import AdmissionOptions
from router.intake.cache_hints import make_pins, send_hint, session_hint, session_of_key
from tests.fakes.router.http_scene import HttpScene, on_http
from tests.fakes.router.router_scene import Scene as RouterScene
from tests.fakes.router.router_scene import asynchronous
from tests.unit.router.api.admin.test_admin_service import served
from tests.unit.router.api.grpc.test_service import Scene, _NoDeadline
from tests.unit.router.api.test_surfaces import keys_of_clients
from tests.unit.router.api.test_surfaces import served as served_to_clients

ACME, OTHER = Principal(tenant="acme"), Principal(tenant="other")


def test_a_hint_has_the_names_of_the_session_s_requests() -> None:
    pins = make_pins(ACME, "s", ())
    assert pins is not None
    hint = session_hint(ACME, "s", "", 5.0)
    assert (hint.owner, hint.session, hint.keep_s) == (pins.owner, pins.session, 5.0)
    others = session_hint(OTHER, "s", "")
    assert others.owner != hint.owner
    assert others.session != hint.session
    of_key = make_pins(ACME, session_of_key(ACME, "k"), ())
    assert of_key is not None
    assert session_hint(ACME, "", "k").session == of_key.session
    assert make_pins(ACME, "", ()) is None


@pytest.mark.parametrize("names", [("", ""), ("s", "k")])
def test_exactly_one_name_is_needed(names: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^session_id: or prompt_cache_key is needed"):
        session_hint(ACME, *names)


@asynchronous
async def test_grpc_sends_prefetches_and_drops_to_all_nodes() -> None:
    scene, context = Scene(), cast(Context, _NoDeadline())
    for ttl_s in (0.0, 7 * 86_400.0 + 1, float("nan")):
        request = inference_pb2.PrefetchRequest(session_id="s", ttl_s=ttl_s)
        with pytest.raises(InvalidRequestError, match=r"^ttl_s: must be above 0"):
            await scene.service.Prefetch(request, context)
    request = inference_pb2.PrefetchRequest(session_id="s", ttl_s=5.0)
    await scene.service.Prefetch(request, context)
    await scene.service.DropPins(inference_pb2.DropPinsRequest(session_id="s"), context)
    for node in (scene.prefill, scene.decode):
        hints = node.of(SessionHint)
        assert [hint.keep_s for hint in hints] == [5.0, 0.0]
        assert len({hint.session for hint in hints}) == 1


def session_call(scene: RouterScene, request_id: str, prompt: list[int]) -> Call:
    call = scene.make(request_id)
    terms = dataclasses.replace(call.terms, pins=make_pins(ACME, "s", ()))
    return dataclasses.replace(call, prompt_token_ids=prompt, terms=terms)


def told(scene: RouterScene) -> set[str]:
    """Return the names of the nodes that got a hint since the last call."""
    hands = [*scene.prefills, *scene.decodes]
    found = {hand.node.name for hand in hands if hand.of(SessionHint)}
    for hand in hands:
        hand.commands.clear()
    return found


@asynchronous
async def test_a_hint_goes_to_the_nodes_that_may_know_its_session() -> None:
    """Regression: each hint went to every node of the model."""
    scene = RouterScene(num_prefill=4, num_decode=4)
    hands = [*scene.prefills, *scene.decodes]
    everyone = {hand.node.name for hand in hands}
    for hand in hands:
        scene.pool.prefix_index.add_node(hand.engine_id, HashKind(16, "xxh3_128"))
    hint = session_hint(ACME, "s", "", 5.0)
    assert send_hint(scene.pool, hint) == 8, "this router has not seen the session"
    assert told(scene) == everyone

    prompt = list(range(5 * 16))
    calls = [session_call(scene, f"a{turn}", prompt) for turn in range(2)]
    streams = [scene.dispatcher.run(call) for call in calls]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await scene.pause()
    used = {
        hand.node.name
        for hand in hands
        if any(isinstance(one, PrefillCommand | DecodeCommand) for one in hand.commands)
    }
    assert len(used) == 4, "two requests on two pairs"
    assert send_hint(scene.pool, hint) == 4
    assert told(scene) == used
    assert send_hint(scene.pool, session_hint(OTHER, "s", "")) == 8
    told(scene)

    # Another router has sent the session's next request to another node
    other = next(hand for hand in scene.prefills if hand.node.name not in used)
    for hand in hands:
        scene.pool.on_event(hand.node, KVCacheEvents(1, True, ()))
    (end,) = scene.pool.prefix_index.ends_of(PromptHashes(prompt))
    scene.pool.on_event(other.node, KVCacheEvents(2, False, (end,)))
    assert send_hint(scene.pool, hint) == 5
    assert told(scene) == used | {other.node.name}

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for hand in hands:
        if hand.node.name in used or hand is other:
            hand.leave()
    assert send_hint(scene.pool, hint) == 3, "none of the nodes that knew the session is left"


@on_http()
async def test_http_sends_prefetches_and_drops_to_all_nodes(scene: HttpScene) -> None:
    answers = [
        await scene.post("/v1/sessions/prefetch", session_id="s", ttl="2m"),
        await scene.post("/v1/sessions/prefetch", session_id="s", ttl=1.5),
        await scene.post("/v1/sessions/drop", session_id="s"),
    ]
    assert [answer.status for answer in answers] == [200] * 3
    assert await answers[0].json() == {"num_nodes": 2, "object": "session"}
    assert [hint.keep_s for hint in scene.decode.of(SessionHint)] == [120.0, 1.5, 0.0]
    scene.dispatcher.admission.options = AdmissionOptions(max_hints_per_minute=3)
    answers = [await scene.post("/v1/sessions/drop", session_id="s") for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert int(answers[-1].headers["Retry-After"]) > 0
    assert "--max-hints-per-minute: 3 hints were sent" in await answers[-1].text()
    assert len(scene.decode.of(SessionHint)) == 6
    refused = await scene.post("/v1/sessions/prefetch", session_id="s", ttl="soon")
    assert refused.status == 400
    assert "ttl: must be seconds, or a number with the unit" in await refused.text()
    refused = await scene.post("/v1/sessions/prefetch", session_id="s", ttl=0)
    assert '"ttl: must be above 0 and at most 604800"' in await refused.text()


@asynchronous
async def test_operators_drop_the_sessions_of_any_tenant() -> None:
    scene = RouterScene()
    async with served(scene) as call:
        found = await call("DropPins", prompt_cache_key="k", tenant="acme")
    hints = [hint for node in (scene.prefill, scene.decode) for hint in node.of(SessionHint)]
    assert found.num_nodes == len(hints) == 2
    assert set(hints) == {session_hint(ACME, "", "k")}


def test_clients_drop_no_more_sessions_as_operators_do_than_otherwise(tmp_path: Path) -> None:
    @asynchronous
    async def run() -> None:
        async with served_to_clients(keys_of_clients(tmp_path)) as (scene, channel):
            scene.dispatcher.admission.options = AdmissionOptions(max_hints_per_minute=2)
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            request = admin_pb2.AdminDropPinsRequest(session_id="s")
            for key in ("alice's", "alice's", "bob's"):
                await stub.DropPins(request, metadata=bearer(key), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.DropPins(request, metadata=bearer("alice's"), timeout=5)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run()
