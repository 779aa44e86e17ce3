"""Tests that pooled calls go only to prefill nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array

import pytest

from baton.api.errors import NodeUnavailableError
from baton.api.outputs import FinishReason, RequestDelta, TextDelta
from baton.api.pooling import PoolingKind, PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.link.words import NodeRole, PrefillCommand
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.policies import POLICIES
from tests.fakes.router.nodes import PREFILL_RECEIPT, HandNode, make_pool, make_registration
from tests.fakes.router.router_scene import NO_RETRIES, Scene, assert_idle, asynchronous

MEAN = PoolingParams(PoolingKind.MEAN)
CALL = dataclasses.replace(Scene.make(params=SamplingParams(max_tokens=1, seed=0)), pooling=MEAN)
POOLED = array("f", [1.0, 2.0]).tobytes()


@pytest.mark.parametrize("policy", POLICIES.names())
def test_every_policy_places_without_a_decode_node(policy: str) -> None:
    @asynchronous
    async def run() -> None:
        pool = make_pool()
        nodes = [HandNode(pool, make_registration(f"p{i}", NodeRole.PREFILL)) for i in range(2)]
        dispatcher = Dispatcher(pool, POLICIES.load(policy)(), Recoveries(pool, NO_RETRIES))
        outputs: list[TextDelta] = []

        async def collect() -> None:
            outputs.extend([output async for output in dispatcher.run(CALL)])

        task = asyncio.create_task(collect())
        await Scene.pause()
        [(node, command)] = [(one, own) for one in nodes for own in one.of(PrefillCommand)]
        assert (command.decode_engine_id, command.pooling) == ("", MEAN)
        node.say(
            RequestDelta(
                command.request_id,
                0,
                (),
                FinishReason.STOP,
                epoch=command.epoch,
                prefill=PREFILL_RECEIPT,
                pooled=POOLED,
            )
        )
        await task
        [output] = outputs
        assert (output.pooled, output.token_ids) == (POOLED, ())
        assert output.receipt is not None
        assert (output.receipt.prefill_node, output.receipt.decode_node) == (node.node.name, "")
        for one in nodes:
            assert_idle(one)

    run()


@asynchronous
async def test_without_a_prefill_node_the_error_says_so() -> None:
    pool = make_pool()
    HandNode(pool, make_registration("d0", NodeRole.DECODE))
    dispatcher = Dispatcher(pool, POLICIES.load("cost")(), Recoveries(pool, NO_RETRIES))
    with pytest.raises(NodeUnavailableError, match="no prefill node has joined the router"):
        async for _ in dispatcher.run(CALL):
            pass
