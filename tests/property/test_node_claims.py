"""Whatever a node says on its link: the router reckons with nothing that cannot be, no other node's
requests notice, and nothing but that one link ends."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.errors import BatonError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link import wire
from baton.link.words import DecodeTime, NodeBeat, NodeRole, PeerReport, StepTime
from baton.v1 import node_pb2, types_pb2
from router.fleet.node import LegWork, Node
from router.fleet.node_claims import registration_problem
from tests.fakes.router.nodes import HandNode, make_registration, token, token_1
from tests.fakes.router.router_scene import Scene, assert_idle
from tests.property.num_examples import num_examples

UINT32 = st.sampled_from([0, 1, 2, 5, 99, 999, 1000, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
UINT64 = st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
FLOAT = st.sampled_from([0.0, -1.0, 1e-9, 1e300, math.inf, -math.inf, math.nan]) | st.floats()
FLOAT32 = st.floats(width=32)
TEXT = st.sampled_from(["", "a", "p0-0", "d0-0", "bad-0", "long"]).map(
    lambda text: text if text != "long" else "x" * 70_000
) | st.text(max_size=20)
EPOCH = 7  # of the only attempt


EPOCHS = st.sampled_from([EPOCH, EPOCH, EPOCH - 1]) | UINT32
LOGPROBS = st.builds(
    types_pb2.TokenLogprobs,
    logprob=FLOAT32,
    top_token_ids=st.lists(UINT32, max_size=3),
    top_logprobs=st.lists(FLOAT32, max_size=3),
)
PREFILL = st.builds(
    types_pb2.PrefillReceipt,
    queue_s=FLOAT,
    prefill_s=FLOAT,
    num_chunks=UINT32,
    num_computed_tokens=UINT32,
    num_cached_tokens=UINT32,
    encoder_s=FLOAT,
    pixels_wait_s=FLOAT,
)
PUSH = st.builds(
    types_pb2.PushReceipt,
    num_bytes=UINT64,
    num_blocks=UINT32,
    transport=TEXT,
    exposed_transfer_s=FLOAT,
)
DECODE = st.builds(
    types_pb2.DecodeReceipt,
    parked_s=FLOAT,
    first_step_s=FLOAT,
    num_forwards=UINT32,
    push=PUSH,
    num_drafts=UINT32,
    num_accepted_drafts=UINT32,
)
ERROR = st.builds(
    node_pb2.RequestError,
    code=st.sampled_from(["UNAVAILABLE", "INTERNAL", "PREEMPTED", "INVALID_ARGUMENT"]) | TEXT,
    message=TEXT,
)
DELTA = st.builds(
    node_pb2.RequestDelta,
    request_id=st.sampled_from(["bad", "good", ""]) | TEXT,
    epoch=EPOCHS,
    output_index=UINT32,
    token_ids=st.lists(UINT32, max_size=3),
    finish_reason=st.integers(0, 5),
    prefill=st.none() | PREFILL,
    decode=st.none() | DECODE,
    error=st.none() | ERROR,
    logprobs=st.lists(LOGPROBS, max_size=3),
    prompt_logprobs=st.lists(LOGPROBS, max_size=3),
)
STEP = st.builds(
    node_pb2.StepDeltas,
    deltas=st.lists(DELTA, max_size=3),
    epochs=st.lists(EPOCHS, max_size=4),
    output_indexes=st.lists(UINT32, max_size=4),
    token_ids=st.lists(UINT32, max_size=4),
)
BEAT = st.builds(
    node_pb2.NodeBeat,
    num_waiting=UINT32,
    num_waiting_for_remote_kvs=UINT32,
    num_running=UINT32,
    num_free_blocks=UINT32,
    num_quarantined_blocks=UINT32,
    num_transfers=UINT32,
    serving_state=st.integers(0, 4),
    num_uncomputed_tokens=UINT32,
    num_rounds=UINT64,
    stalled_s=FLOAT,
    longest_round_s=FLOAT,
    stalled_thread=TEXT,
)
REPORT = st.builds(
    node_pb2.PeerReport,
    engine_id=TEXT,
    connected=st.booleans(),
    transport=TEXT,
    problem=TEXT,
    bandwidth_bytes_per_s=FLOAT,
)
EVENTS = st.builds(
    node_pb2.KVCacheEvents,
    sequence=UINT64,
    snapshot=st.booleans(),
    stored=st.lists(UINT64, max_size=5),
    removed=st.lists(UINT64, max_size=5),
)
# Of every kind, with any values; many name the attempt that is open.
MESSAGES = st.one_of(
    st.builds(node_pb2.NodeMessage, deltas=STEP),
    st.builds(node_pb2.NodeMessage, beat=BEAT),
    st.builds(node_pb2.NodeMessage, peer_report=REPORT),
    st.builds(node_pb2.NodeMessage, kv_events=EVENTS),
)


def begin(scene: Scene) -> None:
    """Have the next attempt be the one that `MESSAGES` speaks of."""
    logging.getLogger("router").setLevel(logging.CRITICAL)
    scene.dispatcher.epochs = itertools.count(EPOCH)


def say(hand: HandNode, message: node_pb2.NodeMessage) -> None:
    """Hand a message to the pool, as `NodeLinkService` does."""
    event = wire.node_event_from_proto(message)
    if event is not None:
        hand.pool.on_event(hand.node, event)


def assert_sane(node: Node) -> None:
    """Check that all that a policy reads of a node is a number within its limits."""
    load = node.load
    for value in (
        load.prefill_queue_s,
        load.prefill_base_s,
        load.prefill_s_per_unit,
        load.step_base_s,
        load.step_s_per_unit,
        load.num_free_tokens,
        load.shared.output_tokens,
        load.shared.long_output_tokens,
        load.shared.kv_bytes_per_token,
    ):
        assert math.isfinite(value)
    assert load.shared.output_tokens <= 1000
    assert load.shared.long_output_tokens <= 1000
    assert load.num_free_tokens <= load.num_blocks * load.block_size


@settings(max_examples=num_examples(80), deadline=None)
@given(data=st.data(), role=st.sampled_from(NodeRole))
def test_whatever_a_node_says_no_other_nodes_request_notices(
    data: st.DataObject, role: NodeRole
) -> None:
    async def run() -> None:
        scene = Scene(num_prefill=1, num_decode=1)
        begin(scene)
        good = (scene.prefill, scene.decode)
        await scene.call("good", SamplingParams(max_tokens=4, seed=1))
        epoch = EPOCH
        assert scene.epoch == epoch
        bad = HandNode(scene.pool, make_registration("bad", role))
        if role is NodeRole.DECODE:
            scene.prefill.reach(bad)
        else:
            bad.reach(scene.decode)
        # A request of its own is there, too.
        bad.node.open_leg("bad", EPOCH - 1, _Deaf(), LegWork(num_tokens=10))
        scene.prefill.say(token_1("good", 0, epoch=epoch))
        for index in range(1, 4):
            for message in data.draw(st.lists(MESSAGES, max_size=3)):
                say(bad, message)
            finish = FinishReason.LENGTH if index == 3 else None
            scene.decode.say(token("good", index, index, epoch=epoch, finish=finish))
            await scene.pause()
        await scene.end()
        assert scene.token_ids == [0, 1, 2, 3]
        for hand in good:
            assert hand.node in scene.pool.nodes
            assert_sane(hand.node)
            assert_idle(hand)
        for node in scene.pool.nodes:
            assert_sane(node)
        assert set(scene.decode.node.reports) <= {"p0-0", "bad-0"}
        assert 2 <= scene.pool.max_model_len <= 1000
        scene.pool.prefix_index.check()

    asyncio.run(asyncio.wait_for(run(), 30))


class _Deaf:
    """Reads what a node says of its own request, and nothing comes of it."""

    def on_leg_delta(self, item: object) -> None:
        pass

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        pass


@settings(max_examples=num_examples(80), deadline=None)
@given(data=st.data(), says_it=st.sampled_from(["prefill", "decode"]))
def test_whatever_a_node_says_of_its_own_request_ends_it_well_or_with_an_error(
    data: st.DataObject, says_it: str
) -> None:
    async def run() -> None:
        scene = Scene(num_prefill=1, num_decode=1)
        begin(scene)
        await scene.call("good", SamplingParams(max_tokens=4, seed=1))
        hand = scene.prefill if says_it == "prefill" else scene.decode
        for message in data.draw(st.lists(MESSAGES, min_size=1, max_size=5)):
            say(hand, message)
            await scene.pause()
        assert scene.task is not None
        if not scene.task.done():
            scene.task.cancel()
        (error,) = await asyncio.gather(scene.task, return_exceptions=True)
        assert error is None or isinstance(error, BatonError | asyncio.CancelledError)
        assert len(scene.token_ids) <= 4
        for node in scene.pool.nodes:
            assert_sane(node)
            assert node.legs == {}

    asyncio.run(asyncio.wait_for(run(), 30))


def test_one_nodes_word_on_a_tokens_size_is_not_everybodys() -> None:
    scene = Scene(num_prefill=2, num_decode=2)
    for number, size in enumerate((100.0, 100.0, 1e9)):
        registration = make_registration(f"n{number}", NodeRole.DECODE)
        HandNode(scene.pool, dataclasses.replace(registration, kv_bytes_per_token=size))
    assert scene.decode.node.load.shared.kv_bytes_per_token == 100


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (((64, 0.1), (1, 0.2)), "num_tokens must rise and be 1 to 67108864, got 1"),
        (((0, 0.1), (1, 0.2)), "num_tokens must rise and be 1 to 67108864, got 0"),
        (((1, math.nan),), "seconds must be above 0 and at most 1000000000"),
        (((1, 0.0),), "seconds must be above 0 and at most 1000000000"),
        (tuple((n, 0.1) for n in range(1, 18)), "must be at most 16, got 17"),
        (((1, 0.01), (64, 1e-9)), ""),  # unlikely, and not wrong
    ],
)
def test_step_times_that_cannot_be_are_refused(
    times: tuple[tuple[int, float], ...], problem: str
) -> None:
    registration = make_registration("n", NodeRole.PREFILL)
    step_times = tuple(StepTime(*one) for one in times)
    told = registration_problem(dataclasses.replace(registration, step_times=step_times))
    assert told == (f"step_times: {problem}" if problem else "")


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (((0, 1, 0.1),), "num_requests must be 1 to 16777216, got 0"),
        (((1, 2**27, 0.1),), "num_context_tokens must be 0 to 67108864, got 134217728"),
        (((1, 1, math.inf),), "seconds must be above 0 and at most 1000000000"),
        (((1, 1, 0.1),) * 17, "must be at most 16, got 17"),
        (((1, 0, 0.1), (1, 0, 0.2)), ""),  # useless, and not wrong
    ],
)
def test_decode_times_that_cannot_be_are_refused(
    times: tuple[tuple[int, int, float], ...], problem: str
) -> None:
    registration = make_registration("n", NodeRole.DECODE)
    decode_times = tuple(DecodeTime(*one) for one in times)
    told = registration_problem(dataclasses.replace(registration, decode_times=decode_times))
    assert told == (f"decode_times: {problem}" if problem else "")


def test_a_bad_value_is_told_in_one_line() -> None:
    scene = Scene()
    pool = scene.pool
    pool.on_event(scene.prefill.node, NodeBeat(num_free_blocks=11))
    pool.on_event(scene.decode.node, PeerReport("p0-0", True, bandwidth_bytes_per_s=math.nan))
    assert pool.nodes == []
    assert scene.prefill.is_hung_up
    assert scene.decode.is_hung_up


def test_tokens_beyond_the_last_one_are_no_part_of_the_answer() -> None:
    async def run() -> None:
        for early in (False, True):
            scene = Scene()
            await scene.call("good", SamplingParams(max_tokens=3, seed=1))
            epoch = scene.epoch
            scene.prefill.say(token_1("good", 0, epoch=epoch))
            for index in range(9, 0, -1) if early else range(1, 10):
                scene.decode.say(token("good", index, index, epoch=epoch))
            await scene.pause()
            with pytest.raises(BatonError, match="decode: said tokens that nobody asked for"):
                await scene.end()
            assert scene.token_ids == ([0] if early else [0, 1, 2])

    asyncio.run(asyncio.wait_for(run(), 30))
