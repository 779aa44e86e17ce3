"""Unit tests of drafting: the drafts, the requests that get some, and those that are forgotten."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from baton.api.errors import ConfigError
from baton.api.outputs import FinishReason, RequestDelta
from baton.engine_config import EngineConfig
from baton_kernels.dispatch import native_ops
from baton_kernels.lookup import Text, find_run
from engine.core.metrics import EngineCounters
from engine.core.outputs import StepResult
from engine.core.request import Request
from engine.speculation.ngram import NgramProposer
from engine.speculation.speculation import Speculation, make_speculation
from tests.fakes.engine.engine_parts import make_request


def runs_by_hand(tokens: list[int], least: int, most: int) -> int:
    """The definition, word by word."""
    best, best_length = -1, least - 1
    for end in range(1, len(tokens)):
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= least and length >= best_length:
            best, best_length = end, length
    return best


@pytest.mark.parametrize("num_kinds", [2, 5, 300])
def test_the_place_is_the_same_by_hand_in_numpy_and_in_c(num_kinds: int) -> None:
    draw, ops = random.Random(num_kinds), native_ops()
    for num in [*range(8), *range(60, 70), 127, 128, 129, 500]:
        for least, most in ((1, 1), (1, 3), (2, 2), (2, 4), (3, 9)):
            tokens = draw.choices(range(num_kinds), k=num)
            array = np.array(tokens, np.int32)
            expected = runs_by_hand(tokens, least, most)
            assert find_run(array, least, most) == expected, (tokens, least, most)
            if ops is not None:
                assert ops.find_run(array.ctypes.data, num, least, most) == expected


@pytest.mark.parametrize("in_c", [False, True])
def test_a_text_goes_on_as_it_did_before(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr("baton_kernels.lookup.native_ops", lambda: None)
    text = Text()
    assert text.continuation(3, 1, 4) == ()
    text.extend([1, 2, 3, 4, 9, 2, 3])
    assert text.continuation(3, 2, 4) == (4, 9, 2)
    assert text.continuation(1, 2, 4) == (4,)
    text.extend([4])
    assert text.continuation(2, 1, 4) == (9, 2)
    text.extend(range(100, 200))
    assert text.continuation(2, 1, 4) == ()
    assert text.num_tokens == 108
    text.extend([7, 8, 7, 8])  # what repeats itself goes on
    assert text.continuation(5, 1, 4) == (7, 8, 7, 8, 7)


def output(request: Request, *token_ids: int, ends: bool = False) -> RequestDelta:
    """Append a step's tokens to a request, and return its delta."""
    index = request.num_output_tokens
    request.token_ids += token_ids
    reason = FinishReason.LENGTH if ends else None
    return RequestDelta(request.request_id, index, token_ids, reason)


def by_id(*requests: Request) -> dict[str, Request]:
    return {request.request_id: request for request in requests}


class NotingProposer:
    """A proposer that drafts one token, and notes the requests it is told to forget."""

    def __init__(self, config: EngineConfig) -> None:
        self.asked: list[Request] = []
        self.forgotten: list[Request] = []

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        self.asked += requests
        return [(7,) * num_drafts for _ in requests]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)


def test_who_goes_on_is_asked_for_and_who_has_ended_is_forgotten() -> None:
    proposer = NotingProposer(EngineConfig())
    speculation = Speculation(proposer, 3, vocab_size=10)
    stays = make_request("stays", 4, max_tokens=40)
    last = make_request("last", 4, max_tokens=2)  # one more token: nothing to draft
    result = StepResult((output(stays, 2), output(last, 2)))
    assert speculation.after_step(result, by_id(stays, last)) == {"stays": (7, 7, 7)}
    assert proposer.asked == [stays]
    for index in range(30):
        gone = make_request(f"gone {index}", 4, max_tokens=40)
        speculation.after_step(StepResult((output(gone, 2),)), by_id(stays, gone))
    assert len(proposer.forgotten) > 15
    assert stays not in proposer.forgotten


def test_another_attempt_of_a_request_is_another_request() -> None:
    proposer = NgramProposer(EngineConfig(ngram_min=1))
    speculation = Speculation(proposer, 2, vocab_size=100)
    first = make_request("a", prompt=[1, 2, 3, 1], max_tokens=9)
    drafts = speculation.after_step(StepResult((output(first, 2),)), by_id(first))
    assert drafts == {"a": (3, 1)}
    second = make_request("a", prompt=[4, 5, 6, 4], max_tokens=9)
    drafts = speculation.after_step(StepResult((output(second, 5),)), by_id(second))
    assert drafts == {"a": (6, 4)}
    assert list(proposer._texts) == [second]


def test_a_node_drafts_for_another_one_and_keeps_nothing() -> None:
    proposer = NgramProposer(EngineConfig(ngram_min=1))
    speculation = Speculation(proposer, 2, vocab_size=100)
    request = make_request("a", prompt=[1, 2, 3, 1, 2], max_tokens=1)
    assert speculation.first_drafts(request) == (3, 1)
    assert not proposer._texts
    assert not speculation._known


def test_drafts_of_another_node_are_taken_if_they_can_be_computed() -> None:
    speculation = Speculation(NotingProposer(EngineConfig()), 3, vocab_size=10)
    assert speculation.received("a", (1, 2, 3, 4)) == (1, 2, 3)
    assert speculation.received("a", (9,)) == (9,)
    assert speculation.received("a", (1, 10)) == ()
    assert speculation.received("a", (-1,)) == ()


def test_drafts_are_counted_by_place() -> None:
    counters = EngineCounters()
    counters.note_drafts(2, 1)
    counters.note_drafts(3, 3)
    counters.note_drafts(1, 0)
    assert counters.draft_steps == 3
    assert counters.drafts == 6
    assert counters.accepted_drafts_by_place == [2, 1, 1]


def test_options_say_who_drafts_and_how_much() -> None:
    assert make_speculation(EngineConfig(), 10) is None
    config = EngineConfig(speculative_method="ngram", num_speculative_tokens=3).for_device("cpu")
    assert make_speculation(config, 10) is not None
    assert (config.max_num_drafts, config.max_decode_rows) == (3, 256)
    few = EngineConfig(speculative_method="ngram", max_num_batched_tokens=40).for_device("cpu")
    assert (few.max_num_requests, few.max_decode_rows) == (40, 40)
    assert EngineConfig().for_device("cpu").max_decode_rows == 64
    with pytest.raises(ConfigError, match=r"^ngram_max: must be at least ngram_min \(5\), got 4$"):
        EngineConfig(ngram_min=5)


@pytest.mark.parametrize(
    "ranks",
    [EngineConfig(tensor_parallel_size=2), EngineConfig(pipeline_parallel_size=2)],
    ids=["TP", "PP"],
)
def test_of_several_ranks_no_model_drafts_and_ngram_does(ranks: EngineConfig) -> None:
    for method in ("draft_model", "medusa", "eagle", "mtp"):
        with pytest.raises(ConfigError, match=f"speculative_method: {method} .* got 2"):
            replace(ranks, speculative_method=method, speculative_model="a folder")
    assert replace(ranks, speculative_method="ngram").max_num_drafts
