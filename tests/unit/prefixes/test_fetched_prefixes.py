"""Tests of prefixes that a prefill node fetches from a decode node; faults cost only time."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.api.sampling_params import SamplingParams
from baton.link.words import CancelCommand, PrefillCommand
from baton.telemetry.ledger import BlockOwner
from engine import LLM
from engine.core import side_blocks
from engine.core.request import RequestStatus
from kvconnector.base import HandoffRecord
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.messages import Commit, Grant, Start
from node_runtime.prefixes.held_prefix import find_prefix
from tests.fakes.handoff.fetch_cluster import TIMEOUT_S, FetchCluster
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, kv_of
from tests.numerics.family_hybrids import HYBRIDS
from tests.numerics.tiny_models import make_hugging_face_model, save

PROMPT = [*range(5, 22)]
NUM_OUT = 9


FULL = "Qwen3ForCausalLM"  # full attention in all layers
WINDOWS = "Gemma3ForCausalLM"  # one layer with full attention, and one with a sliding window
STATES = "BambaForCausalLM"  # one layer with full attention, and one with a state


@functools.cache
def reference(architecture: str = FULL) -> LLM:
    """Load the checkpoint in one process, with memory to spare."""
    folder = tempfile.TemporaryDirectory(prefix="baton-test-")
    shape = HYBRIDS[STATES].variants["plain"] if architecture == STATES else {}
    model = make_hugging_face_model(architecture, max_position_embeddings=128, **shape)
    llm = LLM(str(save(model, Path(folder.name))), block_size=BLOCK_SIZE, num_blocks=192)
    llm.folder = folder  # type: ignore[attr-defined]  # lives as long as the model does
    return llm


@functools.cache
def tokens_of(prompt: tuple[int, ...], max_tokens: int, architecture: str = FULL) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return list(reference(architecture).generate([list(prompt)], params)[0].token_ids)


def kv_of_prompt(prompt: list[int], architecture: str = FULL) -> torch.Tensor:
    llm = reference(architecture)
    request = llm._make_choices(list(prompt), SamplingParams(max_tokens=5, ignore_eos=True))[0]
    llm.engine.add_request(request)
    while request.num_computed_tokens < len(prompt):
        llm.engine.step()
    kv = kv_of(llm.engine, request.block_ids, len(prompt))
    llm.engine.abort(request.request_id)
    return kv


def make(num_blocks: int = 60, *, digests: bool = True, architecture: str = FULL) -> FetchCluster:
    llm = reference(architecture)
    return FetchCluster(
        Path(llm.folder.name),  # type: ignore[attr-defined]  # see above
        functools.partial(kv_of_prompt, architecture=architecture),
        num_blocks,
        llm.engine.kv_memory.spec.num_groups,
        kv_digests=digests,
    )


@pytest.fixture
def cluster() -> Iterator[FetchCluster]:
    """Return two nodes, of which the decode node has a turn of a conversation in its cache."""
    made = make()
    first_turn(made)
    yield made
    for key, attempt in made.attempts.items():
        if attempt.is_complete:
            assert made.output(key) == tokens_of(tuple(attempt.prompt), len(made.output(key)))


def first_turn(cluster: FetchCluster) -> list[int]:
    """Compute a prompt and its output; return the next turn's prompt."""
    params = SamplingParams(max_tokens=NUM_OUT, temperature=0, seed=0)
    cluster.place("first", 1, PROMPT, params)
    cluster.settle()
    return second_prompt()


def second_prompt() -> list[int]:
    return [*PROMPT, *tokens_of(tuple(PROMPT), NUM_OUT), 30, 31, 32]


def num_whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def computed_by_p(cluster: FetchCluster) -> int:
    return cluster.p.engine.metrics().prompt_tokens_computed_total


