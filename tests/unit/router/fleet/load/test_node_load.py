"""Unit tests of NodeLoad: counted work, corrections by the node's beats, and measured times."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from baton.api.outputs import FinishReason, RequestDelta
from baton.link.words import DecodeTime, NodeBeat, NodeRole, StepTime
from router.fleet.load.node_load import REQUEST_UNITS, STEPS_MEASURED_TOGETHER, NodeLoad
from router.fleet.node import LegWork
from tests.fakes.router.fleets import FleetBook
from tests.fakes.router.nodes import (
    DECODE_RECEIPT,
    PREFILL_RECEIPT,
    join_pair,
    make_pool,
    make_registration,
    token,
    token_1,
)


@pytest.fixture
def book() -> FleetBook:
    return FleetBook(2, 2)


def queue_tokens(load: NodeLoad, num_requests: int) -> float:
    """Tokens that a queue stands for, besides so much per request."""
    return (load.prefill_queue_s - num_requests * load.prefill.base) / load.prefill.per_unit


def test_prompts_that_are_open_are_a_queue_until_they_are_computed(book: FleetBook) -> None:
    load = book["p0"]
    assert load.prefill_queue_s == 0
    long = load.note_opened(1000, num_uncomputed=1000)
    short = load.note_opened(500, num_uncomputed=500)
    assert queue_tokens(load, 2) == pytest.approx(1500)
    load.note_computed(long)
    assert queue_tokens(load, 1) == pytest.approx(500)
    load.note_closed(long)
    load.note_closed(short)
    assert (load.prefill_queue_s, load.num_open_requests, load.num_open_tokens) == (0, 0, 0)


def test_what_a_node_reports_beyond_that_is_in_the_queue_too(book: FleetBook) -> None:
    """Other routers' requests, or a prompt that was thought to be cached."""
    load = book["p0"]
    load.note_opened(100, num_uncomputed=100)
    load.note_beat(NodeBeat(num_uncomputed_tokens=900))
    assert queue_tokens(load, 1) == pytest.approx(900)
    load.note_beat(NodeBeat(num_uncomputed_tokens=10))  # it has not seen ours yet, or has begun
    assert queue_tokens(load, 1) == pytest.approx(100)


def test_room_is_what_is_free_without_what_is_on_its_way(book: FleetBook) -> None:
    load = book["d0"]
    total = load.num_blocks * load.block_size
    assert load.num_free_tokens == total
    account = load.note_opened(1200, num_arriving=1000)
    assert load.num_free_tokens == total - 1000
    load.note_begun(account)
    load.note_beat(NodeBeat(num_running=1, num_free_blocks=100))
    assert load.num_free_tokens == 1600
    load.note_closed(account)
    assert load.num_batch == 0


def test_a_request_that_ended_is_no_longer_in_the_batch_and_other_routers_requests_are(
    book: FleetBook,
) -> None:
    """The last beat counted both, and the next beat comes a quarter of a second later."""
    load = book["d0"]
    account = load.note_opened(1200, num_arriving=1000)
    load.note_beat(NodeBeat(num_running=3, num_free_blocks=100))
    assert load.num_batch == 3
    load.note_closed(account)
    assert load.num_batch == 2
    load.note_opened(1200, num_arriving=1000)
    assert load.num_batch == 3


def test_more_context_and_more_requests_make_steps_longer(book: FleetBook) -> None:
    few, many = book["d0"], book["d1"]
    few.note_opened(1200, num_arriving=1000)
    for _ in range(5):
        many.note_opened(220, num_arriving=200)
    assert few.step_units < many.step_units
    assert few.step_base_s < many.step_base_s


def test_prompts_that_share_steps_are_charged_with_the_time_once(book: FleetBook) -> None:
    load = book["p0"]
    for _ in range(2):
        load.note_opened(300, num_uncomputed=300)
    shared_before = load.prefill.num_measured
    before = load.prefill.seconds(300)
    book.now = 1.0
    receipt = type(PREFILL_RECEIPT)(
        queue_s=0, prefill_s=1.0, num_chunks=1, num_computed_tokens=300, num_cached_tokens=0
    )
    load.note_prefilled([receipt, receipt])
    assert load.prefill.num_measured == shared_before + 2
    for _ in range(100):
        book.now += 1.0
        load.note_prefilled([receipt, receipt])
    after = load.prefill.seconds(300)
    assert after > before
    assert after == pytest.approx(0.5, rel=0.05)


