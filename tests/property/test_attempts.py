"""Property tests of a client's stream over failing attempts: no gap, no repeat, one end.

Nodes here say the right tokens, in any order, twice, late, and with errors between, to a client
that reads now and then; the value of each token is its index, so that a wrong place shows.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.errors import BatonError, DeadlineExceededError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import CancelCommand, DecodeCommand, PrefillCommand, RequestDelta
from router.calls.recovery.retry_budget import RetryOptions
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT, HandNode, failure, token
from tests.fakes.router.router_scene import Scene, assert_idle
from tests.property.num_examples import num_examples

OPTIONS = RetryOptions(
    max_attempts=4,
    max_preemptions=3,
    max_losses=5,
    trial_pause_s=0,
    pair_timeout_s=0.01,
    return_timeout_s=0.01,
    first_pause_s=0,
    longest_pause_s=0,
)
CODES = ("UNAVAILABLE", "UNAVAILABLE", "PREEMPTED", "INTERNAL", "CANCELLED")


def commands_of(hand: HandNode) -> list[PrefillCommand | DecodeCommand]:
    return [*hand.of(PrefillCommand), *hand.of(DecodeCommand)]


class World:
    """Sends, in random order, messages that nodes of a real cluster may send."""

    def __init__(self, scene: Scene, chance: random.Random, max_tokens: int) -> None:
        self.scene = scene
        self.chance = chance
        self.max_tokens = max_tokens
        self.unsaid: list[tuple[HandNode, RequestDelta]] = []
        self.said: list[tuple[HandNode, RequestDelta]] = []
        self.planned: set[tuple[str, int]] = set()
        self.incarnations = 0

    def plan(self) -> None:
        """Choose each node's answers to commands that it has not seen yet."""
        for hand in (*self.scene.prefills, *self.scene.decodes):
            for command in commands_of(hand):
                if (hand.engine_id, command.epoch) in self.planned:
                    continue
                self.planned.add((hand.engine_id, command.epoch))
                self._plan(hand, command)

    def _plan(self, hand: HandNode, command: PrefillCommand | DecodeCommand) -> None:
        first = len(command.output_token_ids)
        assert command.output_token_ids == tuple(range(first))
        if isinstance(command, PrefillCommand):
            indices = range(first, first + 1)
        else:  # it may have the prompt in its cache, and say the first one too
            is_alone = not command.prefill_engine_id
            indices = range(first + self.chance.randint(0, not is_alone), self.max_tokens)
        for index in indices:
            finish = FinishReason.LENGTH if index == self.max_tokens - 1 else None
            is_prefill = isinstance(command, PrefillCommand)
            delta = msgspec.structs.replace(
                token("a", index, index, epoch=command.epoch, finish=finish),
                prefill=PREFILL_RECEIPT if is_prefill else None,
                decode=DECODE_RECEIPT if finish and not is_prefill else None,
            )
            self.unsaid.append((hand, delta))
        if self.chance.random() < 0.35:
            code = self.chance.choice(CODES)
            self.unsaid.append((hand, failure("a", code, "x: drawn", epoch=command.epoch)))

    def step(self) -> None:
        """Run the next random event."""
        self.plan()
        if self.chance.random() < 0.2:  # the client stops reading, or goes on
            reads = self.scene.reads
            reads.clear() if reads.is_set() else reads.set()
        draw = self.chance.random()
        if draw < 0.1 and self.said:  # doubles, also of attempts long over
            self._say(*self.chance.choice(self.said))
        elif draw < 0.15:
            self._replace_a_node()
        elif self.unsaid:
            item = self.unsaid.pop(self.chance.randrange(len(self.unsaid)))
            self.said.append(item)
            self._say(*item)

    def _say(self, hand: HandNode, delta: RequestDelta) -> None:
        if hand in self.scene.prefills or hand in self.scene.decodes:
            hand.say(delta)

    def _replace_a_node(self) -> None:
        letter, hands = self.chance.choice([("p", self.scene.prefills), ("d", self.scene.decodes)])
        number = self.chance.randrange(len(hands))
        hands[number].leave()
        self.unsaid = [item for item in self.unsaid if item[0] is not hands[number]]
        self.incarnations += 1
        hands[number] = self.scene.join(letter, number, incarnation=self.incarnations)
        self.scene.connect()


@settings(max_examples=num_examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_prefill=st.integers(1, 3),
    num_decode=st.integers(1, 3),
    max_tokens=st.integers(1, 6),
    may_self_prefill=st.booleans(),
)
def test_whatever_fails_the_stream_has_no_gap_and_no_repeat_and_ends_once(
    seed: int, num_prefill: int, num_decode: int, max_tokens: int, may_self_prefill: bool
) -> None:
    async def run() -> None:
        scene = Scene(
            options=OPTIONS,
            num_prefill=num_prefill,
            num_decode=num_decode,
            may_self_prefill=may_self_prefill,
        )
        all_nodes = [*scene.prefills, *scene.decodes]
        world = World(scene, random.Random(seed), max_tokens)
        await scene.call(params=SamplingParams(max_tokens=max_tokens, seed=1), timeout_s=20)
        assert scene.task is not None
        while not scene.task.done():
            world.step()
            await scene.pause()
            all_nodes += [n for n in (*scene.prefills, *scene.decodes) if n not in all_nodes]
            if not world.unsaid:
                await asyncio.sleep(0.001)
        error = scene.task.exception()
        assert not isinstance(error, DeadlineExceededError)  # nobody was left to wait for ever
        assert error is None or isinstance(error, BatonError)
        # The value of each token is its index.
        assert scene.token_ids == list(range(len(scene.token_ids)))
        starts = [item.output_index for item in scene.outputs]
        sizes = [len(item.token_ids) for item in scene.outputs]
        assert starts == [sum(sizes[:number]) for number in range(len(sizes))]
        assert 0 not in sizes
        finished = [item for item in scene.outputs if item.finish_reason is not None]
        receipts = [item for item in scene.outputs if item.receipt is not None]
        assert finished == receipts == ([] if error else scene.outputs[-1:])
        if error is None:
            assert len(scene.token_ids) == max_tokens
        assert_nothing_is_left(scene, all_nodes)

    asyncio.run(asyncio.wait_for(run(), 30))


def assert_nothing_is_left(scene: Scene, nodes: list[HandNode]) -> None:
    """Each leg is closed, and each attempt but one that ended by itself is cancelled."""
    assert scene.dispatcher.num_open == 0
    epochs: set[int] = set()
    for hand in nodes:
        assert hand.node.legs == {}
        assert_idle(hand)
        epochs.update(command.epoch for command in commands_of(hand))
    last = scene.outputs[-1] if scene.outputs else None
    finished_epoch = max(epochs) if last is not None and last.receipt is not None else None
    for hand in nodes:
        cancelled = {command.epoch for command in hand.of(CancelCommand)}
        for command in commands_of(hand):
            assert command.epoch in cancelled | {finished_epoch}
    budget = OPTIONS.max_attempts + OPTIONS.max_preemptions + OPTIONS.max_losses
    assert len(epochs) <= budget