# The decode node computes all tokens of a turn but the last.
CACHED = num_whole(len(PROMPT) + NUM_OUT - 1)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("share_first", [True, False])
def test_only_new_tokens_are_computed(digests: bool, share_first: bool) -> None:
    cluster = make(digests=digests)
    prompt = first_turn(cluster)
    before, sent = computed_by_p(cluster), cluster.d_engine.num_commits
    if share_first:
        cluster.share(("second", 7), prompt[:CACHED])
        cluster.run(0.3)
    cluster.ask(("second", 7), prompt, 5, CACHED, shares=not share_first)
    cluster.run(2.0)
    assert cluster.output(("second", 7)) == tokens_of(tuple(prompt), 5)
    assert computed_by_p(cluster) - before == len(prompt) - CACHED
    assert cluster.d_engine.num_commits == sent + 1
    counts = cluster.fetches.counts
    own = num_whole(len(PROMPT))  # what the prefill node has computed itself
    assert (counts.started, counts.received, counts.lost) == (1, 1, 0)
    assert counts.tokens == CACHED - own
    assert cluster.shares.num_tokens_total == CACHED
    # Neither way does a block travel that the other node has.
    landed = len(cluster.network.written)
    cluster.ask(("again", 8), prompt, 1, CACHED)
    cluster.run(1.0)
    assert cluster.fetches.counts.started == 1, "it has all that it could fetch"
    assert len(cluster.network.written) - landed <= 1, "only the block that is not full"
    cluster.assert_at_rest()


def test_a_request_that_cannot_start_expects_no_prefix(cluster: FetchCluster) -> None:
    node = cluster.p
    cluster.ask(("second", 7), second_prompt(), 5, CACHED, shares=False)
    received_at, command = node._inbox._commands.pop()
    assert isinstance(command, PrefillCommand)
    command = dataclasses.replace(command, adapter="a" * 64)
    # The adapter was unloaded after the command had stopped waiting for it.
    node._inbox._start(node, node._outbox, command, received_at, has_waited=True)
    assert cluster.fetches.counts.started == 1
    assert not cluster.fetches.incoming.num_transfers
    cluster.end(("second", 7))
    cluster.run(2.0)
    cluster.assert_at_rest()


@pytest.mark.parametrize("architecture", [FULL, WINDOWS, STATES])
@pytest.mark.parametrize("digests", [True, False])
def test_a_conversation_of_four_turns_is_computed_once(architecture: str, digests: bool) -> None:
    cluster = make(digests=digests, architecture=architecture)
    prompt = list(PROMPT)
    total = 0
    for turn in range(4):
        key, cached = (f"turn{turn}", turn), num_whole(max(len(prompt) - 4, 0)) if turn else 0
        before = computed_by_p(cluster)
        cluster.ask(key, prompt, NUM_OUT, cached)
        cluster.run(1.5)
        total += computed_by_p(cluster) - before
        assert computed_by_p(cluster) - before == len(prompt) - cached
        assert cluster.output(key) == tokens_of(tuple(prompt), NUM_OUT, architecture)
        prompt += [*cluster.output(key), 40 + turn, 45 + turn, 50 + turn]
    assert cluster.fetches.counts.received == 3
    assert total < len(prompt)
    cluster.assert_at_rest()


def test_only_the_last_window_of_a_window_group_travels() -> None:
    cluster = make(architecture=WINDOWS)
    cluster.place("first", 1, PROMPT, SamplingParams(max_tokens=NUM_OUT, temperature=0, seed=0))
    cluster.settle()
    prompt = [*PROMPT, *tokens_of(tuple(PROMPT), NUM_OUT, WINDOWS), 30, 31, 32]
    cluster.p.engine.block_pool.reset_prefix_cache()
    landed = len(cluster.network.written)
    cluster.ask(("second", 7), prompt, 1, CACHED)
    run_until(cluster, lambda: bool(cluster.fetches.incoming.held()))
    (granted,) = cluster.fetches.incoming.held()
    num_blocks = CACHED // BLOCK_SIZE
    in_window = num_blocks - (CACHED - 6 + 1) // BLOCK_SIZE
    assert len(granted.block_ids) == num_blocks + in_window < 2 * num_blocks
    cluster.run(2.0)
    assert cluster.output(("second", 7)) == tokens_of(tuple(prompt), 1, WINDOWS)
    assert cluster.fetches.counts.tokens == CACHED
    assert len(cluster.network.written) > landed
    cluster.assert_at_rest()


