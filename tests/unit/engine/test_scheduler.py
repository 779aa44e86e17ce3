"""Unit tests of Scheduler: which requests run, in which order, with how many tokens and blocks."""

from __future__ import annotations

import pytest

from baton.api.outputs import FinishReason, RequestDelta
from engine.core.kv_cache_manager import GrantedBlocks
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from tests.fakes.engine.engine_parts import (
    EOS,
    FakeRunner,
    make_request,
    make_scheduler,
    shares,
    step,
)


def run_to_end(scheduler: Scheduler, max_steps: int = 200) -> list[RequestDelta]:
    """Step until nothing can run; return all outputs in order."""
    outputs: list[RequestDelta] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return outputs
        outputs += step(scheduler)[1].outputs
    raise AssertionError(f"still busy after {max_steps} steps")


def num_free(scheduler: Scheduler) -> int:
    return scheduler.kv_cache_manager.block_pool.num_free


def assert_complete(outputs: list[RequestDelta], request_id: str, num_tokens: int) -> None:
    """Each index once, in order, one token each, and the reason on the last and only there."""
    mine = [output for output in outputs if output.request_id == request_id]
    assert [output.output_index for output in mine] == list(range(num_tokens))
    assert all(len(output.token_ids) == 1 for output in mine)
    assert [output.finish_reason is not None for output in mine] == [False] * (num_tokens - 1) + [
        True
    ]


# ---------------------------------------------------------------- chunks, budget, batches


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    scheduler.add_request(make_request("a", 10, 2))
    runs = [step(scheduler) for _ in range(4)]
    assert [computed["a"] for computed, _ in runs] == [4, 4, 2, 1]
    assert [len(result.outputs) for _, result in runs] == [0, 0, 1, 1]
    assert not scheduler.has_work


def test_a_step_computes_no_more_than_its_budget_and_uses_all_of_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name in "abc":
        scheduler.add_request(make_request(name, 6))
    scheduled = scheduler.schedule()
    assert shares(scheduled) == {"a": 6, "b": 4}
    assert scheduled.num_scheduled_tokens == 10


def test_running_requests_come_before_waiting_ones_and_the_rest_of_the_budget_is_for_those() -> (
    None
):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 3))
    step(scheduler)
    scheduler.add_request(make_request("b", 20))
    scheduler.add_request(make_request("c", 1))
    assert step(scheduler)[0] == {"a": 1, "b": 7}
    assert step(scheduler)[0] == {"a": 1, "b": 7}


def test_a_request_joins_the_batch_in_the_step_after_it_came() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, 10))
    step(scheduler)
    scheduler.add_request(make_request("b", 4, 10))
    assert step(scheduler)[0] == {"a": 1, "b": 4}
    assert step(scheduler)[0] == {"a": 1, "b": 1}


def test_no_more_requests_run_than_allowed_and_the_next_takes_a_free_place_at_once() -> None:
    scheduler = make_scheduler(max_num_requests=2)
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 5)):
        scheduler.add_request(make_request(name, 4, max_tokens))
    assert list(step(scheduler)[0]) == ["a", "b"]
    assert list(step(scheduler)[0]) == ["a", "b"]  # a ends here
    assert list(step(scheduler)[0]) == ["b", "c"]


def test_first_come_is_first_served_even_if_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("a", 8, 2))
    scheduler.add_request(make_request("b", 12, 2))
    scheduler.add_request(make_request("c", 1, 2))
    assert list(step(scheduler)[0]) == ["a"]
    assert_complete(run_to_end(scheduler), "b", 2)


def test_an_idle_scheduler_schedules_nothing_and_says_so() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    computed, result = step(scheduler)
    assert computed == {}
    assert result.outputs == ()


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "max_model_len", "num_outputs", "reason"),
    [
        (EOS, 5, 100, 1, FinishReason.STOP),
        (2, 5, 100, 5, FinishReason.LENGTH),
        (2, 1, 100, 1, FinishReason.LENGTH),
        (2, 50, 7, 3, FinishReason.LENGTH),
        (EOS, 1, 100, 1, FinishReason.STOP),  # both at once: the token itself is the reason
    ],
)
def test_an_output_ends_for_the_right_reason_and_frees_its_blocks(
    token_id: int, max_tokens: int, max_model_len: int, num_outputs: int, reason: FinishReason
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens, max_model_len=max_model_len))
    outputs: list[RequestDelta] = []
    finished: list[Request] = []
    while scheduler.has_work:
        _, result = step(scheduler, FakeRunner(lambda request: token_id))
        outputs += result.outputs
        finished += result.finished
    assert_complete(outputs, "a", num_outputs)
    assert outputs[-1].finish_reason is reason
    assert [request.request_id for request in finished] == ["a"]
    assert scheduler.requests == {}
    assert num_free(scheduler) == 100


