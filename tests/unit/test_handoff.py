"""Drills of the handoff between two whole nodes, each a case that a random walk seldom meets."""

from __future__ import annotations

import logging

import msgspec
import pytest

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.link.words import AbortAll, PeerUpdate
from engine.core.outputs import SchedulerOutput
from kvconnector.base import TransferEventKind
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.messages import Grant, Watermark
from kvconnector.protocol.pair_keys import KeyPair
from kvconnector.protocol.seals import peek
from tests.fakes.engine.drafting_executor import DraftingExecutor, outputs_of
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.fakes.handoff.scripted_network import ScriptedTransport
from tests.fakes.time.waiting import wait_until
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TWELVE = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
NGRAM = {
    "speculative_method": "ngram", "ngram_min": 1, "num_speculative_tokens": 4,
    "adaptive_speculation": False,
}  # fmt: skip


def place(cluster: Cluster, request_id: str, num_tokens: int, epoch: int = 1) -> None:
    cluster.place(request_id, epoch, prompt_of(len(cluster.attempts), num_tokens), GREEDY)


def assert_right(cluster: Cluster) -> None:
    """Every attempt that nobody cancelled has the tokens of one process."""
    for attempt in cluster.attempts.values():
        if attempt.error or not attempt.is_complete:
            continue
        expected = reference_tokens(tuple(attempt.prompt), attempt.params)
        assert tuple(attempt.tokens[i] for i in sorted(attempt.tokens)) == expected


def go_on(cluster: Cluster, times: int = 1) -> None:
    """Both nodes work; the network stands still."""
    for _ in range(times):
        for engine_id in "pd":
            cluster.round(engine_id)
            cluster.step(engine_id)


def deliver_all(cluster: Cluster) -> None:
    while cluster.network.messages:
        cluster.network.deliver(0)


def run_until_writing(cluster: Cluster) -> None:
    """Up to the first write, which stays posted."""
    for _ in range(20):
        if cluster.network.writes:
            return
        go_on(cluster)
        deliver_all(cluster)
    raise AssertionError("nothing is written")


def prefill_without_grant(cluster: Cluster) -> None:
    """Let the prefill node compute all; it holds token 1 and waits for its grants."""
    for _ in range(30):
        cluster.step("p")
        cluster.round("p")


def test_a_request_is_handed_over_and_nothing_is_left() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert cluster.d_engine.num_commits == 1
    assert_right(cluster)
    assert_clean(cluster)


def test_both_nodes_log_which_request_they_work_on(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("prefill_node", "decode_node"):
        caplog.set_level(logging.DEBUG, name)
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    cluster.settle()
    told = [
        (record.name, record.getMessage())
        for record in caplog.records
        if getattr(record, "request_id", "") == "a"
    ]
    assert (
        "prefill_node.node",
        "accepted; this node computes the prompt of 10 tokens, and d decodes",
    ) in told
    assert ("decode_node.node", "ended (length) after 4 tokens") in told
    assert len(told) == 4


def test_the_decode_node_computes_no_prompt_token_and_one_forward_less_than_tokens() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    before = cluster.d.engine.num_steps
    cluster.settle()
    assert cluster.d.engine.num_steps - before == GREEDY.max_tokens - 1


def test_prompts_that_together_do_not_fit_the_prefill_node_are_all_computed() -> None:
    """No prompt may be stuck on blocks that are kept for another's unfinished push."""
    cluster = make_cluster(7)
    for name in ("a", "b", "c"):
        place(cluster, name, 17)
    cluster.settle()
    assert all(attempt.is_complete for attempt in cluster.attempts.values())
    assert_right(cluster)
    assert_clean(cluster)


def test_prompts_that_together_do_not_fit_are_computed_though_no_grant_comes_meanwhile() -> None:
    cluster = make_cluster(7)
    for name in ("a", "b"):
        place(cluster, name, 17)
    prefill_without_grant(cluster)
    assert 0 in cluster.attempts["a", 1].tokens  # the first one at least is through
    cluster.settle()
    assert all(attempt.is_complete for attempt in cluster.attempts.values())
    assert_clean(cluster)


def test_an_attempt_that_replaces_one_whose_push_is_open_leaks_nothing() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10, epoch=1)
    prefill_without_grant(cluster)
    assert cluster.attempts["a", 1].tokens.keys() == {0}
    cluster.attempts["a", 1].is_open = False  # the router gave up on it; its cancel was lost
    place(cluster, "a", 10, epoch=2)
    cluster.settle()
    assert cluster.attempts["a", 2].is_complete
    assert_right(cluster)
    assert_clean(cluster)