def test_a_prompt_waits_for_no_fetch_that_brings_another_window() -> None:
    cluster = make(architecture=WINDOWS)
    first_turn(cluster)
    cluster.p.engine.block_pool.reset_prefix_cache()
    whole = [*PROMPT, *tokens_of(tuple(PROMPT), NUM_OUT, WINDOWS), 30, 31, 32]
    num_common = CACHED - BLOCK_SIZE
    shorter = [*whole[:num_common], 40, 41, 42]
    before = computed_by_p(cluster)
    cluster.ask(("a", 2), whole, 3, CACHED)
    cluster.ask(("b", 3), shorter, 3, num_common)
    cluster.ask(("c", 4), [*whole, 33], 3, CACHED)
    cluster.run(2.0)
    assert cluster.output(("a", 2)) == tokens_of(tuple(whole), 3, WINDOWS)
    assert cluster.output(("b", 3)) == tokens_of(tuple(shorter), 3, WINDOWS)
    assert (cluster.fetches.counts.started, cluster.fetches.counts.received) == (2, 2)
    num_new = [len(whole) - CACHED, len(shorter) - num_common, len(whole) + 1 - CACHED]
    assert computed_by_p(cluster) - before == sum(num_new)
    cluster.assert_at_rest()


def test_two_prompts_with_one_prefix_fetch_it_once(cluster: FetchCluster) -> None:
    prompt = second_prompt()
    cluster.ask(("a", 2), prompt, 3, CACHED)
    cluster.ask(("b", 3), [*prompt, 33], 3, CACHED)
    cluster.run(2.0)
    assert cluster.output(("a", 2)) == tokens_of(tuple(prompt), 3)
    assert cluster.output(("b", 3)) == tokens_of((*prompt, 33), 3)
    assert (cluster.fetches.counts.started, cluster.fetches.counts.received) == (1, 1)
    cluster.assert_at_rest()


def test_a_prompt_waits_for_no_fetch_that_brings_less_than_half(cluster: FetchCluster) -> None:
    cluster.p.engine.block_pool.reset_prefix_cache()
    prompt = second_prompt()
    shorter = [*prompt[: 2 * BLOCK_SIZE], 40, 41, 42]
    before = computed_by_p(cluster)
    cluster.ask(("a", 2), shorter, 3, 2 * BLOCK_SIZE)
    cluster.ask(("b", 3), prompt, 3, CACHED)
    cluster.run(2.0)
    assert (cluster.fetches.counts.started, cluster.fetches.counts.received) == (2, 2)
    assert computed_by_p(cluster) - before == 3 + len(prompt) - CACHED
    cluster.assert_at_rest()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_cancelled_prompt_lets_others_have_the_prefix(cluster: FetchCluster, name: str) -> None:
    prompt = second_prompt()
    cluster.ask(("a", 2), prompt, 3, CACHED)
    cluster.ask(("b", 3), [*prompt, 33], 3, CACHED)
    cluster.step("p")
    cluster.end((name, 2 if name == "a" else 3))
    cluster.run(2.0)
    assert cluster.fetches.counts.received == 1
    cluster.assert_at_rest()


def test_what_is_sent_cannot_be_evicted_and_has_owners() -> None:
    cluster = make(24)
    prompt = first_turn(cluster)
    cluster.ask(("second", 7), prompt, 5, CACHED)
    run_until(cluster, lambda: bool(cluster.network.writes))
    write = cluster.network.writes[0]
    sent = {h.owner: h for h in cluster.d.ledger().holdings if h.state == "SHARING"}
    assert set(write.local_block_ids) <= set(sent[BlockOwner.PUSH].block_ids)
    granted = [h for h in cluster.p.ledger().holdings if h.state == "FETCHING"]
    assert set(write.remote_block_ids) <= set(granted[0].block_ids)
    (waiting,) = cluster.p.engine.requests.values()
    assert waiting.status is RequestStatus.WAITING_FOR_PREFIX
    # Other prompts take every block of the decode node that they can get.
    num_free = cluster.d.engine.block_pool.num_free
    taken = cluster.d.engine.block_pool.allocate(num_free)
    assert taken is not None
    assert not set(taken) & set(sent[BlockOwner.PUSH].block_ids)
    with torch.inference_mode():
        cluster.d.engine.kv_memory.tensor[taken] = 7.0
    cluster.d.engine.block_pool.release(taken)
    cluster.run(2.0)
    assert cluster.output(("second", 7)) == tokens_of(tuple(prompt), 5)
    assert cluster.fetches.counts.received == 1
    cluster.assert_at_rest()