def test_a_request_may_use_every_block_there_is() -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add_request(make_request("a", 5, 100, max_model_len=12))
    assert_complete(run_to_end(scheduler), "a", 7)


# ---------------------------------------------------------------- preemption


def test_when_blocks_run_out_the_newest_request_gives_way_and_the_oldest_goes_on() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, new = make_request("old", 8, 6), make_request("new", 8, 6)
    scheduler.add_request(old)
    scheduler.add_request(new)
    assert step(scheduler)[0] == {"old": 8, "new": 8}
    assert step(scheduler)[0] == {"old": 1}
    assert new.status is RequestStatus.PREEMPTED
    assert (new.num_preemptions, new.num_computed_tokens, new.block_ids) == (1, 0, [])
    assert old.num_preemptions == 0


def test_a_preempted_request_comes_back_and_loses_and_repeats_nothing() -> None:
    scheduler = make_scheduler(num_blocks=4)
    requests = [make_request(name, 6, 9) for name in "abc"]
    for request in requests:
        scheduler.add_request(request)
    outputs = run_to_end(scheduler)
    assert sum(request.num_preemptions for request in requests) > 0
    for name in "abc":
        assert_complete(outputs, name, 9)
    assert num_free(scheduler) == 4


def test_a_preempted_request_is_recomputed_with_its_outputs_and_comes_before_newer_ones() -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_requests=2)
    old, new, late = make_request("old", 8, 9), make_request("new", 7, 9), make_request("late", 1)
    for request in (old, new, late):  # the third has no place yet
        scheduler.add_request(request)
    while not new.num_preemptions:
        step(scheduler)
    num_tokens = new.num_tokens
    assert num_tokens > new.num_prompt_tokens  # it had outputs already
    while new.status is RequestStatus.PREEMPTED:
        computed, _ = step(scheduler)
        assert "late" not in computed or "new" in computed
    assert computed["new"] == num_tokens
    assert new.num_prompt_tokens_computed == 14  # the prompt, twice


def test_who_lost_its_blocks_does_not_come_back_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=5)
    remote = make_request("remote", 6, 9)
    scheduler.add_request(make_request("local", 7, 9))
    step(scheduler)
    scheduler.park(remote)
    scheduler.grant("remote")  # 3 blocks, of which it needs 2 yet: it would fit again at once
    scheduler.commit("remote", 5)
    assert step(scheduler)[0] == {"local": 1, "remote": 1}
    assert step(scheduler)[0] == {"local": 1}
    assert remote.status is RequestStatus.PREEMPTED
    assert num_free(scheduler) == 2


# ---------------------------------------------------------------- remote KV


