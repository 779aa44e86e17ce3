"""Tests that calls that could all continue at once leave turns of the event loop to others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, NodeRole, PrefillCommand
from router.calls.recovery.retry_budget import RetryOptions
from router.calls.wake_ups import TURNS_AT_ONCE, WOKEN_AT_ONCE, Turns, WakeUps
from router.fleet import node
from router.fleet.node import LegDelta, LegWork
from tests.fakes.router.http_scene import until
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration, token
from tests.fakes.router.router_scene import Scene, asynchronous

NUM_CALLS = 48


class Rounds:
    """Count the rounds of the event loop, and what happens in each of them."""

    def __init__(self) -> None:
        self._most = self._count = 0
        self._task = asyncio.create_task(self._watch())

    def note(self) -> None:
        self._count += 1

    @classmethod
    async def start(cls) -> Rounds:
        """Watch from the next round on."""
        rounds = cls()
        await asyncio.sleep(0)
        return rounds

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._most, self._count = self.most, 0

    @property
    def most(self) -> int:
        """The highest number in one round."""
        return max(self._most, self._count)

    def close(self) -> None:
        self._task.cancel()


@asynchronous
async def test_turns_are_handed_out_in_their_order_and_a_few_in_each_round() -> None:
    turns, rounds, order = Turns(at_once=4), await Rounds.start(), list[int]()

    async def go_on(number: int) -> None:
        await turns.wait_for_turn()
        order.append(number)
        rounds.note()

    await asyncio.gather(*map(go_on, range(30)))
    assert order == list(range(30))
    assert rounds.most <= 4
    rounds.close()


@asynchronous
async def test_a_single_call_does_not_wait() -> None:
    turns = Turns(at_once=1)
    for _ in range(3):
        taking = turns.wait_for_turn()
        with contextlib.suppress(StopIteration):
            taking.send(None)
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@asynchronous
async def test_one_that_gives_up_takes_no_turn() -> None:
    turns = Turns(at_once=1)
    tasks = [asyncio.ensure_future(turns.wait_for_turn()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(turns.wait_for_turn(), 5)


@asynchronous
async def test_readers_of_one_wave_are_woken_in_parts() -> None:
    wake_ups, rounds = WakeUps(clock=float, cpu_clock=float, wait_clock=float), await Rounds.start()

    async def read() -> None:
        waiter = asyncio.get_running_loop().create_future()
        wake_ups.add_waiter(waiter)
        await waiter
        rounds.note()

    await asyncio.gather(*(read() for _ in range(3 * WOKEN_AT_ONCE)))
    assert 0 < rounds.most <= WOKEN_AT_ONCE
    rounds.close()


class Reader:
    """Count the attempts that end."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.num_ended = 0

    def on_leg_delta(self, item: LegDelta) -> None:
        assert item.node_lost
        self.num_ended += 1
        self._rounds.note()

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        raise AssertionError


@asynchronous
async def test_the_attempts_of_a_lost_node_end_in_parts() -> None:
    rounds = await Rounds.start()
    _, decode = join_pair(make_pool())
    reader = Reader(rounds)
    for epoch in range(300):
        decode.node.open_leg(f"r{epoch}", epoch, reader, LegWork(num_tokens=1))
    decode.leave()
    await until(lambda: reader.num_ended == 300)
    assert rounds.most <= node.LEGS_AT_ONCE
    rounds.close()


class RoomyScene(Scene):
    """A router whose nodes take any number of calls."""

    def join(self, letter: str, number: int, *, incarnation: int = 0) -> HandNode:
        role = NodeRole.PREFILL if letter == "p" else NodeRole.DECODE
        registration = make_registration(f"{letter}{number}", role, incarnation=incarnation)
        return HandNode(self.pool, dataclasses.replace(registration, num_blocks=10**6))


def count_commands(hand: HandNode, rounds: Rounds) -> None:
    """Note each call that is placed on a node."""
    real = hand.node.send

    def send(command: object) -> None:
        if isinstance(command, DecodeCommand):
            rounds.note()
        real(command)  # type: ignore[arg-type]

    hand.node.send = send


@asynchronous
async def test_calls_of_a_lost_node_are_placed_anew_a_few_at_a_time() -> None:
    """Regression: the loop stood still until all of them had been placed: for 1.5 s with 2,048."""
    options = RetryOptions(first_pause_s=0.0, longest_pause_s=0.0)
    scene = RoomyScene(options=options, num_decode=2)
    params = SamplingParams(max_tokens=20, seed=1)

    async def run(name: str) -> int:
        outputs = scene.dispatcher.run(scene.make(name, params))
        async with contextlib.aclosing(outputs):
            return sum([len(output.token_ids) async for output in outputs])

    calls = [asyncio.ensure_future(run(f"r{number}")) for number in range(NUM_CALLS)]
    await until(lambda: scene.prefill.node.num_open == NUM_CALLS)
    lost = max(scene.decodes, key=lambda one: one.node.num_open)
    left = next(one for one in scene.decodes if one is not lost)
    rounds, num_before = await Rounds.start(), len(left.of(DecodeCommand))
    count_commands(left, rounds)
    assert lost.node.num_open > TURNS_AT_ONCE
    num_lost = lost.node.num_open
    lost.leave()
    await until(lambda: len(left.of(DecodeCommand)) == num_before + num_lost)
    assert 0 < rounds.most <= TURNS_AT_ONCE
    rounds.close()
    for command in scene.prefill.of(PrefillCommand):
        finish = FinishReason.LENGTH
        scene.prefill.say(token(command.request_id, 0, 1, epoch=command.epoch, finish=finish))
    assert await asyncio.gather(*calls) == [1] * NUM_CALLS
    scene.assert_no_leg_is_left()
