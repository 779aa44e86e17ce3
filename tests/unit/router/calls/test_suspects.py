"""Test requests that kill nodes, and innocent requests that happen to be there (ADR 0066)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from typing import TypeVar

import pytest

from baton.api.errors import NotFoundError, PoisonRequestError, RequestCancelledError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import DecodeCommand, NodeRole, PrefillCommand
from router.calls.dispatcher import Dispatcher
from router.calls.recovery.recovery import Recoveries
from router.calls.recovery.retry_budget import RetryOptions
from router.calls.recovery.suspects import (
    MAX_HISTORIES,
    MAX_OPEN_VERDICTS,
    MAX_QUARANTINED,
    Suspects,
    Verdict,
)
from router.fleet.lost_nodes import Loss, LostNodes
from router.fleet.node import LegDelta, LegWork
from router.policies.least_tokens import LeastTokens
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration, token
from tests.fakes.router.router_scene import Scene, asynchronous
from tests.fakes.time.virtual_clock import VirtualClock

Command = TypeVar("Command")

KILLER, BYSTANDERS = [666], 24
MAX_TOKENS = 40
PAUSE_S, RETURN_S = 0.2, 0.3


class Cluster:
    """Two prefill and eight decode nodes that compute a token of each of their requests now and
    then; a decode node that computes the killer's ends."""

    def __init__(self, *, kills_at: int, role: NodeRole = NodeRole.DECODE) -> None:
        self.pool = make_pool()
        self.pool.lost_nodes = LostNodes(return_s=RETURN_S)
        pairs = [join_pair(self.pool, number) for number in range(8)]
        self.prefills, self.decodes = [p for p, _ in pairs], [d for _, d in pairs]
        for prefill in self.prefills:
            for decode in self.decodes:
                prefill.reach(decode)
        options = RetryOptions(trial_pause_s=PAUSE_S, first_pause_s=0.001, longest_pause_s=0.01)
        self.dispatcher = Dispatcher(self.pool, LeastTokens(), Recoveries(self.pool, options))
        self.kills_at, self.role = kills_at, role
        self.num_killed = 0
        self._num_seen: Counter[str] = Counter()
        self._running: list[tuple[HandNode, DecodeCommand, int]] = []

    def step(self) -> None:
        """Compute every prompt that came, and a token of every request that decodes."""
        for hand in self.prefills:
            for command in self._new(hand, PrefillCommand):
                if not self._kills(hand, command, 0):
                    index = len(command.output_token_ids)
                    hand.say(token(command.request_id, index, index, epoch=command.epoch))
        running, self._running = self._running, []
        for hand, decode, index in running:
            if hand.node not in self.pool.nodes or self._kills(hand, decode, index):
                continue
            is_last = index == MAX_TOKENS - 1
            finish = FinishReason.LENGTH if is_last else None
            hand.say(token(decode.request_id, index, index, epoch=decode.epoch, finish=finish))
            if not is_last and decode.epoch in hand.node.legs:
                self._running.append((hand, decode, index + 1))
        for hand in self.decodes:
            for decode in self._new(hand, DecodeCommand):
                self._running.append((hand, decode, len(decode.output_token_ids) + 1))

    def _new(self, hand: HandNode, kind: type[Command]) -> list[Command]:
        """Commands that the node has not seen yet."""
        num_seen = self._num_seen[hand.engine_id]
        found = hand.of(kind)
        self._num_seen[hand.engine_id] = len(found)
        return found[num_seen:]

    def _kills(self, hand: HandNode, command: PrefillCommand | DecodeCommand, index: int) -> bool:
        role = hand.node.registration.role
        kills = command.prompt_token_ids == KILLER and role is self.role and index >= self.kills_at
        if kills and hand.node in self.pool.nodes:
            self.num_killed += 1
            hand.leave()
        return kills

    async def run(self, *prompts: list[int]) -> list[BaseException | None]:
        """Calls to their ends; what each raised."""
        calls = [
            asyncio.create_task(self._call(f"{number}", prompt))
            for number, prompt in enumerate(prompts)
        ]
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.001)
            self.step()
        return [call.exception() for call in calls]

    async def _call(self, request_id: str, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
        call = dataclasses.replace(Scene.make(request_id, params), prompt_token_ids=prompt)
        async with contextlib.aclosing(self.dispatcher.run(call)) as outputs:
            token_ids = [t async for one in outputs for t in one.token_ids]
        assert token_ids == list(range(MAX_TOKENS))


def bystanders() -> list[list[int]]:
    return [[number] for number in range(1, BYSTANDERS + 1)]


@pytest.mark.parametrize(
    ("kills_at", "role", "most"),
    [
        (1, NodeRole.DECODE, 2),
        (4, NodeRole.DECODE, 2),
        (20, NodeRole.DECODE, 3),
        (0, NodeRole.PREFILL, 2),
    ],
)
def test_a_request_that_ends_its_nodes_is_ended_and_the_others_go_on(
    kills_at: int, role: NodeRole, most: int
) -> None:
    @asynchronous
    async def run() -> None:
        cluster = Cluster(kills_at=kills_at, role=role)
        killer, *others = await cluster.run(KILLER, *bystanders())
        assert isinstance(killer, PoisonRequestError)
        assert others == [None] * BYSTANDERS
        assert cluster.num_killed <= most
        # The same again, under another name, reaches no node; others do.
        again, *others = await cluster.run(KILLER, *bystanders())
        assert isinstance(again, PoisonRequestError)
        assert "it is refused for" in str(again)
        assert others == [None] * BYSTANDERS
        assert cluster.num_killed <= most
        assert not cluster.dispatcher.recoveries.suspects._tried

    run()


@asynchronous
async def test_a_request_whose_nodes_die_at_once_with_others_is_not_ended() -> None:
    """Keep a request whose two nodes die of something else."""
    scene = Scene(options=RetryOptions(trial_pause_s=0.1), num_prefill=1, num_decode=3)
    await scene.call(params=SamplingParams(max_tokens=4, seed=1))
    for number in range(2):
        hand = await _found_with_leg(scene.decodes)
        scene.prefill.say(token("a", number, number, epoch=scene.epoch))
        await scene.pause()
        hand.leave()
        scene.join("d", 8, incarnation=number).leave()
        await scene.pause()
    hand = await _found_with_leg(scene.decodes)
    epoch = scene.epoch
    scene.prefill.say(token("a", 2, 2, epoch=epoch))
    hand.say(token("a", 3, 3, epoch=epoch, finish=FinishReason.LENGTH))
    await scene.end()
    assert scene.dispatcher.recoveries.suspects.quarantined == []


async def _found_with_leg(hands: list[HandNode]) -> HandNode:
    while (hand := _hand_with_leg(hands)) is None:  # noqa: ASYNC110  # it is in other objects
        await asyncio.sleep(0.005)
    return hand


def _hand_with_leg(hands: list[HandNode]) -> HandNode | None:
    return next((hand for hand in hands if hand.node.legs and hand.node in hand.pool.nodes), None)


OPTIONS = RetryOptions(first_pause_s=0.001, longest_pause_s=0.002)
PARAMS = SamplingParams(max_tokens=20, seed=1)


class Trial:
    """One call on trial, whose decode node died when the call had begun there.

    To let lost nodes be away for longer, add seconds to ``later_s``.
    """

    def __init__(
        self, *, return_s: float = RETURN_S, num_decode: int = 4, pause_s: float = 0.02
    ) -> None:
        options = dataclasses.replace(OPTIONS, trial_pause_s=pause_s)
        self.later_s = 0.0
        self.scene = Scene(options=options, num_prefill=1, num_decode=num_decode)
        self.scene.pool.lost_nodes = LostNodes(lambda: time.monotonic() + self.later_s, return_s)
        recoveries = Recoveries(self.scene.pool, options)
        self.scene.dispatcher = Dispatcher(self.scene.pool, LeastTokens(), recoveries)
        self.suspects = self.scene.dispatcher.recoveries.suspects

    async def begin(self, timeout_s: float = 60.0) -> HandNode:
        """Send the call and lose its first node; returns the node on which it is tried."""
        await self.scene.call(params=PARAMS, timeout_s=timeout_s)
        (await self.compute(0)).leave()
        return await self.compute(1)

    async def compute(self, index: int) -> HandNode:
        """Have the prefill node send the next token; returns the decode node that goes on."""
        hand = await _found_with_leg(self.scene.decodes)
        self.scene.prefill.say(token("a", index, index, epoch=self.scene.epoch))
        await self.scene.pause()
        return hand

    async def finish(self, index: int) -> None:
        """Have the call succeed."""
        hand = await self.compute(index)
        epoch = self.scene.epoch
        for number in range(index + 1, 20):
            finish = FinishReason.LENGTH if number == 19 else None
            hand.say(token("a", number, number, epoch=epoch, finish=finish))
            await self.scene.pause()
        await self.scene.end()
        assert self.scene.token_ids == list(range(20))
        assert self.suspects.quarantined == []


@asynchronous
async def test_a_node_that_dies_in_a_trial_alone_and_is_replaced_is_proof() -> None:
    trial = Trial(return_s=60)
    hand = await trial.begin()
    hand.leave()
    await asyncio.sleep(0.1)
    assert trial.scene.task is not None
    assert not trial.scene.task.done()  # the node's link may have broken
    again = make_registration(hand.node.name, NodeRole.DECODE, incarnation=1)
    HandNode(trial.scene.pool, again)
    with pytest.raises(PoisonRequestError, match="was being computed on 2 nodes when they died"):
        await trial.scene.end()


@asynchronous
async def test_a_link_that_breaks_in_a_trial_and_comes_back_proves_nothing() -> None:
    trial = Trial(return_s=60)
    hand = await trial.begin()
    hand.leave()
    await trial.scene.pause()
    trial.scene.decodes.append(HandNode(trial.scene.pool, hand.node.registration))
    trial.scene.prefill.reach(trial.scene.decodes[-1])
    await trial.finish(2)


@asynchronous
async def test_a_node_that_comes_back_frees_who_was_suspected() -> None:
    """Break two links for a moment, one after the other."""
    trial = Trial(return_s=60, pause_s=30)
    await trial.scene.call(params=PARAMS)
    for index in range(2):
        hand = await trial.compute(index)
        hand.leave()
        await trial.scene.pause()
        trial.scene.decodes.append(HandNode(trial.scene.pool, hand.node.registration))
        trial.scene.prefill.reach(trial.scene.decodes[-1])
        await _found_with_leg(trial.scene.decodes)
        assert not trial.suspects.rooms  # the call was placed at once
    await trial.finish(2)


@asynchronous
async def test_a_node_that_dies_with_others_on_it_proves_nothing() -> None:
    trial = Trial(num_decode=3)
    hand = await trial.begin()
    hand.node.open_leg("other", 99, _Nobody(), LegWork(num_tokens=10))
    hand.leave()
    await trial.finish(2)


@asynchronous
async def test_what_dies_at_other_work_proves_nothing() -> None:
    """A prefill node dies at a prompt, and then a decode node at the same request's tokens."""
    trial = Trial()
    scene = trial.scene
    scene.prefills.append(scene.join("p", 1))
    scene.connect()
    await scene.call(params=PARAMS)
    first = next(hand for hand in scene.prefills if hand.node.legs)
    first.leave()
    scene.prefill = next(hand for hand in scene.prefills if hand is not first)
    (await trial.compute(0)).leave()
    await trial.finish(1)


@asynchronous
async def test_while_other_nodes_die_one_trial_is_no_proof_and_two_are() -> None:
    trial = Trial(return_s=0.05)
    trial.scene.join("d", 8).leave()
    hand = await trial.begin()
    hand.leave()
    hand = await trial.compute(2)
    assert trial.suspects.quarantined == []
    hand.leave()
    with pytest.raises(PoisonRequestError, match="on 3 nodes when they died"):
        await trial.scene.end()


@asynchronous
async def test_who_is_gone_before_it_is_known_is_judged_all_the_same() -> None:
    trial = Trial(return_s=60)
    hand = await trial.begin()
    hand.leave()
    await trial.scene.pause()
    trial.scene.dispatcher.abort("a", "its client left")
    with pytest.raises(RequestCancelledError):
        await trial.scene.end()
    assert trial.suspects.quarantined == []
    trial.later_s = 60
    with pytest.raises(PoisonRequestError):
        trial.suspects.check(Scene.make(params=PARAMS))


@asynchronous
async def test_a_node_that_comes_back_too_late_ends_the_quarantine() -> None:
    trial = Trial(return_s=0.05)
    hand = await trial.begin()
    hand.leave()
    with pytest.raises(PoisonRequestError):
        await trial.scene.end()
    assert refused(trial.suspects, [1, 2, 3], sampling_params=PARAMS)
    HandNode(trial.scene.pool, hand.node.registration)
    assert trial.suspects.quarantined == []
    assert not refused(trial.suspects, [1, 2, 3], sampling_params=PARAMS)


class _Nobody:
    def on_leg_delta(self, item: LegDelta) -> None:
        pass

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        pass


@asynchronous
async def test_a_node_that_an_operator_removes_is_nobodys_fault() -> None:
    scene = Scene(options=RetryOptions(trial_pause_s=60), num_prefill=1, num_decode=3)
    await scene.call()
    for _ in range(2):
        hand = _hand_with_leg(scene.decodes)
        assert hand is not None
        scene.pool.expel(hand.node.name)
        await scene.pause()
    assert _hand_with_leg(scene.decodes) is not None  # at once: nobody is under suspicion


def make_suspects(clock: VirtualClock) -> Suspects:
    return Suspects(make_pool(clock=clock), quarantine_s=60)


LOSS = Loss(0.0, "d0-0", "d0", num_open=1)


def refused(suspects: Suspects, prompt: list[int], **changes: object) -> bool:
    call = dataclasses.replace(Scene.make(), prompt_token_ids=prompt, **changes)  # type: ignore[arg-type]
    try:
        suspects.check(call)
    except PoisonRequestError:
        return True
    return False


def test_only_the_like_of_it_is_refused_and_only_for_a_while() -> None:
    clock = VirtualClock()
    suspects = make_suspects(clock)
    call = Scene.make()
    suspects.quarantine(call, suspects.fingerprint(call), LOSS)
    other_seed = dataclasses.replace(call.sampling_params, seed=99)
    assert refused(suspects, [1, 2, 3])
    assert refused(suspects, [1, 2, 3], request_id="other", sampling_params=other_seed)
    assert not refused(suspects, [1, 2, 4])
    hot = dataclasses.replace(call.sampling_params, temperature=0.5)
    assert not refused(suspects, [1, 2, 3], sampling_params=hot)
    other = dataclasses.replace(call.terms.principal, tenant="other")
    of_other = dataclasses.replace(call.terms, principal=other)
    assert not refused(suspects, [1, 2, 3], terms=of_other)
    (one,) = suspects.quarantined
    assert one.num_refused == suspects.num_refused_total == 2
    clock.advance(61)
    assert suspects.quarantined == []
    assert not refused(suspects, [1, 2, 3])


def test_operators_release_one_or_all() -> None:
    suspects = make_suspects(VirtualClock())
    for number in range(3):
        call = dataclasses.replace(Scene.make(), prompt_token_ids=[number])
        suspects.quarantine(call, suspects.fingerprint(call), LOSS)
    first = suspects.quarantined[0].fingerprint
    assert suspects.release(first[:12]) == 1
    with pytest.raises(NotFoundError, match="nothing is quarantined as"):
        suspects.release(first)
    assert suspects.release("") == 2
    assert suspects.quarantined == []


def test_what_is_remembered_is_bounded() -> None:
    suspects = make_suspects(VirtualClock())
    call = Scene.make()
    for number in range(MAX_HISTORIES + 10):
        loss = Loss(0.0, f"d{number}", "d", num_open=1)
        suspects.note_lost_with(f"{number}", [loss])
        suspects.admit(loss)
        if number < MAX_QUARANTINED + 10:
            suspects.quarantine(call, f"{number}", loss)
            suspects.keep_open(Verdict(call, f"{number}", loss, 1))
    assert len(suspects.quarantined) == MAX_QUARANTINED
    assert len(suspects._lost_with) == MAX_HISTORIES
    assert len(suspects._num_suspects) <= MAX_HISTORIES + 1
    assert len(suspects._open_verdicts) <= MAX_OPEN_VERDICTS
