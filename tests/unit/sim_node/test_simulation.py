"""Tests of simulated nodes on virtual time: their events and times."""

from __future__ import annotations

import dataclasses

import pytest

from baton.api.outputs import FinishReason
from baton.kv.block_hash import BlockHasher, cache_namespace, shorten
from baton.link.words import AbortAll, SendKVSnapshot
from sim_node.sim_model import output_tokens
from tests.fakes.system.sim_parts import TIMING, VOCAB_SIZE, SimPair


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % VOCAB_SIZE for i in range(length)]


def expected(token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    return output_tokens(token_ids, num_tokens, vocab_size=VOCAB_SIZE)


def test_a_request_takes_the_time_of_the_model_and_gives_the_tokens_of_its_prompt() -> None:
    pair = SimPair()
    pair.send("r", prompt(20), max_tokens=4)
    pair.timers.run()
    whens = [round(when, 6) for when, _ in pair.deltas("r")]
    # 20 ms of prefill; of what was granted at the start all but a quarter has travelled by then.
    assert whens == pytest.approx([0.020, 0.035, 0.045, 0.055])
    assert pair.tokens("r") == expected(prompt(20), 4)
    first, last = pair.deltas("r")[0][1], pair.deltas("r")[-1][1]
    assert first.prefill is not None
    assert (first.prefill.num_computed_tokens, first.prefill.num_cached_tokens) == (20, 0)
    assert first.prefill.prefill_s == pytest.approx(0.020)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.decode is not None
    assert last.decode.push.exposed_transfer_s == pytest.approx(0.005)
    assert last.decode.push.num_bytes == 20 * TIMING.kv_bytes_per_token
    assert (last.decode.parked_s, last.decode.first_step_s) == pytest.approx((0.025, 0.010))
    pair.check_nothing_is_held()


def test_a_cached_prefix_is_neither_computed_nor_sent_again() -> None:
    pair = SimPair(local_prefill_threshold=0)
    pair.send("one", prompt(20), max_tokens=2)
    pair.timers.run(1.0)
    pair.send("two", prompt(16) + [7] * 4, max_tokens=2)
    pair.timers.run(2.0)
    (when, first), (_, last) = pair.deltas("two")
    assert when == pytest.approx(1.004)
    assert first.prefill is not None
    assert (first.prefill.num_computed_tokens, first.prefill.num_cached_tokens) == (4, 16)
    assert last.decode is not None
    assert last.decode.push.num_bytes == 4 * TIMING.kv_bytes_per_token
    assert last.decode.num_cached_tokens == 16


def test_a_cached_prompt_computes_its_last_block_for_the_logits() -> None:
    pair = SimPair(local_prefill_threshold=0)
    for request_id in ("one", "two"):
        pair.send(request_id, prompt(20), max_tokens=2)
        pair.timers.run(pair.timers.now + 1.0)
    receipt = pair.deltas("two")[0][1].prefill
    assert receipt is not None
    assert (receipt.num_computed_tokens, receipt.num_cached_tokens) == (4, 16)


def test_prompts_are_computed_in_chunks_first_come_first_served() -> None:
    pair = SimPair(max_num_batched_tokens=10)
    pair.send("long", prompt(25), max_tokens=2)
    pair.send("short", prompt(4, first=500), max_tokens=2)
    pair.timers.run()
    # Steps of 10, 10, and 5 + 4 tokens.
    assert [pair.deltas(name)[0][0] for name in ("long", "short")] == pytest.approx([0.029] * 2)
    receipts = [pair.deltas(name)[0][1].prefill for name in ("long", "short")]
    assert [receipt and receipt.num_chunks for receipt in receipts] == [3, 1]
    assert receipts[1] is not None
    assert receipts[1].queue_s == pytest.approx(0.020)


def test_attention_over_what_came_before_takes_time() -> None:
    timing = dataclasses.replace(TIMING, prefill_s_per_pair=0.001)
    pair = SimPair(timing=timing, max_num_batched_tokens=2)
    pair.send("r", prompt(4), max_tokens=2)
    pair.timers.run()
    assert pair.deltas("r")[0][0] == pytest.approx(0.004 + 0.001 * (1 + 2 + 3 + 4))


def test_the_second_transfer_waits_for_the_link() -> None:
    pair = SimPair(timing=dataclasses.replace(TIMING, prefill_tokens_per_s=1e6))
    for number in range(2):
        pair.send(str(number), prompt(20, first=100 * number), max_tokens=2)
    pair.timers.run()
    exposed = []
    for number in range(2):
        receipt = pair.deltas(str(number))[-1][1].decode
        assert receipt is not None
        exposed.append(receipt.push.exposed_transfer_s)
    # Layer by layer, both of them in turns.
    assert exposed == pytest.approx([0.035, 0.040], abs=1e-3)


def test_a_batch_makes_one_message_per_step() -> None:
    timing = dataclasses.replace(TIMING, decode_s_per_request=0.001, prefill_tokens_per_s=1e9)
    pair = SimPair(timing=dataclasses.replace(timing, link_bytes_per_s=1e9))
    for number in range(5):
        pair.send(str(number), prompt(8, first=100 * number), max_tokens=21)
    pair.timers.run()
    messages = [(when, event) for when, name, event in pair.events if name == "d"]
    assert max(len(event) for _, event in messages if isinstance(event, tuple)) == 5
    assert messages[10][0] - messages[9][0] == pytest.approx(0.015)
    assert len(messages) <= 22
    pair.check_nothing_is_held()


def test_only_so_many_run_and_the_others_wait() -> None:
    pair = SimPair(max_num_requests=2)
    for number in range(3):
        pair.send(str(number), prompt(4, first=100 * number), max_tokens=10)
    pair.timers.run(0.05)
    assert (pair.nodes["d"].beat().num_running, pair.nodes["d"].beat().num_waiting) == (2, 1)
    pair.timers.run()
    for number in range(3):
        assert pair.tokens(str(number)) == expected(prompt(4, first=100 * number), 10)


def test_a_request_waits_for_room_and_the_prefill_node_keeps_its_blocks() -> None:
    pair = SimPair(num_blocks=7, max_model_len=28)
    pair.send("one", prompt(20), max_tokens=8)  # 5 blocks, and 2 more
    pair.send("two", prompt(12, first=500), max_tokens=4)  # 3 blocks
    pair.timers.run(0.06)
    beat = pair.nodes["d"].beat()
    assert (beat.num_running, beat.num_waiting_for_remote_kvs) == (1, 1)
    assert pair.nodes["p"].beat().num_free_blocks == 4
    pair.timers.run()
    assert pair.tokens("one") == expected(prompt(20), 8)
    assert pair.tokens("two") == expected(prompt(12, first=500), 4)
    pair.check_nothing_is_held()


def test_the_youngest_goes_back_when_an_older_one_needs_its_blocks() -> None:
    pair = SimPair(num_blocks=6, max_model_len=24)
    pair.send("old", prompt(8), max_tokens=16)
    pair.send("young", prompt(7, first=500), max_tokens=16)
    pair.timers.run()
    assert pair.tokens("old") == expected(prompt(8), 16)
    assert pair.errors("young") == ["PREEMPTED"]
    assert pair.tokens("young") == expected(prompt(7, first=500), len(pair.tokens("young")))
    pair.check_nothing_is_held()


def test_another_attempt_goes_on_behind_the_tokens_that_there_are() -> None:
    pair = SimPair()
    told = expected(prompt(10), 3)
    pair.send("r", prompt(10), output=told, max_tokens=6)
    pair.timers.run()
    assert told + pair.tokens("r") == expected(prompt(10), 6)
    assert [delta.output_index for _, delta in pair.deltas("r")] == [3, 4, 5]


def test_tokens_of_another_prompt_are_refused_by_name() -> None:
    pair = SimPair()
    pair.send("r", prompt(10), output=(1, 2), max_tokens=6)
    pair.timers.run()
    assert pair.errors("r") == ["INVALID_ARGUMENT", "INVALID_ARGUMENT"]
    assert pair.tokens("r") == ()


def test_nearly_all_in_the_cache_of_the_decode_node_is_computed_there() -> None:
    pair = SimPair()
    pair.send("first", prompt(16), max_tokens=5)
    pair.timers.run(1.0)
    turn = prompt(16) + list(expected(prompt(16), 5)) + [9, 9]
    pair.send("second", turn, max_tokens=3)
    pair.timers.run(2.0)
    assert pair.tokens("second", "d") == expected(turn, 3)
    # What the prefill node had begun it ends; nobody waits for it.
    assert pair.tokens("second", "p") in ((), expected(turn, 1))
    receipt = pair.deltas("second", "d")[-1][1].decode
    assert receipt is not None
    # 20 of the 21 tokens of the first turn have KV, five blocks.
    assert (receipt.num_cached_tokens, receipt.num_prompt_tokens_computed) == (20, 3)
    pair.check_nothing_is_held()


def test_a_stop_token_ends_the_output_on_either_node() -> None:
    pair = SimPair()
    tokens = expected(prompt(10), 5)
    pair.send("early", prompt(10), max_tokens=5, stop_token_ids=[tokens[0]])
    pair.send("late", prompt(10), max_tokens=5, stop_token_ids=[tokens[3]])
    pair.timers.run()
    assert pair.tokens("early") == tokens[:1]
    assert pair.tokens("late") == tokens[:4]
    for name in ("early", "late"):
        assert pair.deltas(name)[-1][1].finish_reason is FinishReason.STOP
    pair.check_nothing_is_held()


@pytest.mark.parametrize("cancel_at", [0.0, 0.01, 0.0225, 0.03, 0.05])
def test_a_cancelled_request_leaves_nothing(cancel_at: float) -> None:
    pair = SimPair()
    pair.send("r", prompt(20), max_tokens=50)
    pair.timers.run(cancel_at)
    pair.cancel("r", epoch=2)  # of another attempt: nothing happens
    num_said = len(pair.events)
    pair.timers.run(cancel_at + 0.0001)
    pair.cancel("r")
    pair.timers.run()
    assert len(pair.events) <= num_said + 1
    pair.check_nothing_is_held()


def test_a_lost_peer_fails_what_had_not_arrived() -> None:
    pair = SimPair()
    pair.send("r", prompt(20), max_tokens=5)
    pair.timers.run(0.001)
    pair.lose("d", "p")
    pair.lose("p", "d")
    pair.timers.run()
    assert pair.errors("r") == ["UNAVAILABLE"]  # the decode node told the other one
    pair.check_nothing_is_held()


def test_a_lost_prefill_node_does_not_hurt_what_is_decoding() -> None:
    pair = SimPair()
    pair.send("r", prompt(20), max_tokens=5)
    pair.timers.run(0.03)
    pair.lose("d", "p")
    pair.timers.run()
    assert pair.tokens("r") == expected(prompt(20), 5)


def test_a_start_may_come_before_its_command_and_after_the_end() -> None:
    pair = SimPair()
    late = prompt(20)
    pair.send("r", late, max_tokens=5, epoch=1)
    pair.nodes["d"].handle_command(AbortAll(""))  # the decode node has lost its router
    pair.timers.run(1.0)
    assert pair.tokens("r", "d") == ()
    pair.send("r", late, max_tokens=5, epoch=2)
    pair.timers.run()
    assert pair.tokens("r", "d") == expected(late, 5)[1:]
    pair.check_nothing_is_held()


def test_the_deadline_ends_a_request() -> None:
    pair = SimPair(max_num_batched_tokens=10)
    pair.send("r", prompt(300), max_tokens=500, timeout_s=0.05)
    pair.timers.run(0.12)  # deadlines are looked at every 0.1 s, between steps
    assert pair.errors("r") == ["DEADLINE_EXCEEDED", "UNAVAILABLE"]
    pair.timers.run()
    pair.check_nothing_is_held()


def test_a_stopped_node_is_silent_and_then_goes_on() -> None:
    pair = SimPair()
    pair.send("r", prompt(20), max_tokens=5)
    clock = pair.clocks["d"]
    pair.timers.run(0.030)
    clock.stop()
    pair.timers.run(5.0)
    assert pair.tokens("r", "d") == ()
    clock.go_on()
    pair.timers.run(6.0)
    assert pair.tokens("r") == expected(prompt(20), 5)
    assert pair.deltas("r", "d")[-1][0] == pytest.approx(5.030)


def test_a_slow_node_takes_longer() -> None:
    pair = SimPair()
    pair.nodes["d"].slow_down(3.0)
    pair.send("r", prompt(20), max_tokens=3)
    pair.timers.run()
    whens = [when for when, _ in pair.deltas("r", "d")]
    assert whens == pytest.approx([0.055, 0.085])


def test_the_prefix_cache_is_told_to_a_router_that_asks() -> None:
    pair = SimPair(local_prefill_threshold=0)
    pair.send("one", prompt(8), max_tokens=2)
    pair.timers.run(1.0)
    assert pair.cache_events("p") == []
    pair.nodes["p"].handle_command(SendKVSnapshot())
    pair.send("two", prompt(12), max_tokens=2)
    pair.timers.run(2.0)
    hashes: list[bytes] = []
    engine = pair.nodes["p"].engine
    namespace = cache_namespace(engine.compatibility)
    BlockHasher(4, pair.options.prefix_hash, namespace).extend(hashes, prompt(12))
    snapshot, change = pair.cache_events("p")
    assert (snapshot.sequence, snapshot.snapshot) == (1, True)
    assert snapshot.stored == shorten(hashes[:2])
    assert (change.sequence, change.snapshot) == (2, False)
    assert (change.stored, change.removed) == (shorten(hashes[2:]), ())


def test_a_decode_node_alone_computes_the_prompt_in_chunks_and_samples_from_token_1_on() -> None:
    pair = SimPair(max_num_batched_tokens=8)
    pair.send_decode("r", prompt(20), prefill="", max_tokens=3)
    pair.timers.run(0.001)
    assert pair.nodes["d"].beat().num_uncomputed_tokens == 20
    pair.timers.run(0.019)
    assert pair.nodes["d"].beat().num_uncomputed_tokens == 12
    pair.timers.run()
    # Three steps of 10 ms with 8, 8 and 4 tokens of 1 ms; then one step per token.
    assert [when for when, _ in pair.deltas("r")] == pytest.approx([0.050, 0.060, 0.070])
    assert pair.tokens("r") == expected(prompt(20), 3)
    last = pair.deltas("r")[-1][1]
    assert last.decode is not None
    assert last.decode.num_prompt_tokens_computed == 20
    assert pair.nodes["d"].beat().num_uncomputed_tokens == 0
    pair.check_nothing_is_held()


def test_those_who_decode_wait_for_the_chunks_of_a_prompt_computed_there() -> None:
    pair = SimPair()
    pair.send_decode("one", prompt(4), prefill="", max_tokens=100)
    pair.timers.run(0.1)
    before = len(pair.deltas("one"))
    pair.send_decode("two", prompt(100, first=50), prefill="", max_tokens=2)
    pair.timers.run(0.2)
    assert len(pair.deltas("one")) - before == 1  # in place of 10
    pair.timers.run()
    assert pair.tokens("two") == expected(prompt(100, first=50), 2)
    pair.check_nothing_is_held()


def test_a_decode_node_alone_computes_only_what_it_has_not_cached() -> None:
    pair = SimPair()
    pair.send_decode("one", prompt(20), prefill="", max_tokens=2)
    pair.timers.run(1.0)
    pair.send_decode("two", prompt(16) + [7] * 4, prefill="", max_tokens=2)
    pair.timers.run()
    last = pair.deltas("two")[-1][1]
    assert last.decode is not None
    assert (last.decode.num_prompt_tokens_computed, last.decode.num_cached_tokens) == (4, 16)


def test_a_prompt_that_a_decode_node_computes_alone_waits_for_room_and_can_be_cancelled() -> None:
    pair = SimPair(num_blocks=10)
    pair.send_decode("one", prompt(30), prefill="", max_tokens=8)
    pair.send_decode("two", prompt(30, first=40), prefill="", max_tokens=8)
    pair.send_decode("three", prompt(30, first=80), prefill="", max_tokens=8)
    pair.timers.run(0.02)
    assert pair.nodes["d"].beat().num_uncomputed_tokens == 90
    pair.cancel("two")
    pair.cancel("one")
    pair.timers.run()
    assert pair.tokens("three") == expected(prompt(30, first=80), 8)
    assert pair.tokens("two") == ()
    pair.check_nothing_is_held()
