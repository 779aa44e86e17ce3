"""Steps that sample several tokens of a request: nothing but the number of steps may change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.api.outputs import Completion, FinishReason, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton_kernels.dispatch import native_ops
from baton_kernels.native.tape import Tape
from engine import LLM
from engine.core.block_pool import BlocksStored
from engine.core.outputs import ModelRunnerOutput
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.sampling.grammar_compiler import GrammarCompiler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.drafting_executor import DraftingExecutor, outputs_of
from tests.fakes.engine.engine_parts import (
    EOS,
    ContentRunner,
    FakeRunner,
    extended,
    make_request,
    make_scheduler,
    shares,
    step,
)

pytestmark = pytest.mark.medium

COMPILER = GrammarCompiler(DEMO_MODEL, 4096, frozenset({4093, 4095}))

# ---------------------------------------------------------------- where an output ends


def start(scheduler: Scheduler, token_id: int, drafts: tuple[int, ...]) -> None:
    """The step of a prompt, which samples one token; drafts come with it."""
    first = ModelRunnerOutput({"a": (token_id,)}, draft_token_ids={"a": drafts})
    [output] = scheduler.update(scheduler.schedule(), first).outputs
    assert (output.token_ids, output.finish_reason) == ((token_id,), None)


@pytest.mark.parametrize(
    ("params", "max_model_len", "kept", "reason"),
    [
        ({"max_tokens": 9}, 99, (2, 3, EOS), FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (3,)}, 99, (2, 3), FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (2, 3)}, 99, (2,), FinishReason.STOP),
        ({"max_tokens": 3}, 99, (2, 3), FinishReason.LENGTH),
        ({"max_tokens": 9}, 7, (2, 3), FinishReason.LENGTH),
        ({"max_tokens": 9, "ignore_eos": True}, 99, (2, 3, EOS, 4), None),
    ],
)
def test_what_comes_behind_the_end_is_dropped(
    params: dict[str, Any], max_model_len: int, kept: tuple[int, ...], reason: FinishReason | None
) -> None:
    scheduler = make_scheduler(prefix_cache=True)
    request = make_request("a", 4, params=SamplingParams(**params), max_model_len=max_model_len)
    scheduler.add_request(request)
    start(scheduler, 7, (2, 3, EOS))
    logprobs = tuple(TokenLogprobs(-float(index)) for index in range(4))
    [output] = scheduler.update(
        scheduler.schedule(), ModelRunnerOutput({"a": (2, 3, EOS, 4)}, {"a": logprobs})
    ).outputs
    scheduler.check()
    assert (output.output_index, output.token_ids, output.finish_reason) == (1, kept, reason)
    assert output.logprobs == logprobs[: len(kept)]
    assert request.output_token_ids == [7, *kept]
    assert scheduler.counters.output_tokens == 1 + len(kept)
    if reason is None:
        assert request.num_computed_tokens == request.num_tokens - 1
    else:
        assert not scheduler.has_work
        assert scheduler.kv_cache_manager.block_pool.num_free == 100


def structured(regex: str) -> Request:
    params = SamplingParams(max_tokens=40, structured_output=StructuredOutput(regex=regex))
    request = make_request("a", params=params)
    request.grammar = COMPILER.compile_now(params)
    return request


def first_allowed(request: Request, num: int) -> tuple[int, ...]:
    """An output by the grammar, from its beginning."""
    ahead = COMPILER.compile_now(request.sampling_params)
    found: list[int] = []
    for _ in range(num):
        [bits] = ahead.allowed_bits()
        found.append(next(i for i in range(4096) if bits[i // 8] >> i % 8 & 1))
        assert ahead.accept(found[-1])
    return tuple(found)


def test_a_grammar_takes_each_token_and_ends_the_output_where_it_ends() -> None:
    scheduler, request = make_scheduler(), structured("[a]{3}")
    first, *rest = first_allowed(request, 3)
    scheduler.add_request(request)
    start(scheduler, first, (*rest, 5))
    scheduled = scheduler.schedule()
    assert scheduled.scheduled[0].draft_token_ids == tuple(rest)  # what the grammar allows of them
    [output] = scheduler.update(scheduled, ModelRunnerOutput({"a": (*rest, 5)})).outputs
    assert (output.token_ids, output.finish_reason) == (tuple(rest), FinishReason.STOP)


def test_a_token_that_a_grammar_refuses_fails_the_request_and_none_before_it_comes() -> None:
    scheduler, request = make_scheduler(), structured("[a]{4}")
    first, second, third = first_allowed(request, 3)
    scheduler.add_request(request)
    start(scheduler, first, (second, third))
    wrong = scheduler.update(scheduler.schedule(), ModelRunnerOutput({"a": (second, 0)}))
    assert (wrong.outputs, request.output_token_ids) == ((), [first])
    assert [request_id for request_id, _ in scheduler.failures] == ["a"]
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert scheduler.counters.output_tokens == 1
    assert scheduler.kv_cache_manager.block_pool.num_free == 100


def test_a_grammar_says_what_may_come_behind_drafts_and_stays_where_it_is() -> None:
    request = structured("ab[cd]x|a[xy]")
    grammar = COMPILER.compile_now(request.sampling_params)
    a, b, c, x = (ord(letter) - ord("a") + 64 for letter in "abcx")
    drafts = (a, b, c, x)
    assert grammar.look_ahead((*drafts[:3], b), 60) == 3
    assert grammar.look_ahead(drafts, 0) == 0  # no time is left
    assert len(grammar.allowed_bits()) == 1
    assert grammar.look_ahead(drafts, 60) == 4
    along = [bits.tolist() for bits in grammar.allowed_bits(4)]
    assert len(along) == 5
    again = [bits.tolist() for bits in grammar.allowed_bits(4)]
    assert along == again
    for index, token_id in enumerate(drafts):
        [bits] = grammar.allowed_bits()
        assert bits.tolist() == along[index]
        assert grammar.accept(token_id)
    assert grammar.is_terminated


# ---------------------------------------------------------------- what is scheduled


def propose_right(request: Request, num: int = 3) -> tuple[int, ...]:
    """The next tokens of `count`."""
    drafts: tuple[int, ...] = ()
    for _ in range(num):
        drafts = (*drafts, count(extended(request, drafts)))
    return drafts


def count(request: Request) -> int:
    """A token by its position; no end."""
    return 10 + request.num_tokens % 50


def run(scheduler: Scheduler, runner: FakeRunner) -> tuple[dict[str, list[int]], int]:
    """The outputs, and the number of steps."""
    outputs: dict[str, list[int]] = {}
    num_steps = 0
    while scheduler.has_work:
        num_steps += 1
        assert num_steps < 500
        for output in step(scheduler, runner)[1].outputs:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    return outputs, num_steps


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    found = {}
    for name, propose in (
        ("none", lambda request: ()),
        ("right", propose_right),
        ("wrong", lambda request: (0, 0, 0)),
        ("half", lambda request: (*propose_right(request, 1), 0, 0)),
    ):
        scheduler = make_scheduler(prefix_cache=True)
        scheduler.add_request(make_request("a", 4, max_tokens=21))
        found[name] = run(scheduler, ContentRunner(4, next_token=count, propose=propose))
    outputs = [outputs for outputs, _ in found.values()]
    assert outputs == [outputs[0]] * 4
    # One of the prompt, then 20 tokens by 1, by 4 and by 2.
    assert {name: steps for name, (_, steps) in found.items()} == {
        "none": 21, "right": 6, "wrong": 21, "half": 11,
    }  # fmt: skip


def test_the_prefix_cache_names_what_was_sampled_and_nothing_else() -> None:
    stored = []
    for propose in (lambda request: (), lambda request: (*propose_right(request, 2), 0, 0)):
        scheduler = make_scheduler(prefix_cache=True)
        scheduler.add_request(make_request("a", 5, max_tokens=30))
        run(scheduler, ContentRunner(4, next_token=count, propose=propose))
        events = scheduler.kv_cache_manager.block_pool.take_events()
        stored.append([h for e in events if isinstance(e, BlocksStored) for h in e.hashes])
    assert stored[0] == stored[1]
    assert len(stored[0]) == 34 // 4


def test_drafts_take_what_is_left_of_a_step_and_not_more() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, long_prefill_token_threshold=4)
    runner = FakeRunner(count, lambda request: propose_right(request, 9))
    scheduler.add_request(make_request("a", 3, max_tokens=20))
    scheduler.add_request(make_request("b", 3, max_tokens=20))
    assert step(scheduler, runner)[0] == {"a": 3, "b": 3}
    assert step(scheduler, runner)[0] == {"a": 4, "b": 2}
    scheduler.abort("b")
    runner.propose = lambda request: ()
    assert [o.token_ids for o in step(scheduler, runner)[1].outputs] == [(18, 19, 20, 21)]
    assert step(scheduler, runner)[0] == {"a": 1}


def test_no_more_drafts_are_computed_than_tokens_may_come() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(count, lambda request: propose_right(request, 9))
    scheduler.add_request(make_request("a", 4, max_tokens=4))
    assert step(scheduler, runner)[0] == {"a": 4}
    computed, result = step(scheduler, runner)
    assert computed == {"a": 3}
    assert result.outputs[0].finish_reason is FinishReason.LENGTH
    assert scheduler.kv_cache_manager.block_pool.num_free == 100


def test_nobody_is_preempted_for_drafts() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    runner = FakeRunner(count, lambda request: propose_right(request, 4))
    for name in "ab":
        scheduler.add_request(make_request(name, 6, max_tokens=3))
    assert step(scheduler, runner)[0] == {"a": 6, "b": 6}
    assert step(scheduler, runner)[0] == {"a": 2, "b": 2}  # within the second block
    assert scheduler.num_preemptions == 0
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in "ab":
        scheduler.add_request(make_request(name, 7, max_tokens=5))
    assert step(scheduler, runner)[0] == {"a": 7, "b": 7}
    assert step(scheduler, runner)[0] == {"a": 1, "b": 1}  # a third block is not free
    assert scheduler.num_preemptions == 0


def test_who_is_preempted_comes_back_without_drafts() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    runner = ContentRunner(
        4, next_token=count, propose=lambda request: (*propose_right(request, 1), 0)
    )
    for name in "ab":
        scheduler.add_request(make_request(name, 6, max_tokens=8))
    outputs, _ = run(scheduler, runner)
    assert scheduler.num_preemptions > 0
    assert outputs == {name: [10 + position for position in range(6, 14)] for name in "ab"}
    assert scheduler.kv_cache_manager.block_pool.num_free == 4


def test_nothing_is_scheduled_behind_drafts_before_they_are_known() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(count, propose_right)
    scheduler.add_request(make_request("a", 5, 20))
    first = scheduler.schedule()
    scheduler.in_flight.begin_step(first)
    second = scheduler.schedule()
    assert shares(second) == {"a": 1}  # nobody knows that drafts will come
    output = runner.execute(first)
    scheduler.in_flight.begin_step(second)
    scheduler.update(first, output)
    assert not scheduler.schedule().scheduled  # for they are behind another token
    token_id = count(scheduler.requests["a"])
    assert token_id == 16
    scheduler.update(second, ModelRunnerOutput({"a": (16,)}, draft_token_ids={"a": (17, 0)}))
    third = scheduler.schedule()
    assert shares(third) == {"a": 3}
    assert third.scheduled[0].draft_token_ids == (17, 0)
    scheduler.in_flight.begin_step(third)
    assert not scheduler.schedule().scheduled
    assert scheduler.has_work
    [result] = scheduler.update(third, ModelRunnerOutput({"a": (17, 18)})).outputs
    assert (result.output_index, result.token_ids) == (2, (17, 18))
    scheduler.check()
    assert shares(scheduler.schedule()) == {"a": 1}


# ---------------------------------------------------------------- with a model

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 8,
    "num_blocks": 20,
    "max_num_requests": 6,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 32,
}
KINDS: list[dict[str, Any]] = [  # all that a token may depend on
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "structured_output": StructuredOutput(regex="[a-z ]{5,20}[.]")},
    {"temperature": 1.0, "structured_output": StructuredOutput(regex="[a-z]+")},
    {"min_tokens": 8, "prompt_logprobs": 1},
    {"stop": ("e",), "temperature": 1.0, "logprobs": 0},
]


def draw_requests(num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(1)
    prompts = [draw.choices(range(10, 4000), k=draw.randint(1, 60)) for _ in range(num)]
    params = []
    for index in range(num):
        kind = {"temperature": 0.0, **KINDS[index % len(KINDS)]}
        ends = () if "structured_output" in kind else tuple(draw.sample(range(4096), 120))
        params.append(
            SamplingParams(max_tokens=draw.randint(10, 25), seed=index, stop_token_ids=ends, **kind)
        )
    return prompts, params


REQUESTS = draw_requests(2 * len(KINDS))


@pytest.fixture(scope="module")
def plain() -> tuple[list[Completion], int]:
    """Completions without drafts, and the number of steps that they took."""
    llm = LLM(str(DEMO_MODEL), **SMALL)
    return llm.generate(*REQUESTS), llm.engine.num_steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_change_no_token_of_a_model(
    asynchronous: bool, plain: tuple[list[Completion], int]
) -> None:
    expected, num_steps = plain
    llm = LLM(str(DEMO_MODEL), async_scheduling=asynchronous, **SMALL)
    llm.engine.executor = executor = DraftingExecutor(
        llm.engine.executor,
        outputs_of({one.request_id: one.token_ids for one in expected}),
        num_drafts=5,
    )
    found = llm.generate(*REQUESTS)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        assert mine.text == other.text
        assert len(mine.logprobs) == len(other.logprobs)
        for logprobs in ("logprobs", "prompt_logprobs"):
            for one, same in zip(getattr(mine, logprobs), getattr(other, logprobs), strict=True):
                assert (one is None) == (same is None)
                if one is not None:
                    assert one.logprob == pytest.approx(same.logprob, abs=1e-3)
    assert {one.finish_reason for one in found} == {FinishReason.STOP, FinishReason.LENGTH}
    assert 0 < executor.num_accepted < executor.num_computed
    assert llm.engine._scheduler.num_preemptions > 0
    assert llm.engine.num_steps < 0.8 * num_steps
    assert llm.engine.block_pool.num_free == SMALL["num_blocks"]
    assert not llm.engine.has_work


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
def test_a_tape_computes_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = 0
    run_tape = Tape.run

    def count_runs(tape: Tape) -> None:
        nonlocal num_runs
        num_runs += 1
        run_tape(tape)

    monkeypatch.setattr(Tape, "run", count_runs)
    llm = LLM(str(DEMO_MODEL), **SMALL)
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    [expected] = llm.generate([[5, 6, 7]], params)
    assert num_runs > 30
    num_runs, num_steps = 0, llm.engine.num_steps
    llm.engine.block_pool.reset_prefix_cache()
    llm.engine.executor = executor = DraftingExecutor(
        llm.engine.executor, lambda request_id: expected.token_ids, num_drafts=1, wrong_every=0
    )
    [found] = llm.generate([[5, 6, 7]], params)
    assert found.token_ids == expected.token_ids
    assert executor.num_accepted == executor.num_computed > 15
    num_steps = llm.engine.num_steps - num_steps
    assert num_runs > num_steps - 6  # all but the prompt's, and the first ones of each width