def test_a_holder_that_has_nothing_is_a_miss(cluster: FetchCluster) -> None:
    cluster.d.engine.block_pool.reset_prefix_cache()
    prompt, before = second_prompt(), computed_by_p(cluster)
    cluster.ask(("second", 2), prompt, 3, CACHED)
    cluster.run(1.5)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert computed_by_p(cluster) - before == len(prompt) - num_whole(len(PROMPT))
    assert (cluster.fetches.counts.received, cluster.fetches.counts.lost) == (0, 1)
    cluster.assert_at_rest()


def test_a_holder_that_is_never_told_is_given_up_in_time(cluster: FetchCluster) -> None:
    prompt = second_prompt()
    cluster.ask(("second", 2), prompt, 3, CACHED, shares=False)
    cluster.run(TIMEOUT_S - 0.5)
    assert not cluster.attempts["second", 2].tokens
    cluster.run(2.0)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    cluster.share(("second", 2), prompt[:CACHED])  # it comes after all
    cluster.run(2.0)
    assert cluster.fetches.counts.lost == 1
    cluster.assert_at_rest()


def test_a_refusal_may_overtake_the_command(cluster: FetchCluster) -> None:
    cluster.d.engine.block_pool.reset_prefix_cache()
    prompt = second_prompt()
    cluster.share(("second", 2), prompt[:CACHED])
    cluster.run(0.5)
    cluster.ask(("second", 2), prompt, 3, CACHED, shares=False)
    cluster.run(1.5)  # much less than TIMEOUT_S
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert cluster.fetches.counts.lost == 1
    cluster.assert_at_rest()


def test_a_holder_lets_a_prefix_go_whose_prompt_never_starts(cluster: FetchCluster) -> None:
    cluster.share(("second", 2), second_prompt()[:CACHED])
    cluster.run(0.5)
    assert cluster.shares.num_transfers == 1
    cluster.p.submit(CancelCommand("second", 2))
    cluster.run(2.0)
    assert cluster.shares.num_transfers == 0
    cluster.assert_at_rest()


def test_fetches_take_a_part_of_the_blocks_only(
    cluster: FetchCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_blocks, "MAX_SHARE", 0.02)
    prompt = second_prompt()
    cluster.ask(("second", 2), prompt, 3, CACHED)
    cluster.run(1.5)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert cluster.fetches.counts.lost == 1
    cluster.assert_at_rest()