@pytest.mark.parametrize("num_messages", range(4))
def test_a_lost_router_leaves_no_block_behind_whatever_the_handoff_had_reached(
    num_messages: int,
) -> None:
    cluster = make_cluster(7)
    place(cluster, "a", 10)
    cluster.step("d")
    prefill_without_grant(cluster)
    for _ in range(num_messages):
        while not cluster.network.messages and cluster.network.writes:
            cluster.network.land(0)
        if cluster.network.messages:
            cluster.network.deliver(0)
        go_on(cluster, 2)
    for node in (cluster.p, cluster.d):
        node.submit(AbortAll("the link to the router broke"))
    cluster.attempts["a", 1].is_open = False
    cluster.settle()
    assert_clean(cluster)


def test_a_lost_router_leaves_no_block_behind_while_the_decode_node_has_no_room_to_grant() -> None:
    cluster = make_cluster(20)
    full = cluster.d.engine.block_pool.allocate(20)
    place(cluster, "a", 10)
    cluster.step("d")
    prefill_without_grant(cluster)
    deliver_all(cluster)
    go_on(cluster, 3)
    assert cluster.d.requests()[0].transfer_state == "PARKED"
    for node in (cluster.p, cluster.d):
        node.submit(AbortAll("the link to the router broke"))
    cluster.attempts["a", 1].is_open = False
    cluster.settle()
    cluster.d.engine.block_pool.release(full or [])
    assert_clean(cluster)


@pytest.mark.parametrize("lost", ["cancel", "quiet"])
def test_a_lost_word_about_the_end_of_a_transfer_does_not_keep_its_blocks_for_ever(
    lost: str,
) -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    cluster.cancel(("a", 1), on_p=False)
    cluster.step("d")
    assert cluster.d.beat().num_quarantined_blocks > 0
    cluster.round("d")
    if lost == "quiet":
        deliver_all(cluster)
        cluster.round("p")
        while cluster.network.writes:
            cluster.network.land(0)
        cluster.round("p")
    assert cluster.network.messages
    cluster.network.messages.clear()
    cluster.settle()
    assert cluster.d.beat().num_quarantined_blocks == 0
    cluster.cancel(("a", 1))
    cluster.settle()
    assert_clean(cluster)


def test_blocks_of_a_prefill_node_that_is_only_thought_gone_come_back_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: False)
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    cluster.d.submit(PeerUpdate("p", removed=True))
    for _ in range(10):  # everything but the write goes on
        go_on(cluster)
        deliver_all(cluster)
    assert cluster.network.writes  # alive and out of the router's sight: it may land at any time
    assert cluster.d.beat().num_quarantined_blocks > 0
    assert "gone" in cluster.attempts["a", 1].error
    cluster.settle()
    assert_clean(cluster)
    cluster.rejoin()
    cluster.settle()
    place(cluster, "b", 10)
    cluster.settle()
    assert cluster.attempts["b", 1].is_complete


def test_a_decode_node_that_is_only_thought_gone_hears_quiet_after_the_last_write() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    cluster.p.submit(PeerUpdate("d", removed=True))
    cluster.attempts["a", 1].is_open = False
    for _ in range(10):
        go_on(cluster)
        deliver_all(cluster)
    assert cluster.network.writes
    assert cluster.d.requests() != []  # nobody told it anything while a write may land
    assert cluster.p.beat().num_quarantined_blocks + len(cluster.p.requests()) > 0
    cluster.settle()
    assert_clean(cluster)


@pytest.mark.parametrize("killed", ["p", "d"])
def test_when_a_node_dies_in_the_middle_of_a_write_the_other_frees_everything(
    killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(20)
    dead = cluster.dead
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in dead)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    cluster.kill(killed)
    cluster.settle()
    assert_clean(cluster)