def test_turns_of_a_chat_on_a_cpu_are_not_nailed_to_an_estimate_for_gpus(book: FleetBook) -> None:
    """Regression: the line was 200 ms and 0.08 ms per token, so 160 more tokens looked free."""
    load, draw = book["p0"], random.Random(1)
    for number in range(30):
        num_tokens = draw.choice((60, 105, 180, 265))
        seconds = num_tokens * draw.uniform(0.0008, 0.0011)
        seconds *= 1 if number else 8  # cold
        receipt = dataclasses.replace(
            PREFILL_RECEIPT, prefill_s=seconds, num_computed_tokens=num_tokens
        )
        account = load.note_opened(num_tokens, num_uncomputed=num_tokens)
        book.now += seconds
        load.note_prefilled([receipt])
        load.note_closed(account)
        if number == 0:
            assert load.prefill.base + load.prefill.per_unit * 105 < 0.2
    for num_tokens in (105, 265):
        expected_s = load.prefill.base + load.prefill.per_unit * num_tokens
        assert expected_s == pytest.approx(0.00095 * num_tokens, rel=0.25)


def test_a_forecast_has_the_wait_and_the_prompt_beside_what_they_took(book: FleetBook) -> None:
    load = book["p0"]
    first = load.note_opened(1000, num_uncomputed=1000)
    book.now = 0.04
    second = load.note_opened(500, num_uncomputed=500)
    forecasts = first.forecast, second.forecast
    assert forecasts[0] is not None
    assert forecasts[1] is not None
    assert forecasts[0].wait_s == 0.0
    assert forecasts[0].compute_s == pytest.approx(0.11)
    assert forecasts[1].wait_s == pytest.approx(0.11 - 0.04)
    assert forecasts[1].compute_s == pytest.approx(0.06)
    for account, num_tokens, now in ((first, 1000, 0.1), (second, 500, 0.2)):
        book.now = now
        receipt = dataclasses.replace(
            PREFILL_RECEIPT, prefill_s=0.1, num_computed_tokens=num_tokens
        )
        load.note_prefilled([receipt], [account])
        load.note_computed(account)
    assert forecasts[0].measured_wait_s == pytest.approx(0.0)
    assert forecasts[0].measured_compute_s == pytest.approx(0.1)
    assert forecasts[1].measured_wait_s == pytest.approx(0.06)
    assert forecasts[1].measured_compute_s == pytest.approx(0.1)
    assert sum(book.shared.forecasts.pair.first_token.counts) == 2


def test_a_prompt_on_a_decode_node_has_a_forecast_and_one_that_arrives_has_none(
    book: FleetBook,
) -> None:
    load = book["d0"]
    assert load.note_opened(120, num_arriving=100).forecast is None
    account = load.note_opened(120, num_uncomputed=100, num_arriving=100)
    forecast = account.forecast
    assert forecast is not None
    book.now = 0.03
    load.note_begun(account)
    assert forecast.measured_compute_s == pytest.approx(0.03)
    forecasts = book.shared.forecasts
    assert (sum(forecasts.alone.compute.counts), sum(forecasts.pair.compute.counts)) == (1, 0)


@pytest.mark.parametrize("own_s", [0.012, math.inf])
def test_the_way_to_a_decode_node_is_no_part_of_the_time_of_its_prompts(
    book: FleetBook, own_s: float
) -> None:
    """Eight short rests say that the way takes long, and nothing of long prompts."""
    load = book["d0"]
    expected_s = load.prefill.seconds(4000)
    for _ in range(8):
        account = load.note_opened(120, num_uncomputed=20, num_arriving=100)
        book.now += 0.03  # of which the node computes for 0.012
        load.note_begun(account)
        load.note_prompt_time(account, own_s)
        load.note_closed(account)
    assert load.prefill.num_measured == 8
    is_slower = load.prefill.seconds(4000) > 1.2 * expected_s
    assert is_slower == (own_s == math.inf)


