"""Tests of a decode node without a prefill node: it computes the prompt and token 1 itself."""

from __future__ import annotations

import dataclasses

import pytest

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from decode_node.options import DecodeOptions
from engine.step_figures import StepFigures
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def assert_right(cluster: Cluster, key: tuple[str, int], *, mixed: bool = False) -> None:
    attempt = cluster.attempts[key]
    assert attempt.is_complete
    expected = reference_tokens(tuple(attempt.prompt), attempt.params, mixed=mixed)
    assert tuple(attempt.tokens[index] for index in sorted(attempt.tokens)) == expected


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 12, 13, 16])
def test_all_tokens_are_right_and_nothing_travels(num_tokens: int, mixed: bool) -> None:
    cluster = make_cluster(20, mixed=mixed)
    cluster.place("a", 1, prompt_of(1, num_tokens), GREEDY, alone=True)
    cluster.settle()
    assert_right(cluster, ("a", 1), mixed=mixed)
    receipt = cluster.receipts["a"]
    assert receipt.num_prompt_tokens_computed == num_tokens
    assert receipt.num_cached_tokens == 0
    assert (receipt.push.num_blocks, receipt.push.num_bytes, receipt.push.transport) == (0, 0, "")
    assert cluster.network.written == []
    assert cluster.sender.started == []
    assert_clean(cluster)


def test_what_it_has_cached_is_not_computed_again() -> None:
    cluster = make_cluster(20)
    cluster.place("a", 1, prompt_of(1, 12), GREEDY)  # came from the prefill node
    cluster.settle()
    cluster.place("b", 1, prompt_of(1, 14), GREEDY, alone=True)
    cluster.settle()
    assert_right(cluster, ("b", 1))
    receipt = cluster.receipts["b"]
    assert (receipt.num_cached_tokens, receipt.num_prompt_tokens_computed) == (12, 2)
    assert_clean(cluster)


def test_it_does_so_beside_requests_whose_kv_arrives() -> None:
    cluster = make_cluster(20)
    for number in range(3):
        cluster.place(f"a{number}", 1, prompt_of(number, 9), GREEDY, alone=True)
        cluster.place(f"b{number}", 1, prompt_of(number + 5, 9), GREEDY)
    cluster.settle()
    for number in range(3):
        assert_right(cluster, (f"a{number}", 1))
        assert_right(cluster, (f"b{number}", 1))
    assert_clean(cluster)


def test_one_token_is_enough() -> None:
    cluster = make_cluster(20)
    cluster.place("a", 1, prompt_of(1, 9), dataclasses.replace(GREEDY, max_tokens=1), alone=True)
    cluster.settle()
    assert len(cluster.attempts["a", 1].tokens) == 1
    assert cluster.attempts["a", 1].is_complete
    assert_clean(cluster)


def test_it_goes_on_behind_what_earlier_attempts_sampled_also_without_any_prefill_node() -> None:
    cluster = make_cluster(20)
    prompt = prompt_of(1, 9)
    tokens = reference_tokens(tuple(prompt), GREEDY)
    cluster.kill("p")
    cluster.place("a", 2, prompt, GREEDY, tokens[:2], alone=True)
    cluster.settle()
    assert_right(cluster, ("a", 2))


def test_a_cancel_frees_all() -> None:
    cluster = make_cluster(20)
    cluster.place("a", 1, prompt_of(1, 16), GREEDY, alone=True)
    cluster.step("d")  # some of the prompt is computed
    cluster.cancel(("a", 1), on_p=False)
    cluster.settle()
    assert not cluster.attempts["a", 1].tokens
    assert_clean(cluster)


def test_steps_with_prompts_are_bounded_while_a_prefill_node_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = list[float | None]()
    monkeypatch.setattr(StepFigures, "limit_stretch", lambda _, limit: limits.append(limit))
    cluster = make_cluster(20, options=DecodeOptions(max_step_stretch=1.3))
    assert limits == [1.3]
    cluster.kill("p")
    cluster.settle()
    assert limits == [1.3, None]
    cluster.restart_prefill_node()
    cluster.settle()
    assert limits == [1.3, None, 1.3]


def test_zero_leaves_steps_unbounded_and_a_bound_below_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_stretch: must be 0 or above 1, got 1"):
        DecodeOptions(max_step_stretch=1.0)
    cluster = make_cluster(20, options=DecodeOptions(max_step_stretch=0.0))
    assert cluster.d_engine.figures._stretch is None