def test_a_grant_of_another_decode_node_does_not_move_a_block() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    prefill_without_grant(cluster)
    ScriptedTransport("x", cluster.d.engine.kv_memory, cluster.network)
    stranger = msgspec.structs.replace(
        PeerInfo.decode(cluster.d.receiver.describe()),
        engine_id="x",
        public_key=KeyPair().public,
    )
    cluster.sender.connect(stranger)
    cluster.round("p")
    grant = Grant(engine_id="x", request_id="a", epoch=1, block_ids=[0, 1, 2])
    cluster.sender.machine.handle_input(grant, cluster.clock())
    assert cluster.sender.machine.transfers["a", 1].granted is None
    cluster.sender.loop.round()
    assert cluster.network.writes == []
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert_clean(cluster)


def test_a_prefill_node_that_starts_for_a_cancelled_request_is_told_without_the_router() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    cluster.step("d")
    cluster.cancel(("a", 1), on_p=False)
    cluster.step("d")
    cluster.settle()
    assert cluster.sender.started == [("a", 1)]
    assert_clean(cluster)


def test_a_failed_write_fails_the_request_with_a_reason_and_frees_both_sides() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    cluster.network.fail(0, landed=True)
    cluster.settle()
    assert "the write failed" in cluster.attempts["a", 1].error
    kinds = [event.kind for event in cluster.sender.heard]
    assert kinds.count(TransferEventKind.FAILED) == 1
    assert_clean(cluster)


def test_blocks_of_a_cancelled_request_are_not_reused_before_the_last_write_has_landed() -> None:
    cluster = make_cluster(7)
    place(cluster, "a", 17)
    run_until_writing(cluster)
    held = cluster.network.writes[0].remote_block_ids
    cluster.cancel(("a", 1))
    place(cluster, "b", 17)
    for _ in range(20):  # everything but the write goes on
        go_on(cluster)
        deliver_all(cluster)
    quarantined = cluster.d.beat().num_quarantined_blocks
    assert quarantined >= len(held)
    # The write may still read its source, too.
    assert cluster.p.beat().num_quarantined_blocks >= len(held)
    assert cluster.d.requests()[0].num_blocks == 0  # "b" waits for room
    cluster.settle()
    assert cluster.attempts["b", 1].is_complete  # and its KV was right: see CheckedEngine
    assert_clean(cluster)


def test_of_two_watermarks_that_change_places_the_higher_one_counts() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 18)
    messages, writes = cluster.network.messages, cluster.network.writes
    cluster.step("d")
    cluster.step("p")
    for engine_id in "pdd":  # it is granted before the second chunk
        cluster.round(engine_id)
        cluster.step("d")
        deliver_all(cluster)
    for _ in range(2):  # a chunk each
        cluster.round("p")
        while writes:
            cluster.network.land(0)
        cluster.round("p")
        cluster.step("p")
    held = [m for m in messages if isinstance(peek(m.payload), Watermark)]
    messages[:] = [m for m in messages if m not in held]
    low, high = (peek(message.payload) for message in held[:2])
    assert isinstance(low, Watermark)
    assert isinstance(high, Watermark)
    assert 0 < low.num_tokens < high.num_tokens
    reservation = cluster.d.reservations._open["a", 1]
    for message in (held[1], held[0]):
        messages[:] = [message]
        deliver_all(cluster)
        cluster.round("d")
        cluster.step("d")
        assert reservation.num_received_tokens == high.num_tokens
    cluster.settle()
    assert_right(cluster)
    assert_clean(cluster)


def test_both_nodes_refuse_a_token_id_outside_the_vocabulary_and_go_on() -> None:
    cluster = make_cluster(20)
    wrong = SamplingParams(max_tokens=4, banned_token_ids=(10**6,))
    cluster.place("a", 1, prompt_of(0, 10), wrong)
    cluster.settle()
    assert cluster.attempts["a", 1].error.startswith("banned_token_ids: token ids must be 0 to ")
    place(cluster, "b", 10)
    cluster.settle()
    assert cluster.attempts["b", 1].is_complete
    assert_right(cluster)
    assert_clean(cluster)