def test_prompts_beside_decodes_move_a_factor_and_not_the_line_of_prompts(book: FleetBook) -> None:
    load = book["d0"]
    alone_s = load.prefill.seconds(100)
    decoding = load.note_opened(120, num_arriving=100)
    load.note_begun(decoding)
    for _ in range(20):
        account = load.note_opened(120, num_uncomputed=100, num_arriving=100)
        book.now += 3 * alone_s
        load.note_begun(account)
        load.note_closed(account)
    assert load.prefill.seconds(100) == alone_s
    assert load.beside_factor == pytest.approx(3, rel=0.02)
    beside = load.note_opened(120, num_uncomputed=100, num_arriving=100)
    assert beside.forecast is not None
    assert beside.forecast.compute_s == pytest.approx(3 * alone_s, rel=0.02)
    load.note_closed(beside)
    load.note_closed(decoding)
    alone = load.note_opened(120, num_uncomputed=100, num_arriving=100)
    assert alone.forecast is not None
    assert alone.forecast.compute_s == pytest.approx(alone_s)


def test_a_node_begins_with_the_step_times_that_it_told(book: FleetBook) -> None:
    registration = dataclasses.replace(
        make_registration("p9", NodeRole.PREFILL, max_model_len=10_000),
        step_times=(StepTime(1, 0.02), StepTime(64, 0.085), StepTime(512, 0.535)),
    )
    load = NodeLoad(registration, book.shared, lambda: 0.0)
    for num_tokens in (1, 100, 300, 512, 4096):
        assert load.prefill.seconds(num_tokens) == pytest.approx(0.02 + 0.001 * num_tokens, rel=0.1)


def test_a_step_is_the_time_between_messages_and_a_pause_is_none(book: FleetBook) -> None:
    load = book["d0"]
    account = load.note_opened(120, num_arriving=100)
    load.note_begun(account)
    for _ in range(200):
        book.now += 0.05
        load.note_step()
    load.step.refresh()
    assert load.step.base + load.step.per_unit * load.step_units == pytest.approx(0.05, rel=0.1)
    measured = load.step.num_measured
    load.note_closed(account)
    book.now += 0.5
    load.note_begun(load.note_opened(120, num_arriving=100))
    load.note_step()
    assert load.step.num_measured == measured


def test_a_decode_node_begins_with_the_decode_steps_that_it_told(book: FleetBook) -> None:
    """A batch that was never seen is not expected to cost nothing."""
    registration = dataclasses.replace(
        make_registration("d9", NodeRole.DECODE, max_model_len=10_000),
        decode_times=(
            DecodeTime(1, 64, 0.0151),
            DecodeTime(32, 2048, 0.0486),
            DecodeTime(1, 4096, 0.0192),
        ),
    )
    load = NodeLoad(registration, book.shared, lambda: book.now)
    assert load.step.is_known
    for num_requests in (1, 8, 24, 48):
        expected_s = load.step.seconds((REQUEST_UNITS + 200) * num_requests)
        assert expected_s == pytest.approx(0.014 + 0.0012 * num_requests, rel=0.25)


def test_steps_measured_alone_do_not_hide_what_a_batch_costs(book: FleetBook) -> None:
    registration = dataclasses.replace(
        make_registration("d9", NodeRole.DECODE, max_model_len=10_000),
        decode_times=(DecodeTime(1, 64, 0.0151), DecodeTime(32, 2048, 0.0486)),
    )
    load = NodeLoad(registration, book.shared, lambda: book.now)
    load.note_begun(load.note_opened(300, num_arriving=200))
    for _ in range(400):
        book.now += 2 * 0.0152  # cores are lent: all takes twice as long
        load.note_step()
    load.step.refresh()
    expected_s = load.step.seconds(16 * (REQUEST_UNITS + 200))
    assert expected_s == pytest.approx(2 * (0.014 + 0.0012 * 16), rel=0.25)


