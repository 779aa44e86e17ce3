"""Unit tests of grammars in the engine: against a definition of what may follow, token by token."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.api.thinking import Thinking
from baton.text.tokenizer import Tokenizer
from engine import LLM
from engine.core.grammars.grammar import GrammarState
from engine.core.request import Request, RequestStatus
from engine.crash_dump import describe
from engine.sampling.grammar_compiler import MAX_CACHED, GrammarCompiler
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.sampling import adjust

pytestmark = pytest.mark.medium

ENDS = {4093, 4095}
VOCAB_SIZE = 4096
TOKENIZER = Tokenizer(DEMO_MODEL)
TEXTS = [TOKENIZER.decode([token_id]) for token_id in range(VOCAB_SIZE)]
CHOICES = ("apple pie", "apple", "banana", "a\n")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, frozenset(ENDS))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32", num_blocks=64, num_threads=1)


def choosing(*texts: str, **params: object) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput(choice=texts), **params)  # type: ignore[arg-type]  # fields


def allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(state.allowed_bits(), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def allowed_by_definition(written: str) -> set[int]:
    """All tokens that lead on to one of `CHOICES`; an end where one is complete."""
    left = [text[len(written) :] for text in CHOICES if text.startswith(written)]
    found = {i for i, text in enumerate(TEXTS) if text and any(t.startswith(text) for t in left)}
    return found | (ENDS if "" in left else set())


@pytest.mark.parametrize("path", [(), ("a",), ("app", "le"), ("app", "le", " p"), ("b", "an")])
def test_the_allowed_tokens_are_those_of_the_definition(
    compiler: GrammarCompiler, path: tuple[str, ...]
) -> None:
    state = compiler.compile_now(choosing(*CHOICES))
    for text in path:
        assert state.accept(TEXTS.index(text))
    found, right = allowed(state), allowed_by_definition("".join(path))
    assert found
    # Where one text only can follow, the library allows the tokens that it is usually cut into.
    assert found == right if len(path) < 3 and path != ("b", "an") else found <= right
    assert not state.is_terminated


def test_it_is_terminated_where_nothing_can_follow_and_after_an_end(
    compiler: GrammarCompiler,
) -> None:
    whole = compiler.compile_now(choosing("a"))
    assert whole.accept(TEXTS.index("a"))
    assert whole.is_terminated
    for end in ENDS:
        state = compiler.compile_now(choosing("a", "ab"))
        assert state.accept(TEXTS.index("a"))
        assert not state.is_terminated
        assert state.accept(end)
        assert state.is_terminated


def test_a_token_that_does_not_fit_is_refused_and_so_is_all_after_it(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.compile_now(choosing("a"))
    assert not state.accept(TEXTS.index("b"))
    assert state.problem.startswith("structured_output: ")
    assert "\n" not in state.problem
    assert not state.accept(TEXTS.index("a"))
    assert not state.is_terminated


@pytest.mark.parametrize("vocab_size", [100, 4090, 4096, 4099, 5000])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size: int) -> None:
    compiler = GrammarCompiler(DEMO_MODEL, vocab_size, frozenset({9000} | ENDS))
    params = SamplingParams(structured_output=StructuredOutput(regex="(?s:.*)"))
    found = allowed(compiler.compile_now(params))
    assert found
    assert max(found) < min(vocab_size, VOCAB_SIZE)


def test_bans_that_leave_nothing_are_a_problem_of_this_request_alone(
    compiler: GrammarCompiler,
) -> None:
    first = TEXTS.index("a")
    for params in (
        choosing("a", banned_token_ids=(first,)),
        choosing("a", allowed_token_ids=(first + 1,)),
    ):
        state = compiler.compile_now(params)
        assert allowed(state) >= set(range(VOCAB_SIZE))  # any: what is drawn is thrown away
        assert "no token is left" in state.problem
        assert not state.accept(first)


def compiling(
    compiler: GrammarCompiler, structured_output: StructuredOutput, caller: str = ""
) -> asyncio.Future[LLMatcher]:
    """Return the compiler's matcher of a grammar, asked for on the loop's thread."""

    async def ask() -> list[asyncio.Future[LLMatcher]]:
        return [compiler._compile(structured_output, caller)]

    [found] = compiler._on_loop(ask()).result(60)
    return found


def test_equal_grammars_are_compiled_once_and_not_all_are_kept(compiler: GrammarCompiler) -> None:
    once = compiling(compiler, StructuredOutput(regex="[ab]"))
    assert compiling(compiler, StructuredOutput(regex="[ab]")) is once
    assert compiling(compiler, StructuredOutput(regex="[ab]"), "another tenant") is not once
    for number in range(MAX_CACHED):
        compiler.compile_now(choosing(f"{number}"))
    assert len(compiler._cache) == MAX_CACHED
    assert compiling(compiler, StructuredOutput(regex="[ab]")) is not once


def test_many_grammars_of_one_tenant_do_not_hold_up_anothers(compiler: GrammarCompiler) -> None:
    compiler.compile_now(choosing("a"))  # starts the processes
    many = [StructuredOutput(regex=f"(x|yz){{1,{number}}}") for number in range(1000, 1050)]

    async def count_left() -> int:
        # All are asked for in one go: the loop compiles nothing meanwhile
        asked = [compiler._compile(one, "a") for one in many]
        await compiler._compile(StructuredOutput(regex="[cd]"), "b")
        num_left = sum(not one.done() for one in asked)
        await asyncio.wait(asked)
        return num_left

    assert compiler._on_loop(count_left()).result(60) > len(many) // 5


@pytest.mark.parametrize(
    "wrong",
    [
        StructuredOutput(regex="([a-z"),
        StructuredOutput(grammar="start: start"),
        StructuredOutput(json_schema={"type": "thing"}),
        StructuredOutput(json_schema={"type": "integer", "multipleOf": 999_999_937}),
        StructuredOutput(json_schema='{"not":' * 300 + "1" + "}" * 300),
    ],
)
def test_one_that_cannot_be_compiled_is_a_wrong_request(
    compiler: GrammarCompiler, wrong: StructuredOutput
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^structured_output\.{wrong.kind}: .") as error:
        compiler.compile_now(SamplingParams(structured_output=wrong))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "not json", "{}"])
def test_it_needs_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"^structured_output: .*tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, frozenset(ENDS)).compile_now(choosing("a"))


# ---------------------------------------------------------------- logits


def request_of(params: SamplingParams, compiler: GrammarCompiler | None) -> Request:
    return Request.create(
        "a",
        [1],
        params,
        seed=0,
        eos_token_ids=frozenset(ENDS),
        max_model_len=100,
        grammar=compiler.compile_now(params) if compiler else None,
    )


def test_each_row_has_its_own_grammar_and_others_have_none(compiler: GrammarCompiler) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    requests = [
        request_of(choosing("a"), compiler),
        request_of(SamplingParams(banned_token_ids=(5,)), None),
        request_of(choosing("banana"), compiler),
        request_of(choosing("a", logit_bias={TEXTS.index("z"): 100}), compiler),
    ]
    finite = adjust(logits, requests).isfinite()
    for row, first in ((0, "a"), (2, "b"), (3, "a")):
        tokens = {TEXTS[token_id] for token_id in finite[row].nonzero().flatten().tolist()}
        assert first in tokens
        assert all(text and (first + "nana").startswith(text) for text in tokens)
    assert int(finite[1].sum()) == VOCAB_SIZE - 1


def test_min_tokens_keeps_the_end_away_only_while_something_else_fits(
    compiler: GrammarCompiler,
) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    for texts, has_end in ((("a", "ab"), False), (("a",), True)):
        request = request_of(choosing(*texts, min_tokens=5), compiler)
        assert request.grammar is not None
        request.token_ids.append(TEXTS.index("a"))
        assert request.grammar.accept(TEXTS.index("a"))
        left = set(adjust(logits, [request])[0].isfinite().nonzero().flatten().tolist())
        assert bool(left & ENDS) is has_end
        assert left


# ---------------------------------------------------------------- the engine


def test_an_engine_is_woken_when_a_grammar_is_ready_and_says_what_waits(llm: LLM) -> None:
    woken = threading.Event()
    engine = llm.engine
    engine.features.wake_with(woken.set)
    params = choosing("some text that nobody compiled before", max_tokens=60, temperature=0)
    request = request_of(params, None)
    engine.add_request(request)
    assert [r["status"] for r in describe(engine, ValueError())["requests"]] == [
        "WAITING_FOR_GRAMMAR"
    ]
    assert not engine.has_work
    assert woken.wait(30)
    outputs = [engine.step()]
    assert request.status is RequestStatus.RUNNING
    while engine.has_work:
        outputs.append(engine.step())
    text = TOKENIZER.decode([t for step in outputs for o in step.outputs for t in o.token_ids])
    assert text == "some text that nobody compiled before"
    engine.features.wake_with(lambda: None)


def test_an_output_ends_with_its_grammar_whatever_is_said_of_ends(llm: LLM) -> None:
    params = choosing("abc", ignore_eos=True, min_tokens=10, max_tokens=10, temperature=0)
    completion, streamed = llm.generate("x", params)[0], list(llm.stream("x", params))
    assert (completion.text, completion.finish_reason) == ("abc", FinishReason.STOP)
    assert "".join(delta.text for delta in streamed) == "abc"
    conversation = [{"role": "user", "content": "Well?"}]
    assert llm.chat(conversation, params)[0].text == "abc"


def test_a_request_without_a_token_left_ends_alone(llm: LLM) -> None:
    stuck = choosing("abc", banned_token_ids=tuple(i for i, t in enumerate(TEXTS) if "c" in t))
    first, second = llm.generate(["x", "x"], [stuck, choosing("abc")])
    assert first.finish_reason is FinishReason.ABORT
    assert first.text in ("", "a", "ab")
    assert (second.text, second.finish_reason) == ("abc", FinishReason.STOP)
    assert not llm.engine.requests
    llm.engine.check()


def test_a_wrong_grammar_runs_nothing(llm: LLM) -> None:
    wrong = SamplingParams(structured_output=StructuredOutput(regex="(["))
    with pytest.raises(InvalidRequestError, match=r"^structured_output\.regex: "):
        llm.generate(["x", "x"], [choosing("abc"), wrong])
    assert not llm.engine.requests


def test_a_stop_token_may_cut_an_output_short(llm: LLM) -> None:
    last = TEXTS.index("a")
    params = choosing("aaaaaaaa", stop_token_ids=(last,), allowed_token_ids=(last,), max_tokens=9)
    completion = llm.generate("x", params)[0]
    assert (completion.text, completion.finish_reason) == ("a", FinishReason.STOP)


def test_a_grammar_that_costs_too_much_ends_its_request_and_not_the_process(
    compiler: GrammarCompiler,
) -> None:
    """Regression: such a grammar took gigabytes and one of two threads until the process died."""
    schemas = [f'{{"type":"integer","multipleOf":{99999989 + i}}}' for i in range(3)]
    hostile = [
        request_of(SamplingParams(structured_output=StructuredOutput(json_schema=schema)), None)
        for schema in schemas
    ]
    for request in hostile:
        compiler.submit(request)
    assert compiler.compile_now(choosing("well")).accept(TEXTS.index("w"))
    ready: list[tuple[Request, object]] = []
    while len(ready) < len(hostile):
        ready += compiler.take_ready()
        time.sleep(0.01)
    for _, outcome in ready:
        assert isinstance(outcome, InvalidRequestError)
        assert "takes more than 1 s of processor time or 96 MiB of memory" in outcome.problem


def test_a_grammar_whose_steps_grow_ends_its_request(compiler: GrammarCompiler) -> None:
    """End a request whose tokens take ever longer, as all requests of the node wait for them."""
    structured_output = StructuredOutput(grammar='start: start start | "a" | start start start')
    state = compiler.compile_now(SamplingParams(structured_output=structured_output))
    began_at = time.thread_time()
    num_tokens = 0
    while not state.problem and num_tokens < 2000:
        state.allowed_bits()
        state.accept(TEXTS.index("a"))
        num_tokens += 1
    assert "ms a token of the time that all" in state.problem or "Too many items" in state.problem
    assert time.thread_time() - began_at < 0.005 * num_tokens + 1


# ---------------------------------------------------------------- behind a thought

OPEN, CLOSE = TEXTS.index("<"), TEXTS.index(">")


def thinking(*texts: str, **fields: object) -> SamplingParams:
    marks = {"close_token_ids": (CLOSE,), "open_marks": ((OPEN,),), **fields}
    return choosing(*texts, thinking=Thinking(**marks))  # type: ignore[arg-type]  # fields


def test_a_thought_costs_no_mask_and_the_grammar_holds_behind_it(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.compile_now(thinking(*CHOICES, is_open=True, budget_tokens=200))
    for token_id in range(1000, 1100):
        assert state.has_mask
        assert not state.needs_masks(0, 0)
        assert state.needs_masks(1, 0)  # the token in flight may be the closing mark
        assert state.accept(token_id)
    assert state.mask_s == 0
    assert state.accept(CLOSE)
    assert state.needs_masks(0, 0)
    assert allowed(state) == allowed_by_definition("")
    assert not state.accept(TEXTS.index("b") + 1)
    assert state.problem.startswith("structured_output: ")


def test_the_end_of_a_budget_allows_the_closing_mark_alone(compiler: GrammarCompiler) -> None:
    for params in (
        thinking("a", is_open=True, budget_tokens=2),
        SamplingParams(thinking=Thinking(close_token_ids=(CLOSE,), is_open=True, budget_tokens=2)),
    ):
        state = compiler.compile_now(params)
        assert state.accept(5)
        assert state.accept(6)
        assert allowed(state) == {CLOSE}
        assert not compiler_copy(compiler, params, [5, 6]).accept(7)


def compiler_copy(
    compiler: GrammarCompiler, params: SamplingParams, token_ids: list[int]
) -> GrammarState:
    state = compiler.compile_now(params)
    assert all(state.accept(token_id) for token_id in token_ids)
    return state


def test_a_model_may_begin_a_thought_or_the_answer(compiler: GrammarCompiler) -> None:
    assert allowed(compiler.compile_now(thinking("a"))) == {OPEN, TEXTS.index("a")}
    assert allowed(compiler.compile_now(thinking("a", must_open=True))) == {OPEN}
    state = compiler.compile_now(thinking("a"))
    assert state.accept(TEXTS.index("a"))
    assert state.is_terminated


@pytest.mark.parametrize("texts", [("a",), ()])
def test_a_thought_that_must_begin_has_a_token(
    compiler: GrammarCompiler, texts: tuple[str, ...]
) -> None:
    """Regression: a model could close the thought or end the output before the first token."""

    def begun(budget_tokens: int | None = None) -> GrammarState:
        marks = Thinking(
            budget_tokens=budget_tokens, close_token_ids=(CLOSE,), is_open=True, must_open=True
        )
        given = choosing(*texts) if texts else SamplingParams()
        return compiler.compile_now(dataclasses.replace(given, thinking=marks))

    state = begun(budget_tokens=9)
    assert state.num_free == 0
    assert allowed(state) == set(range(VOCAB_SIZE)) - {CLOSE} - ENDS
    assert not begun().accept(CLOSE)
    assert state.accept(7)
    assert state.num_free > 0
    assert state.accept(CLOSE)
    assert allowed(begun(budget_tokens=0)) == {CLOSE}
    assert begun().look_ahead([7, CLOSE], 1.0) == 2
    assert begun().look_ahead([CLOSE], 1.0) == 0


def test_an_end_within_a_thought_becomes_its_closing_mark(compiler: GrammarCompiler) -> None:
    end = min(ENDS)
    state = compiler.compile_now(thinking("a", is_open=True))
    assert state.corrected(end) == CLOSE
    assert state.corrected(7) == 7
    assert state.accept(CLOSE)
    assert state.corrected(end) == end
    stopping = thinking("a", is_open=True)
    stopping = dataclasses.replace(stopping, stop_token_ids=(end,))
    assert compiler.compile_now(stopping).corrected(end) == end
    alone = Thinking(close_token_ids=(CLOSE,), is_open=True, budget_tokens=9)
    assert compiler.compile_now(SamplingParams(thinking=alone)).corrected(end) == end


def test_masks_behind_drafts_are_those_of_the_tokens_one_by_one(compiler: GrammarCompiler) -> None:
    a = TEXTS.index("a")
    for fields, drafts, num_possible in (
        ({"is_open": True, "budget_tokens": 2}, [8, 9, CLOSE, a], 4),
        ({"is_open": True, "budget_tokens": 2}, [8, 9, 10, CLOSE], 2),
        ({"is_open": True}, [8, min(ENDS), a], 1),
        ({}, [OPEN, 8, CLOSE, a], 4),
        ({}, [OPEN, 8, CLOSE, 8], 3),
    ):
        params = thinking("a", "ab", **fields)
        state = compiler.compile_now(params)
        assert state.look_ahead(drafts, 10.0) == num_possible
        masks = state.allowed_bits(num_possible)
        for num_tokens in range(num_possible + 1):
            one = compiler_copy(compiler, params, drafts[:num_tokens])
            assert (masks[num_tokens] == one.allowed_bits()[0]).all()
        assert state.accept(drafts[0])  # the state itself has not moved