def test_of_a_mixed_model_travels_what_the_decode_node_needs_and_no_more() -> None:
    cluster = make_cluster(20, mixed=True)
    num_free = cluster.d.engine.block_pool.num_free
    for request_id in ("a", "b"):  # the second finds the first one's prefix on the prefill node
        cluster.place(request_id, 1, prompt_of(3, 17), GREEDY)
        num_written = most_held = 0
        for _ in range(6):
            cluster.step("p")
            for _ in range(3):  # all of the network is quicker than a step
                for engine_id in "pd":
                    cluster.round(engine_id)
                    deliver_all(cluster)
                cluster.step("d")
                while cluster.network.writes:  # a block must be full when it is written
                    num_written += len(cluster.network.writes[0].remote_block_ids)
                    cluster.network.land(0)
                most_held = max(most_held, num_free - cluster.d.engine.block_pool.num_free)
        # Of 17 tokens the full layer keeps all; a window of 6 looks back to position 12.
        assert num_written == 5 + 2 * 2
        assert most_held == num_written + 3  # and the decode block
        assert tuple(cluster.attempts[request_id, 1].tokens.values()) == reference_tokens(
            tuple(prompt_of(3, 17)), GREEDY, mixed=True
        )
    cluster.settle()
    assert cluster.d_engine.num_commits == 2  # and their KV was right: see CheckedEngine
    assert_clean(cluster)


@pytest.mark.medium
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_grammar_that_cannot_be_compiled_is_refused_by_both_nodes_and_nothing_is_left(
    num_steps: int,
) -> None:
    """Refuse a grammar on a checkpoint without tokenizer while a plain request goes on."""
    cluster = make_cluster(40)
    structured = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="a"))
    place(cluster, "other", 12)
    cluster.place("wrong", 1, prompt_of(1, 12), structured)
    go_on(cluster, num_steps)

    def is_refused() -> bool:
        go_on(cluster)
        return bool(cluster.attempts["wrong", 1].error)

    wait_until(is_refused)
    cluster.settle()
    assert cluster.attempts["wrong", 1].error.startswith(
        "structured_output: this checkpoint has no"
    )
    assert cluster.attempts["other", 1].is_complete
    assert_right(cluster)
    assert_clean(cluster)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_on_a_decode_node_change_no_token(temperature: float, asynchronous: bool) -> None:
    cluster = make_cluster(20, async_scheduling=asynchronous)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    prompts = {name: prompt_of(index, 6 + index) for index, name in enumerate("abc")}
    expected = {name: reference_tokens(tuple(prompt), params) for name, prompt in prompts.items()}
    engine = cluster.d_engine
    engine.executor = executor = DraftingExecutor(
        engine.executor, outputs_of(expected), num_drafts=3
    )
    for name, prompt in prompts.items():
        cluster.place(name, 1, prompt, params)
    cluster.settle()
    for name, token_ids in expected.items():
        tokens = cluster.attempts[name, 1].tokens
        assert tuple(tokens[index] for index in sorted(tokens)) == token_ids
        assert cluster.receipts[name].num_forwards < len(token_ids) - 1
    assert 0 < executor.num_accepted < executor.num_computed
    assert_clean(cluster)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_prefill_node_drafts_first_and_the_decode_node_s_first_step_verifies(
    asynchronous: bool,
) -> None:
    cluster = make_cluster(20, async_scheduling=asynchronous, engine_options=NGRAM)
    prompt = prompt_of(12, 13)
    expected = reference_tokens(tuple(prompt), TWELVE)
    assert expected[0] == prompt[7]  # so that there is something to draft after it
    computed: list[tuple[int, ...]] = []
    schedule = cluster.d_engine.schedule

    def note() -> SchedulerOutput:
        scheduled = schedule()
        computed.extend(item.draft_token_ids for item in scheduled.scheduled)
        return scheduled

    cluster.d_engine.schedule = note  # type: ignore[method-assign]
    cluster.place("a", 1, prompt, TWELVE)
    cluster.settle()
    assert_right(cluster)
    assert computed[0] == tuple(prompt[8:12])
    receipt = cluster.receipts["a"]
    assert 0 < receipt.num_accepted_drafts < receipt.num_drafts
    assert receipt.num_forwards == 11 - receipt.num_accepted_drafts
    assert_clean(cluster)


def test_a_decode_node_that_does_not_draft_does_without_the_drafts_that_come() -> None:
    cluster = make_cluster(20, engine_options=NGRAM)
    cluster.d_engine.features.speculation = None
    cluster.place("a", 1, prompt_of(12, 13), TWELVE)
    cluster.settle()
    assert_right(cluster)
    receipt = cluster.receipts["a"]
    assert (receipt.num_forwards, receipt.num_drafts) == (11, 0)
    assert_clean(cluster)