def test_one_late_message_does_not_move_the_line_of_steps(book: FleetBook) -> None:
    load = book["d0"]
    load.note_begun(load.note_opened(120, num_arriving=100))
    for number in range(400):
        book.now += 0.9 if number == 300 else 0.05
        load.note_step()
    load.step.refresh()
    assert load.step.seconds(load.step_units) == pytest.approx(0.05, rel=0.1)


def test_what_is_on_its_way_does_not_flatten_the_line_of_steps(book: FleetBook) -> None:
    """Fit step time to decoding requests only: the others placed here make no step longer."""
    load, draw = book["d0"], random.Random(1)
    num_decoding = 0
    for _ in range(400):
        for _ in range(draw.randint(0, 3)):  # these wait for their prompts all the time
            load.note_opened(1000, num_arriving=1000)
        if num_decoding < 30 and draw.random() < 0.2:
            load.note_begun(load.note_opened(1000, num_arriving=1000))
            num_decoding += 1
        book.now += 0.010 + 0.0005 * num_decoding
        load.note_step()
    load.step.refresh()
    assert load.step.base == pytest.approx(0.010, rel=0.05)
    assert load.step.per_unit * (REQUEST_UNITS + 1000) == pytest.approx(0.0005, rel=0.1)


def test_steps_in_which_a_prompt_is_computed_are_not_measured(book: FleetBook) -> None:
    load = book["d0"]
    load.note_begun(load.note_opened(120, num_arriving=100))
    load.note_step()
    load.note_opened(5000, num_uncomputed=5000, num_arriving=5000)
    book.now += 0.4
    load.note_step()
    assert load.step.num_measured == 0


def test_other_routers_requests_make_steps_longer_too(book: FleetBook) -> None:
    load = book["d0"]
    alone = load.step_units
    num_free = load.num_blocks - 10 * 100 // load.block_size
    load.note_beat(NodeBeat(num_running=10, num_free_blocks=num_free))
    assert load.step_units == pytest.approx(alone + 10 * (REQUEST_UNITS + 100), rel=0.02)
    load.note_beat(NodeBeat(num_free_blocks=load.num_blocks))
    assert load.step_units == alone


def test_a_prompt_computed_on_a_decode_node_is_measured_there(book: FleetBook) -> None:
    load = book["d0"]
    account = load.note_opened(120, num_uncomputed=100, num_arriving=100)
    assert load.prefill_queue_s > 0
    book.now += 3.0
    load.note_begun(account)
    assert load.prefill_queue_s == 0
    load.note_closed(account)
    assert load.prefill.num_measured == 1


def test_a_prompt_that_ends_uncomputed_on_a_busy_decode_node_leaves_its_queue(
    book: FleetBook,
) -> None:
    """A client leaves, say, while others decode there."""
    load = book["d0"]
    load.note_begun(load.note_opened(120, num_arriving=100))
    load.note_closed(load.note_opened(5020, num_uncomputed=5000, num_arriving=5000))
    assert (load.prefill_queue_s, load.num_uncomputed_requests) == (0, 0)


def test_a_node_of_low_weight_looks_busier_and_slower(book: FleetBook) -> None:
    light, heavy = book["p0"], book["p1"]
    light.weight = 0.25
    assert light.prefill_s_per_unit == 4 * heavy.prefill_s_per_unit


def test_receipts_teach_the_usual_output_and_how_long_it_takes(book: FleetBook) -> None:
    before = book.shared.output_tokens
    book["d0"].note_decoded(3, 0.5)
    assert book.shared.output_tokens < before
    assert book.shared.residence_s < 4.0


