"""Unit tests of Scheduler with grammars: waiting for a mask delays no other request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine.core.grammars.grammar import GrammarState
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.sampling.grammar_compiler import GrammarCompiler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler, step

pytestmark = pytest.mark.medium

COMPILER = GrammarCompiler(DEMO_MODEL, 4096, frozenset({4093, 4095}))
LONG = StructuredOutput(regex="[a-c]{12}")


def structured(name: str, num_prompt_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=40, structured_output=LONG)
    return make_request(name, num_prompt_tokens, params=params)


def grammar_of(request: Request) -> GrammarState:
    return COMPILER.compile_now(request.sampling_params)


def next_token(request: Request) -> int:
    """Return the first token that the grammar allows; 2 without a grammar."""
    if request.grammar is None:
        return 2
    bits = np.unpackbits(request.grammar.allowed_bits(), bitorder="little")
    return int(np.flatnonzero(bits)[0])


RUNNER = FakeRunner(next_token)


def run_to_end(scheduler: Scheduler) -> dict[str, FinishReason]:
    ends = {}
    for _ in range(300):
        if not scheduler.has_work:
            break
        for output in step(scheduler, RUNNER)[1].outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    return ends


def assert_clean(scheduler: Scheduler, num_blocks: int = 100) -> None:
    scheduler.check()
    assert scheduler.requests == {}
    assert scheduler.kv_cache_manager.block_pool.num_free == num_blocks


def test_one_that_waits_for_its_grammar_holds_up_nobody() -> None:
    scheduler = make_scheduler(max_num_requests=1)
    first = structured("first")
    scheduler.add_request(first)
    assert first.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert not scheduler.has_work
    for name in "ab":
        scheduler.add_request(make_request(name))
    assert run_to_end(scheduler) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert first.block_ids == []
    assert step(scheduler)[0] == {}
    scheduler.set_grammar(first, grammar_of(first))
    assert run_to_end(scheduler) == {"first": FinishReason.STOP}
    assert first.num_output_tokens <= 12  # no end token was needed
    assert_clean(scheduler)


def test_it_takes_the_place_of_its_arrival() -> None:
    scheduler = make_scheduler(max_num_requests=1)
    scheduler.add_request(make_request("a", max_tokens=1))
    late = structured("late")
    scheduler.add_request(late)
    scheduler.add_request(make_request("b", max_tokens=1))
    scheduler.set_grammar(late, grammar_of(late))
    assert list(run_to_end(scheduler)) == ["a", "late", "b"]


def parked(scheduler: Scheduler) -> Request:
    request = structured("r")
    scheduler.park(request)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert scheduler.grant("r") is not None
    return request


def test_a_grammar_that_is_ready_before_the_remote_kv_takes_token_1_with_it() -> None:
    scheduler = make_scheduler()
    request = parked(scheduler)
    scheduler.set_grammar(request, grammar_of(request))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.commit("r", next_token(request))
    assert step(scheduler, RUNNER)[0] == {"r": 1}
    assert run_to_end(scheduler) == {"r": FinishReason.STOP}
    assert_clean(scheduler)


def test_remote_kv_that_comes_before_the_grammar_waits_for_it_with_its_blocks() -> None:
    scheduler = make_scheduler()
    request = parked(scheduler)
    grammar = grammar_of(request)
    twin = make_request("twin", params=request.sampling_params)
    twin.grammar = grammar
    scheduler.commit("r", next_token(twin))
    assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert request.block_ids
    assert not scheduler.has_work
    assert step(scheduler)[0] == {}
    scheduler.set_grammar(request, grammar_of(request))
    assert step(scheduler, RUNNER)[0] == {"r": 1}
    assert run_to_end(scheduler) == {"r": FinishReason.STOP}
    assert_clean(scheduler)


@pytest.mark.parametrize("grammar_first", [True, False])
def test_a_token_1_that_does_not_fit_fails_the_request(grammar_first: bool) -> None:
    scheduler = make_scheduler()
    request = parked(scheduler)
    calls: list[Callable[[], None]] = [
        lambda: scheduler.set_grammar(request, grammar_of(request)),
        lambda: scheduler.commit("r", 0),
    ]
    for call in calls if grammar_first else reversed(calls):
        call()
    ((request_id, error),) = scheduler.failures
    assert request_id == "r"
    assert isinstance(error, InvalidRequestError)
    assert error.field == "structured_output"
    assert_clean(scheduler)


def test_an_abort_while_it_waits_for_its_grammar_is_clean_and_the_grammar_finds_nobody() -> None:
    scheduler = make_scheduler()
    added, committed = structured("a"), parked(scheduler)
    scheduler.add_request(added)
    scheduler.commit("r", 66)
    scheduler.check()
    assert scheduler.abort("a") is added
    assert scheduler.abort("r") is committed
    for request in (added, committed):
        scheduler.set_grammar(request, grammar_of(request))
    assert not scheduler.failures
    assert_clean(scheduler)


def test_a_grammar_of_an_older_request_of_that_id_is_not_the_new_ones() -> None:
    scheduler = make_scheduler()
    old, new = structured("a"), structured("a")
    scheduler.add_request(old)
    scheduler.abort("a")
    scheduler.add_request(new)
    scheduler.set_grammar(old, grammar_of(old))
    assert new.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert new.grammar is None


def test_one_that_cannot_be_compiled_fails_alone_and_a_parked_one_is_left_to_its_owner() -> None:
    scheduler = make_scheduler()
    wrong, other = structured("wrong"), make_request("other")
    waits = parked(scheduler)
    scheduler.add_request(wrong)
    scheduler.add_request(other)
    error = InvalidRequestError("structured_output.regex", "no")
    scheduler.set_grammar(wrong, error)
    scheduler.set_grammar(waits, error)
    assert scheduler.failures == [("wrong", error), ("r", error)]
    assert wrong.status is RequestStatus.FINISHED_ABORTED
    assert waits.status is RequestStatus.WAITING_FOR_REMOTE_KVS  # a peer may write its blocks
    assert run_to_end(scheduler) == {"other": FinishReason.LENGTH}
    scheduler.abort("r")
    assert_clean(scheduler)


def test_preemption_keeps_how_far_the_output_has_come() -> None:
    scheduler = make_scheduler(num_blocks=5)
    requests = [structured(name, 8) for name in ("old", "new")]
    for request in requests:
        scheduler.add_request(request)
        scheduler.set_grammar(request, grammar_of(request))
    assert run_to_end(scheduler) == {"old": FinishReason.STOP, "new": FinishReason.STOP}
    assert scheduler.num_preemptions
    assert requests[0].output_token_ids == requests[1].output_token_ids
    assert_clean(scheduler, 5)


def test_a_token_that_does_not_fit_is_not_in_the_output() -> None:
    scheduler = make_scheduler()
    request = structured("a")
    scheduler.add_request(request)
    scheduler.set_grammar(request, grammar_of(request))
    _, result = step(scheduler, FakeRunner(lambda request: 0))
    assert result.outputs == ()
    assert request.output_token_ids == []
    assert [request_id for request_id, _ in scheduler.failures] == ["a"]
    assert_clean(scheduler)