def test_a_parked_request_is_never_scheduled_and_is_no_work() -> None:
    scheduler = make_scheduler()
    scheduler.park(make_request("parked", 8))
    assert not scheduler.has_work
    assert step(scheduler)[0] == {}
    scheduler.grant("parked")
    scheduler.add_request(make_request("other", 4, 5))
    for _ in range(3):
        assert list(step(scheduler)[0]) == ["other"]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_granted", "num_held"),
    [(8, 10, 2, 3), (7, 10, 2, 3), (1, 10, 1, 2), (7, 2, 2, 3), (7, 1, 2, 2), (8, 1, 2, 3)],
)
def test_a_grant_is_the_prompts_blocks_and_holds_room_to_go_on(
    num_prompt_tokens: int, max_tokens: int, num_granted: int, num_held: int
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", num_prompt_tokens, max_tokens)
    scheduler.park(request)
    granted = scheduler.grant("a")
    assert granted is not None
    assert granted == GrantedBlocks(0, tuple(request.block_ids[:num_granted]))
    assert len(request.block_ids) == num_held
    scheduler.check()


def test_a_grant_that_does_not_fit_takes_nothing_and_can_be_asked_for_again() -> None:
    scheduler = make_scheduler(num_blocks=4)
    running = make_request("running", 8, 2)
    scheduler.add_request(running)
    step(scheduler)
    scheduler.park(make_request("parked", 8, 5))
    assert scheduler.grant("parked") is None
    scheduler.check()
    scheduler.abort("running")
    granted = scheduler.grant("parked")
    assert granted is not None
    assert len(granted.block_ids) == 2


def test_a_committed_request_runs_in_the_very_next_step_and_computes_no_prompt_token() -> None:
    scheduler = make_scheduler(max_num_requests=2)
    request = make_request("parked", 8, 3)
    scheduler.park(request)
    scheduler.grant("parked")
    scheduler.add_request(make_request("running", 4, 9))
    step(scheduler)
    scheduler.add_request(make_request("waiting", 4, 9))  # came before the commit
    scheduler.commit("parked", 5)
    assert scheduler.has_work
    computed, result = step(scheduler)
    assert computed == {"running": 1, "parked": 1}
    assert request.output_token_ids == [5, 2]
    assert request.num_prompt_tokens_computed == 0
    parked = [output for output in result.outputs if output.request_id == "parked"]
    assert [output.output_index for output in parked] == [1]  # index 0 was the remote node's


def test_a_committed_request_gives_token_two_up_to_the_last_and_frees_all() -> None:
    scheduler = make_scheduler()
    scheduler.park(make_request("a", 8, 4))
    scheduler.grant("a")
    scheduler.commit("a", 5)
    outputs = run_to_end(scheduler)
    assert [output.output_index for output in outputs] == [1, 2, 3]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert num_free(scheduler) == 100


def test_a_committed_request_that_is_preempted_recomputes_all_and_repeats_no_output() -> None:
    scheduler = make_scheduler(num_blocks=5)
    remote, local = make_request("remote", 6, 9), make_request("local", 7, 9)
    scheduler.add_request(local)
    step(scheduler)
    scheduler.park(remote)
    scheduler.grant("remote")
    scheduler.commit("remote", 5)
    outputs = run_to_end(scheduler)
    assert remote.num_preemptions > 0
    assert remote.num_prompt_tokens_computed > 0
    mine = [output.output_index for output in outputs if output.request_id == "remote"]
    assert mine == list(range(1, 9))


# ---------------------------------------------------------------- abort in each state


def bring_to(state: str, scheduler: Scheduler) -> Request:
    """A request "a" in the given state; the pool has 6 blocks of 4 tokens."""
    request = make_request("a", 8, 20)
    if state == "waiting":
        scheduler.add_request(request)
    elif state == "running":
        scheduler.add_request(request)
        step(scheduler)
        assert request.status is RequestStatus.RUNNING
    elif state == "preempted":
        scheduler.add_request(make_request("older", 12, 20))
        scheduler.add_request(request)
        while request.status is not RequestStatus.PREEMPTED:
            step(scheduler)
    else:
        scheduler.park(request)
        if state in ("granted", "arrived"):
            scheduler.grant("a")
        if state == "arrived":
            scheduler.commit("a", 5)
    return request


STATES = ["waiting", "running", "preempted", "parked", "granted", "arrived"]


@pytest.mark.parametrize("state", STATES)
def test_abort_ends_a_request_in_any_state_and_frees_its_blocks(state: str) -> None:
    scheduler = make_scheduler(num_blocks=6)
    request = bring_to(state, scheduler)
    assert scheduler.abort("a") is request
    scheduler.check()
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert request.block_ids == []
    assert "a" not in scheduler.requests
    scheduler.abort("older")
    assert num_free(scheduler) == 6
    assert not scheduler.has_work


@pytest.mark.parametrize("state", STATES)
def test_the_id_of_an_aborted_request_can_be_used_again(state: str) -> None:
    scheduler = make_scheduler(num_blocks=6)
    bring_to(state, scheduler)
    scheduler.abort("a")
    scheduler.abort("older")
    scheduler.add_request(make_request("a", 4, 3))
    assert_complete(run_to_end(scheduler), "a", 3)


def test_aborting_a_request_that_is_not_here_is_harmless() -> None:
    assert make_scheduler().abort("nobody") is None


def test_a_request_that_is_aborted_while_its_step_runs_gives_no_output() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    scheduler.add_request(make_request("b"))
    scheduled = scheduler.schedule()
    output = FakeRunner().execute(scheduled)
    scheduler.abort("a")
    result = scheduler.update(scheduled, output)
    assert [o.request_id for o in result.outputs] == ["b"]
    scheduler.check()


def test_the_same_id_twice_at_once_is_a_programmers_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    with pytest.raises(AssertionError, match="a"):
        scheduler.park(make_request("a"))


# ---------------------------------------------------------------- prompts beside decodes


def test_prompts_get_few_tokens_in_a_step_that_also_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, prefill_tokens_beside_decodes=6)
    scheduler.add_request(make_request("old", 20, 5))
    assert step(scheduler)[0] == {"old": 20}  # nobody decodes yet
    for name in "ab":
        scheduler.add_request(make_request(name, 8, 1))
    assert step(scheduler)[0] == {"old": 1, "a": 6}
    assert step(scheduler)[0] == {"old": 1, "a": 2, "b": 4}
    assert step(scheduler)[0] == {"old": 1, "b": 4}


