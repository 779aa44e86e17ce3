"""Unit tests of a node's thread while the node sleeps."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from baton.api.changes import SleepLevel
from baton.engine_config import EngineConfig
from baton.link.words import KVCacheEvents, NodeEvent, NodeRole, SendKVSnapshot
from node_runtime.node_engine import load_engine
from node_runtime.threads import ConnectorEnds, NodeThreads
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.time.waiting import wait_until
from tests.unit.engine.test_first_steps import NoEnd, NoNode


@pytest.mark.medium
def test_routers_learn_at_once_that_a_sleeping_node_caches_nothing() -> None:
    """Routers choose holders of prefixes by a node's events, so look at these events."""
    config = EngineConfig(device="cpu", num_blocks=32, num_threads=1)
    loaded = load_engine(str(DEMO_MODEL), config, node_name="d0", kv_connector="in_memory")
    pool, events = loaded.engine.block_pool, list[NodeEvent]()
    made = cast("Any", (NoNode(), ConnectorEnds(cast("Any", NoEnd()))))
    node = NodeThreads(
        "d0", NodeRole.DECODE, loaded, lambda wake: made, events.append, lambda error: None
    )

    def cache_a_block() -> None:
        block_ids = pool.allocate(1)
        assert block_ids is not None
        pool.cache(block_ids, [b"h" * 32], None)
        pool.release(block_ids)

    def told(num_stored: int) -> bool:
        last = events[-1] if events else None
        return isinstance(last, KVCacheEvents) and len(last.stored) == num_stored

    node.submit(SendKVSnapshot())
    wait_until(lambda: told(0), "the first snapshot")
    node._loop.call(cache_a_block).result(60)
    wait_until(lambda: told(1), "the block is reported")
    assert node.weights is not None
    assert asyncio.run(node.weights.sleep(SleepLevel.HOST))
    wait_until(lambda: told(0), "the empty cache is reported")
    assert cast("KVCacheEvents", events[-1]).snapshot
    num_events = len(events)
    node.submit(SendKVSnapshot())  # a router that has just started
    wait_until(lambda: len(events) > num_events, "the router gets a snapshot")
    node.close()
