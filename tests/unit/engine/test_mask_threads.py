"""Unit tests of MaskThreads: a step waits for no slow mask, and tokens stay the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.api.errors import InvalidRequestError, NodeUnavailableError, OverloadedError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.grammars import compile_grammar
from engine.core.grammars.grammar import GrammarState
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.sampling import grammar_compiler, mask_threads
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.mask_threads import MaskThreads
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.engine_parts import FakeRunner, make_request, shares, step

pytestmark = pytest.mark.medium

ENDS = frozenset({4093, 4095})
COMPILER = GrammarCompiler(DEMO_MODEL, 4096, ENDS)


class HeldMatcher:
    """A matcher whose masks wait until a test lets them finish or fail."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.may_go_on = threading.Event()
        self.error: BaseException | None = None
        self._matcher = matcher

    def compute_bitmask(self) -> bytes:
        assert self.may_go_on.wait(60)
        if self.error is not None:
            raise self.error
        return self._matcher.compute_bitmask()

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


def make_scheduler() -> Scheduler:
    return Scheduler(
        KVCacheManager(100, 4),
        max_num_requests=64,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=64,
        masks=MaskThreads(),
    )


def structured(name: str, regex: str = "[a-c]{6}", num_prompt_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=20, structured_output=StructuredOutput(regex=regex))
    request = make_request(name, num_prompt_tokens, params=params)
    request.grammar = COMPILER.compile_now(params)
    return request


def hold(request: Request) -> HeldMatcher:
    """Hold all masks but the first, and make the scheduler think them slow."""
    assert request.grammar is not None
    assert request.grammar._matcher is not None
    held = HeldMatcher(request.grammar._matcher)
    request.grammar._matcher = held  # type: ignore[assignment]  # alike
    request.grammar.mask_s = 1.0
    return held


def next_token(request: Request) -> int:
    if request.grammar is None:
        return 2
    assert request.grammar.has_mask
    [mask] = request.grammar.allowed_bits()
    return int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[0])


RUNNER = FakeRunner(next_token)


def test_a_mask_that_takes_long_holds_up_no_other_request_and_changes_no_token() -> None:
    """Regression: ninety-six slow masks held up a stream of another client for 4.4 s."""
    scheduler = make_scheduler()
    plain, alone = make_request("plain", max_tokens=30), structured("alone")
    requests = [structured(f"dear-{index}") for index in range(8)]
    held = [hold(request) for request in requests]
    for request in (plain, *requests):
        scheduler.add_request(request)
    assert set(step(scheduler, RUNNER)[0]) == {"plain", *(one.request_id for one in requests)}
    for _ in range(5):  # the second masks are not ready: the other requests go on
        assert step(scheduler, RUNNER)[0] == {"plain": 1}
    assert all(request.num_output_tokens == 1 for request in requests)
    for one in held:
        one.may_go_on.set()
    ends = {}
    for _ in range(500):
        for output in step(scheduler, RUNNER)[1].outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        if len(ends) == 9:
            break
    assert ends == {"plain": FinishReason.LENGTH} | {
        request.request_id: FinishReason.STOP for request in requests
    }
    scheduler.add_request(alone)
    while scheduler.has_work:
        step(scheduler, RUNNER)
    assert all(request.output_token_ids == alone.output_token_ids for request in requests)
    assert scheduler.kv_cache_manager.block_pool.num_free == 100


def test_a_prompts_middle_needs_no_mask_in_a_step_that_was_scheduled_ahead() -> None:
    """Regression: the prompt's chunk was left out of the step until its first mask was ready."""
    scheduler, dear = make_scheduler(), structured("dear", num_prompt_tokens=160)
    assert dear.grammar is not None
    held, dear.grammar.has_mask = hold(dear), False
    decoding = structured("decoding")
    for request in (decoding, dear):
        scheduler.add_request(request)
    first = scheduler.schedule()
    scheduler.plan(first)
    scheduler.in_flight.begin_step(first)
    ahead = scheduler.schedule()
    assert shares(ahead) == {"decoding": 1, "dear": 64}
    slow = hold(decoding)
    scheduler.update(first, RUNNER.execute(first))
    assert shares(scheduler.with_masks(ahead)) == {"dear": 64}
    for one in (held, slow):
        one.may_go_on.set()


def test_one_whose_mask_is_not_ready_can_be_aborted() -> None:
    scheduler, request = make_scheduler(), structured("dear")
    held = hold(request)
    scheduler.add_request(request)
    step(scheduler, RUNNER)
    assert step(scheduler, RUNNER)[0] == {}
    assert scheduler.has_work  # the request runs, and waits
    assert scheduler.abort("dear") is request
    held.may_go_on.set()
    assert not scheduler.has_work
    assert scheduler.kv_cache_manager.block_pool.num_free == 100


def test_a_mask_that_goes_wrong_fails_its_request_alone() -> None:
    scheduler, request = make_scheduler(), structured("wrong")
    held = hold(request)
    held.error = RuntimeError("a panic")
    held.may_go_on.set()
    scheduler.add_request(request)
    for _ in range(200):
        if scheduler.failures:
            break
        step(scheduler, RUNNER)
    [(request_id, error)] = scheduler.failures
    assert (request_id, str(error)) == ("wrong", "structured_output: a panic")
    other = structured("other")
    scheduler.add_request(other)
    while scheduler.has_work:
        step(scheduler, RUNNER)
    assert other.num_output_tokens


