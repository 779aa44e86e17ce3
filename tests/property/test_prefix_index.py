"""State machine over the prefix index: block pools, event feeds, a lossy network, the index.

What the index says of a node whose messages all arrived is what the node's own pool would find.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kv.block_hash import BlockHash, BlockHasher
from baton.link.words import KVCacheEvents
from engine.core.block_pool import BlockPool
from node_runtime.reports.kv_event_feed import KVEventFeed
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes

KIND = HashKind(1, "xxh3_128")
NAMES = ("a", "b", "c")
NUM_BLOCKS = 5
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class HandPool:
    """A node's cache and feed, stepped by hand, with what it sends.

    Attributes:
        is_believed: whether a snapshot arrived, and all events after it.
        is_behind: whether some events are not sent yet.
        was_unheard: whether messages were lost, and no snapshot came since.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.pool = BlockPool(NUM_BLOCKS)
        self.sent: list[KVCacheEvents] = []
        self.feed = KVEventFeed(self.pool, self.sent.append)
        self.feed.request_snapshot()
        self.is_believed = self.is_behind = self.was_unheard = False

    def serve(self, token_ids: list[int]) -> None:
        """Compute a prompt whole, and keep its blocks as long as others need none."""
        names: list[BlockHash] = []
        BlockHasher(KIND.block_size, KIND.algorithm).extend(names, token_ids)
        block_ids = self.pool.allocate(len(names))
        assert block_ids is not None
        self.pool.cache(block_ids, names, None)
        self.pool.release(reversed(block_ids))

    def num_found(self, token_ids: list[int]) -> int:
        """Return how many blocks of a prompt the node would not compute again."""
        names: list[BlockHash] = []
        BlockHasher(KIND.block_size, KIND.algorithm).extend(names, token_ids)
        for index, name in enumerate(names):
            if self.pool.find(name) is None:
                return index
        return len(names)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Nodes that join, serve and leave, and some of whose messages are lost."""

    @initialize(max_blocks=st.sampled_from([4, 1000]), sweep_blocks=st.integers(1, 4))
    def start(self, max_blocks: int, sweep_blocks: int) -> None:
        self.has_room = max_blocks == 1000
        self.index = PrefixIndex(max_blocks, sweep_blocks=sweep_blocks)
        self.nodes: dict[str, HandPool] = {}

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.nodes[name] = HandPool(name)
        self.index.add_node(name, KIND)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def join_again(self, data: st.DataObject) -> None:
        """Reconnect a node whose link broke: its cache stays, its messages on the way are lost."""
        node = self._draw(data)
        node.feed.after_step(busy=False)
        node.sent.clear()
        node.is_believed = node.is_behind = node.was_unheard = False
        self.index.add_node(node.engine_id, KIND)
        node.feed.request_snapshot()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = self._draw(data)
        del self.nodes[node.engine_id]
        self.index.remove(node.engine_id)

    @precondition(lambda self: self.nodes)
    @rule(
        data=st.data(),
        served=st.lists(prompts, min_size=1, max_size=4),
        then=st.sampled_from(["heard", "lost", "later"]),
    )
    def serve(self, data: st.DataObject, served: list[list[int]], then: str) -> None:
        node = self._draw(data)
        for token_ids in served:
            node.serve(token_ids)
        node.is_behind = True
        if then != "later":
            self._step(node, then == "heard")

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        node = self._draw(data)
        node.pool.reset_prefix_cache()
        node.is_behind = True

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self._step(self._draw(data), True)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def another_router_asks(self, data: st.DataObject) -> None:
        self._draw(data).feed.request_snapshot()

    @invariant()
    def what_it_says_is_what_nodes_hold(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        for token_ids in ([0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]):
            found = self.index.match_tokens(PromptHashes(token_ids))
            for name, node in self.nodes.items():
                if node.is_behind or not node.is_believed:
                    continue
                held = node.num_found(token_ids)
                if self.has_room:
                    assert found.get(name, 0) == held, (name, token_ids)
                else:
                    assert found.get(name, 0) <= held, (name, token_ids)
                    assert found.get(name, 0) == held or not self.index.is_exact(name)
            assert found.keys() <= self.nodes.keys()

    def _step(self, node: HandPool, hears: bool) -> None:
        """Send a node's messages; all or none arrive."""
        node.feed.after_step(busy=False)
        node.is_behind = False
        for message in node.sent:
            if hears:
                self._hear(node, message)
            else:
                node.is_believed, node.was_unheard = False, True
        node.sent.clear()

    def _hear(self, node: HandPool, message: KVCacheEvents) -> None:
        if self.index.apply_events(node.engine_id, message):
            node.feed.request_snapshot()
        if message.snapshot:
            node.is_believed, node.was_unheard = True, False
        elif node.was_unheard:  # it can tell, now that it hears of something later
            assert not self.index.is_exact(node.engine_id)

    def _draw(self, data: st.DataObject) -> HandPool:
        return self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