def test_a_pool_feeds_all_of_this_from_what_nodes_say() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)

    class Reader:
        def on_leg_delta(self, item: object) -> None:
            pass

        def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
            pass

    prefill.node.open_leg("a", 1, Reader(), LegWork(num_tokens=30, num_uncomputed=30))
    decode.node.open_leg("a", 1, Reader(), LegWork(num_tokens=40, num_arriving=30))
    arriving = decode.node.load.num_free_tokens
    prefill.say(token_1("a", 5, epoch=1))
    assert prefill.node.load.prefill.num_measured == 1
    decode.say(token("a", 1, 6, epoch=1))
    assert decode.node.load.num_free_tokens == arriving + 30
    for index in range(2, 2 + STEPS_MEASURED_TOGETHER):
        assert decode.node.load.step.num_measured == 0
        decode.say(token("a", index, 7, epoch=1))
    assert decode.node.load.step.num_measured == 1
    pool.on_event(decode.node, NodeBeat(num_uncomputed_tokens=7))
    assert decode.node.load.prefill_queue_s > 0


def test_an_output_is_as_long_as_its_tokens_whatever_steps_they_took() -> None:
    pool = make_pool(max_model_len=1000)
    _, decode = join_pair(pool, max_model_len=1000)

    class Reader:
        def on_leg_delta(self, item: object) -> None:
            pass

        def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
            pass

    shared = decode.node.load.shared
    before = shared.long_output_tokens
    decode.node.open_leg("a", 1, Reader(), LegWork(num_tokens=40, num_arriving=30))
    several = tuple(range(int(before)))
    decode.say(
        RequestDelta("a", 1, several, FinishReason.LENGTH, epoch=1, decode=DECODE_RECEIPT)
    )  # of two forwards
    assert shared.long_output_tokens == 1 + len(several) > before


def test_answers_that_were_cut_do_not_make_long_ones_forgotten(book: FleetBook) -> None:
    load, before = book["d0"], book.shared.long_output_tokens
    load.note_decoded(3, 0.5, is_cut=True)
    assert book.shared.long_output_tokens == before
    load.note_decoded(3, 0.5)
    assert book.shared.long_output_tokens < before


def test_a_line_sees_tokens_and_not_who_shared_a_step(book: FleetBook) -> None:
    """Each of two prompts of a step takes its own time, though both are heard of at once."""
    load = book["p0"]
    draw = random.Random(1)
    for _ in range(200):
        receipts = [
            dataclasses.replace(PREFILL_RECEIPT, prefill_s=9.0, num_computed_tokens=num_tokens)
            for num_tokens in draw.choices((400, 1600), k=draw.randint(1, 2))
        ]
        accounts = [
            load.note_opened(1, num_uncomputed=receipt.num_computed_tokens) for receipt in receipts
        ]
        book.now += sum(0.02 + receipt.num_computed_tokens / 5000 for receipt in receipts)
        load.note_prefilled(receipts)
        for account in accounts:
            load.note_computed(account)
    assert load.prefill.per_unit == pytest.approx(1 / 5000, rel=0.05)
    assert load.prefill.base == pytest.approx(0.02, abs=0.01)


def test_whatever_became_of_requests_nothing_is_left_when_all_are_closed(book: FleetBook) -> None:
    load, draw = book["d0"], random.Random(2)
    empty = (load.step_units, load.num_free_tokens, load.prefill_queue_s)
    accounts = []
    for _ in range(300):
        book.now += draw.random()
        promise = load.promises.open(book.now + 9, 5, book.now) if draw.random() < 0.5 else None
        num_tokens, num_uncomputed = draw.randint(1, 500), draw.choice([0, 70])
        accounts.append(
            load.note_opened(
                num_tokens, num_uncomputed=num_uncomputed, num_arriving=num_tokens, promise=promise
            )
        )
        if draw.random() < 0.3:
            load.note_computed(draw.choice(accounts))
        if draw.random() < 0.5 and (account := draw.choice(accounts)).begun_at is None:
            load.note_begun(account)
        if draw.random() < 0.5:
            load.note_closed(accounts.pop(draw.randrange(len(accounts))))
    for account in accounts:
        load.note_closed(account)
    assert (load.num_open_requests, load.num_open_tokens, load.num_arriving_tokens) == (0, 0, 0)
    assert (load.step_units, load.num_free_tokens, load.prefill_queue_s) == empty
    assert load.promises.slack_s(book.now, 1.0) == math.inf