def test_prefixes_that_are_sent_take_a_part_of_the_blocks_only(
    cluster: FetchCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = second_prompt()
    num_blocks = CACHED // BLOCK_SIZE
    most = (num_blocks - 0.5) / cluster.d.engine.block_pool.num_blocks
    monkeypatch.setattr(side_blocks, "MAX_SHARE", most)
    cluster.share(("shorter", 1), prompt[: CACHED - BLOCK_SIZE])
    cluster.ask(("second", 2), prompt, 3, CACHED)
    cluster.step("d")
    (holding,) = cluster.shares.held()
    assert len(holding.block_ids) == num_blocks - 1
    cluster.p.submit(CancelCommand("shorter", 1))  # its command never comes
    cluster.run(2.0)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert (cluster.fetches.counts.received, cluster.fetches.counts.lost) == (0, 1)
    cluster.assert_at_rest()


def test_a_prefix_that_is_sent_twice_counts_until_the_last_one_has_gone(
    cluster: FetchCluster,
) -> None:
    prefix, side = second_prompt()[:CACHED], cluster.d.engine.features.side_blocks
    for epoch in (1, 2):
        cluster.share(("second", epoch), prefix)
        cluster.step("d")
        assert side.num_held == CACHED // BLOCK_SIZE
    cluster.shares._end(("second#prefix", 1), "the test ends it")
    cluster.run(0.5)
    assert cluster.shares.num_transfers == 1
    assert side.num_held == CACHED // BLOCK_SIZE
    cluster.p.submit(CancelCommand("second", 2))
    cluster.run(2.0)
    assert side.num_held == 0
    cluster.assert_at_rest()


def run_until(cluster: FetchCluster, is_so: Callable[[], bool], *, lands: bool = False) -> None:
    """Let both nodes and the messages move until a condition holds; writes stay posted."""
    for _ in range(100):
        if is_so():
            return
        for engine_id in "dp":
            cluster.round(engine_id)
            cluster.step(engine_id)
        while cluster.network.messages and not is_so():
            cluster.network.deliver(0)
        if lands:
            while cluster.network.writes:
                cluster.network.land(0)
    raise AssertionError("it never happens")


POINTS: dict[str, Callable[[FetchCluster], bool]] = {
    "asked": lambda cluster: True,
    "expected": lambda cluster: bool(cluster.fetches.incoming.num_transfers),
    "granted": lambda cluster: bool(cluster.fetches.incoming.held()),
    "writing": lambda cluster: bool(cluster.network.writes),
}


@pytest.mark.parametrize("state", POINTS)
@pytest.mark.parametrize("what", ["cancel", "abort", "stop holder", "kill holder", "kill reader"])
def test_whatever_ends_a_fetch_leaves_nothing(
    cluster: FetchCluster, state: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, key = second_prompt(), ("second~router", 2)
    cluster.ask(key, prompt, 3, CACHED)
    run_until(cluster, lambda: POINTS[state](cluster))
    match what:
        case "cancel":
            cluster.end(key)
        case "abort":
            cluster.attempts[key].is_open = False
            cluster.abort("router")
        case "stop holder":
            cluster.stopped.add("d")
            cluster.run(TIMEOUT_S + 1)
            assert cluster.fetches.counts.lost == 1, "the prompt goes on"
            assert not cluster.p.engine.requests
            cluster.stopped.clear()
        case "kill holder":
            cluster.kill("d")
        case "kill reader":
            cluster.kill("p")
    cluster.run(4.0)
    if what == "kill holder":
        assert cluster.fetches.counts.received == 0
        # Blocks that the dead node may have written stay in quarantine until its death is known.
        assert {h.owner for h in cluster.p.ledger().holdings} <= {BlockOwner.QUARANTINE}
        monkeypatch.setattr(PeerProcess, "has_ended", lambda process: True)
        cluster.run(2.0)
    cluster.assert_at_rest()


@pytest.mark.parametrize("kind", [Start, Grant, Commit])
def test_a_late_message_changes_nothing(cluster: FetchCluster, kind: type) -> None:
    prompt = second_prompt()
    cluster.network.delays[kind] = True  # and a double of it comes in time
    cluster.ask(("second", 2), prompt, 3, CACHED)
    cluster.run(1.5)
    cluster.network.release()
    cluster.run(2.0)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert cluster.fetches.counts.received == 1
    cluster.assert_at_rest()


@pytest.mark.parametrize("how_often", [1, 9])
def test_wrong_bytes_are_written_again_or_the_prompt_is_computed(
    cluster: FetchCluster, how_often: int
) -> None:
    prompt = second_prompt()
    cluster.ask(("second", 2), prompt, 3, CACHED)
    for _ in range(how_often):
        run_until(cluster, lambda: bool(cluster.network.writes or cluster.fetches.counts.lost))
        if cluster.fetches.counts.lost:
            break
        cluster.network.land_damaged(0, 0, 100, 3)
    cluster.run(2.0)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert cluster.fetches.counts.received == (1 if how_often == 1 else 0)
    cluster.assert_at_rest()


def test_the_prefix_of_another_prompt_is_refused(
    cluster: FetchCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder with another idea of hashes, or a liar, puts nothing into the cache."""
    monkeypatch.setattr(
        "node_runtime.prefixes.shares.find_prefix",
        lambda *args: dataclasses.replace(find_prefix(*args), last_hash=b"\1" * 16),
    )
    prompt = second_prompt()
    cluster.ask(("second", 2), prompt, 3, CACHED)
    cluster.run(2.0)
    assert cluster.output(("second", 2)) == tokens_of(tuple(prompt), 3)
    assert (cluster.fetches.counts.received, cluster.fetches.counts.lost) == (0, 1)
    cluster.assert_at_rest()


def test_other_salts_share_nothing(cluster: FetchCluster) -> None:
    manager = cluster.d.engine.kv_cache_manager
    found = find_prefix(manager, second_prompt()[:CACHED], (b"cache_salt", b"other"), ())
    assert (found.num_tokens, found.block_ids) == (0, ())


def test_a_record_says_nothing_of_prefixes_unless_it_is_of_one() -> None:
    assert HandoffRecord(num_tokens=1, token_id=2).prefix == ""
