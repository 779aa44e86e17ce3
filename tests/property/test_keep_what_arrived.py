"""Property tests: when a transfer ends early, exactly the blocks below the watermark are cached."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.sampling_params import SamplingParams
from decode_node import reservations
from engine.core.request import Request
from kvconnector.base import TransferEventKind
from kvconnector.peer_process import PeerProcess
from node_runtime import quarantine
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

KEY = ("a", 1)
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def num_tokens_kept(cluster: Cluster, prompt: list[int]) -> int:
    """Return how many tokens of a prompt the decode node would find cached now."""
    request = Request.create(
        "probe", prompt, PARAMS, seed=0, eos_token_ids=frozenset(), max_model_len=28
    )
    return cluster.d.engine.kv_cache_manager.find_initial_prefix(request)[0]


def watermarks(cluster: Cluster) -> list[int]:
    """Return the watermarks that the decode node has received."""
    kind = TransferEventKind.WATERMARK
    return [event.num_tokens for event in cluster.receiver.heard if event.kind is kind]


def go_on_until(cluster: Cluster, num_moves: int, num_landed: int) -> None:
    """A part of the way: at most so many writes land, messages come in the reverse order."""
    for _ in range(num_moves):
        for role in "pd":
            cluster.round(role)
            cluster.step(role)
        while cluster.network.messages:
            cluster.network.deliver(-1)
        while cluster.network.writes and num_landed:
            cluster.network.land(0)
            num_landed -= 1


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 24),
    num_moves=st.integers(0, 8),
    num_landed=st.integers(0, 4),
    end=st.sampled_from(["killed", "lost", "cancelled", "failed"]),
)
def test_a_retry_moves_what_the_watermark_did_not_cover_and_no_more(
    num_tokens: int, num_moves: int, num_landed: int, end: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reservations, "TICK_S", 0.0)
        patch.setattr(quarantine, "RECANCEL_S", 0.0)
        cluster = make_cluster(20)
        dead = cluster.dead
        patch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in dead)
        prompt = prompt_of(1, num_tokens)
        cluster.place(*KEY, prompt, PARAMS)
        go_on_until(cluster, num_moves, num_landed)
        reservation = cluster.d.reservations._open.get(KEY)
        if reservation is None or (end == "failed" and not cluster.network.writes):
            cluster.settle()  # not there yet, or committed already
            return
        covered = max(watermarks(cluster), default=0) // BLOCK_SIZE
        if end == "killed":
            cluster.kill("p")
        elif end == "lost":
            cluster.rejoin()
            cluster.d.reservations.end_all_of("p")
        elif end == "cancelled":
            cluster.cancel(KEY)
        else:
            cluster.network.fail(0, landed=True)
        cluster.attempts[KEY].is_open = False
        cluster.step("d")
        if end != "failed":  # else more may have become known to be complete
            assert num_tokens_kept(cluster, prompt) == covered * BLOCK_SIZE
        cluster.settle()
        cluster.cancel(KEY)
        if end == "killed":
            cluster.restart_prefill_node()
        cluster.settle()
        kept = num_tokens_kept(cluster, prompt) // BLOCK_SIZE
        assert kept == covered if end != "failed" else kept >= covered
        num_written = len(cluster.network.written)
        cluster.place("a", 2, prompt, PARAMS)
        cluster.settle()
        assert len(cluster.network.written) - num_written == -(-num_tokens // BLOCK_SIZE) - kept
        assert cluster.d_engine.num_commits == 1  # and its KV was right: see CheckedEngine
        tokens = cluster.attempts["a", 2].tokens
        expected = reference_tokens(tuple(prompt), PARAMS)
        assert tuple(tokens[index] for index in sorted(tokens)) == expected
        assert_clean(cluster)
