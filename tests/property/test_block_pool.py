"""State machine over BlockPool: every block is free or referenced, and the counts add up."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: a counter of references, and a plain list of free blocks, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.references: Counter[int] = Counter()
        self.free = list(range(NUM_BLOCKS))

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks)
        if num_blocks > len(self.free):
            assert block_ids is None
            return
        assert block_ids == self.free[:num_blocks]
        del self.free[:num_blocks]
        self.references.update(block_ids)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=4))
        self.pool.hold(block_ids)
        self.references.update(block_ids)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.permutations(sorted(self.references.elements())))
        block_ids = held[: data.draw(st.integers(0, len(held)))]
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.references[block_id] -= 1
            if not self.references[block_id]:
                del self.references[block_id]
                self.free.append(block_id)

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_references() == self.references.total()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