def test_a_step_beside_decodes_has_the_smaller_one_of_two_limits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, prefill_tokens_beside_decodes=6)
    scheduler.add_request(make_request("old", 20, 9))
    first = scheduler.schedule(num_beside_decodes=4)
    assert (first.num_scheduled_tokens, first.decodes) == (20, False)  # nobody decodes yet
    scheduler.update(first, FakeRunner().execute(first))
    scheduler.add_request(make_request("new", 12, 1))
    for limit, num_tokens in ((4, 4), (100, 6), (5, 2), (5, 0)):
        scheduled = scheduler.schedule(num_beside_decodes=limit)
        assert scheduled.decodes
        assert scheduled.num_prompt_tokens == num_tokens
        assert scheduled.num_scheduled_tokens == num_tokens + 1
        scheduler.update(scheduled, FakeRunner().execute(scheduled))


def test_chunks_of_one_token_count_as_tokens_of_prompts() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=1, prefill_tokens_beside_decodes=1)
    scheduler.add_request(make_request("old", 1, 9))
    step(scheduler)
    for name in "ab":
        scheduler.add_request(make_request(name, 2, 1))
    assert step(scheduler)[0] == {"old": 1, "a": 1}


def test_a_prompt_alone_is_computed_in_whole_chunks() -> None:
    """Requests of a prefill node sample one token and never decode."""
    scheduler = make_scheduler(max_num_batched_tokens=100, prefill_tokens_beside_decodes=6)
    for name in "ab":
        scheduler.add_request(make_request(name, 50, 1))
    assert step(scheduler)[0] == {"a": 50, "b": 50}
    assert not scheduler.has_work


def test_a_request_whose_kv_has_come_counts_as_one_that_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, prefill_tokens_beside_decodes=6)
    request = make_request("remote", 8, 3)
    scheduler.park(request)
    assert scheduler.grant("remote") is not None
    scheduler.commit("remote", 7)
    scheduler.add_request(make_request("here", 40, 2))
    assert step(scheduler)[0] == {"remote": 1, "here": 6}


def test_a_prompt_that_waits_for_its_turn_in_a_step_delays_no_grant() -> None:
    scheduler = make_scheduler(num_blocks=30, block_size=4, prefill_tokens_beside_decodes=3)
    for name in ("old", "first", "second"):
        scheduler.add_request(make_request(name, 12, 9))
        step(scheduler)
    assert scheduler.num_waiting == 1  # "first" has all tokens of a step
    for name in ("fits", "does not fit"):
        scheduler.park(make_request(name, 36, 4))
    assert scheduler.grant("fits") is not None
    assert scheduler.grant("does not fit") is None  # "second" needs 4 of the 14 blocks left


def test_a_preempted_request_is_computed_again_in_small_parts_beside_decodes() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, prefill_tokens_beside_decodes=3)
    scheduler.add_request(make_request("a", 12, 14))
    scheduler.add_request(make_request("b", 12, 14))
    outputs = run_to_end(scheduler)
    assert scheduler.num_preemptions
    assert_complete(outputs, "a", 14)
    assert_complete(outputs, "b", 14)