def test_cheap_masks_are_computed_at_once_until_those_of_a_step_have_taken_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks, states = MaskThreads(), [grammar_of("[a-c]{9}") for _ in range(3)]
    for state in states:
        state.accept(next_of(state))
        state.mask_s = 0.0
    masks.begin_mask(states[0])
    assert states[0].has_mask
    assert not masks._threads
    monkeypatch.setattr(mask_threads, "AT_ONCE_S", 0.0)
    masks.wait()
    masks.begin_mask(states[1])
    masks.begin_mask(states[2])
    assert masks._threads
    for _ in range(100):
        masks.wait_for_any()
    assert all(state.has_mask for state in states)


def grammar_of(regex: str) -> GrammarState:
    params = SamplingParams(structured_output=StructuredOutput(regex=regex))
    return COMPILER.compile_now(params)


def next_of(state: GrammarState) -> int:
    return int(np.flatnonzero(np.unpackbits(state.allowed_bits()[0], bitorder="little"))[0])


# ---------------------------------------------------------------- what is there before the first


def test_a_tokenizer_is_loaded_once_and_before_the_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a node loaded the tokenizer twice, under the GIL, while it served requests."""
    made: list[object] = []
    real = LLTokenizer

    def count(path: str, **options: Any) -> LLTokenizer:
        made.append(options)
        return real(path, **options)

    monkeypatch.setattr("baton.text.grammars.LLTokenizer", count)
    compiler = GrammarCompiler(DEMO_MODEL, 4096, ENDS)
    compiler.prepare()
    assert made == [{"eos_token": sorted(ENDS)}]
    assert compiler.compile_now(
        SamplingParams(structured_output=StructuredOutput(regex="[ab]"))
    ).has_mask
    assert len(made) == 1


def test_a_state_comes_with_its_mask_and_with_what_the_output_had_before() -> None:
    params = SamplingParams(structured_output=StructuredOutput(regex="[a-c]{9}"), max_tokens=20)
    begun = grammar_of("[a-c]{9}")
    first = next_of(begun)
    request = Request.create(
        "again",
        [1, 2],
        params,
        seed=0,
        eos_token_ids=ENDS,
        max_model_len=100,
        output_token_ids=[first],
    )
    compiler, ready = GrammarCompiler(DEMO_MODEL, 4096, ENDS), threading.Event()
    compiler.on_ready = ready.set
    compiler.submit(request)
    assert ready.wait(60)
    [(found, state)] = compiler.take_ready()
    assert found is request
    assert isinstance(state, GrammarState)
    assert (state.num_accepted, state.has_mask) == (1, True)
    begun.accept(first)
    assert np.array_equal(state.allowed_bits()[0], begun.allowed_bits()[0])


def test_what_nobody_foresaw_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a request on an unforeseen error; its client would wait until its deadline otherwise."""

    class PanicError(BaseException):
        """An error like pyo3's, which is no `Exception`."""

    def fail(_: GrammarState) -> None:
        raise PanicError("index out of bounds")

    monkeypatch.setattr(GrammarState, "compute_mask", fail)
    params = SamplingParams(structured_output=StructuredOutput(regex="[a-c]"), max_tokens=20)
    request = make_request("panics", params=params)
    compiler, ready = GrammarCompiler(DEMO_MODEL, 4096, ENDS), threading.Event()
    compiler.on_ready = ready.set
    compiler.submit(request)
    assert ready.wait(60)
    [(_, outcome)] = compiler.take_ready()
    assert isinstance(outcome, InvalidRequestError)
    assert "index out of bounds" in str(outcome)


@pytest.mark.parametrize(
    "error", [NodeUnavailableError("not started"), OSError("no descriptor is left")]
)
def test_what_is_ours_to_do_is_no_fault_of_the_request_and_passes(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: clients were told that their schemas were wrong."""
    compiler = GrammarCompiler(DEMO_MODEL, 4096, ENDS)
    params = SamplingParams(structured_output=StructuredOutput(regex="[ab]"))
    with monkeypatch.context() as want:

        async def fail(*_: object, **__: object) -> object:
            raise error

        want.setattr(compiler._trials, "run", fail)
        with pytest.raises(OverloadedError, match="structured_output: no"):
            compiler.compile_now(params)
    assert compiler.compile_now(params).has_mask


def test_a_folder_without_a_tokenizer_is_prepared_and_refuses_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 4096, ENDS)
    compiler.prepare()
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        compiler.compile_now(SamplingParams(structured_output=StructuredOutput(regex="[ab]")))


def test_the_first_grammar_of_a_prepared_engine_starts_no_process_and_loads_no_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(DEMO_MODEL, 4096, ENDS)
    compiler.prepare()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request waits for what was to be prepared")

    monkeypatch.setattr("baton.processes.worker_processes.subprocess.Popen", refuse)
    monkeypatch.setattr(grammar_compiler, "load_grammar_tokenizer", refuse)
    params = SamplingParams(structured_output=StructuredOutput(json_schema='{"type":"object"}'))
    assert compiler.compile_now(params).has_mask


def test_small_grammars_are_compiled_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(structured_output: StructuredOutput, *rest: Any) -> LLMatcher:
        compiled.append(structured_output.kind)
        return compile_grammar(structured_output, *rest)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", note)
    compiler = GrammarCompiler(DEMO_MODEL, 4096, ENDS)
    compiler.prepare()
    assert compiled == ["json_schema", "regex", "grammar"]
    assert not compiler._cache, "nobody asked for these"
