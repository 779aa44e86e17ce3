"""Unit tests of a decode node that computes a prompt and fetches its prefix from a prefill node."""

from __future__ import annotations

import pytest

from baton.api.sampling_params import SamplingParams
from kvconnector.peer_process import PeerProcess
from tests.fakes.handoff.fetch_cluster import TIMEOUT_S
from tests.unit.prefixes.test_fetched_prefixes import (
    FULL,
    NUM_OUT,
    PROMPT,
    STATES,
    WINDOWS,
    make,
    num_whole,
    run_until,
    tokens_of,
)


@pytest.mark.parametrize("architecture", [FULL, WINDOWS, STATES])
def test_a_decode_node_that_computes_a_prompt_fetches_what_a_prefill_node_has(
    architecture: str,
) -> None:
    cluster = make(architecture=architecture)
    cluster.place("first", 1, PROMPT, SamplingParams(max_tokens=1, temperature=0, seed=0))
    cluster.settle()
    assert not cluster.d.engine.kv_cache_manager.block_pool.num_cached
    prompt, num_cached = [*PROMPT, 30, 31, 32], num_whole(len(PROMPT))
    cluster.ask(("second", 7), prompt, NUM_OUT, num_cached, alone=True)
    run_until(cluster, lambda: bool(cluster.d_fetches.incoming.held()))
    assert {h.state for h in cluster.d.ledger().holdings} >= {"FETCHING"}
    assert cluster.d.beat().num_transfers == cluster.p.beat().num_transfers == 1
    cluster.run(2.0)
    assert cluster.output(("second", 7)) == tokens_of(tuple(prompt), NUM_OUT, architecture)
    receipt = cluster.receipts["second"]
    assert receipt.num_fetched_tokens == receipt.num_cached_tokens == num_cached
    use = cluster.d.beat().cache
    assert (use.fetched_tokens, use.memory_tokens) == (num_cached, 0)
    assert receipt.num_prompt_tokens_computed == len(prompt) - num_cached
    assert receipt.parked_s >= receipt.fetch_wait_s > 0
    assert cluster.p_shares.num_tokens_total == num_cached
    cluster.assert_at_rest()


@pytest.mark.parametrize("what", ["nothing", "cancel", "stop", "kill"])
def test_a_decode_node_goes_on_without_its_holder(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make()
    cluster.place("first", 1, PROMPT, SamplingParams(max_tokens=1, temperature=0, seed=0))
    cluster.settle()
    if what == "nothing":
        cluster.p.engine.block_pool.reset_prefix_cache()
    prompt, key = [*PROMPT, 30, 31, 32], ("second", 7)
    cluster.ask(key, prompt, 5, num_whole(len(PROMPT)), alone=True)
    if what != "nothing":
        run_until(cluster, lambda: bool(cluster.network.writes))
    match what:
        case "cancel":
            cluster.end(key)
        case "stop":
            cluster.stopped.add("p")
            cluster.run(TIMEOUT_S + 1)
            assert cluster.d.beat().num_quarantined_blocks
            cluster.stopped.clear()
        case "kill":
            cluster.kill("p")
    cluster.run(4.0)
    if what == "kill":
        monkeypatch.setattr(PeerProcess, "has_ended", lambda process: True)
        cluster.run(2.0)
    if what != "cancel":
        assert cluster.output(key) == tokens_of(tuple(prompt), 5)
        receipt = cluster.receipts["second"]
        assert (receipt.num_fetched_tokens, receipt.num_fetches_lost) == (0, 1)
    cluster.assert_at_rest()
