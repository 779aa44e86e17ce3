"""Unit tests of Intake: which fields of a request reach its call, and their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.access.identity import ANYBODY, Limits, Principal
from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.tokenizer import Tokenizer
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.intake.intake import Intake
from router.intake.texts import ChatPrompt
from router.policies.least_tokens import LeastTokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.router.intakes import make_intake as intake_with
from tests.fakes.router.nodes import make_pool
from tests.fakes.router.router_scene import asynchronous

TOKENIZER = Tokenizer(DEMO_MODEL)
PARAMS = SamplingParams(max_tokens=1)
TERMS = Terms(
    received_at=0.0,
    session_id="s",
    priority=-7,
    principal=Principal(name="alice", tenant="a", limits=Limits(most_urgent_priority=-7)),
)


def make_intake() -> Intake:
    dispatcher = Dispatcher(make_pool(), LeastTokens())
    return intake_with(dispatcher, None, vocab_size=10, default_timeout_s=60.0)


async def accept(*, request_id: str = "", **changes: Any) -> Call:
    terms = replace(TERMS, **changes)
    return await make_intake().accept([1, 2, 3], PARAMS, terms, request_id)


@asynchronous
async def test_a_call_knows_its_session_priority_and_client() -> None:
    call = await accept()
    assert (call.terms.session_id, call.terms.priority, call.terms.principal.name) == (
        "s",
        -7,
        "alice",
    )


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("request_id", "x" * 129, "must have at most 128 characters, got 129"),
        ("session_id", "x" * 257, "must have at most 256 characters, got 257"),
        ("priority", -8, "must be -7 or more with this API key, got -8"),
        ("priority", 2**31, "must be -2147483648 to 2147483647, got 2147483648"),
    ],
)
def test_what_is_out_of_its_limit_is_named(field: str, value: Any, problem: str) -> None:
    @asynchronous
    async def run() -> None:
        with pytest.raises(InvalidRequestError, match=f"^{field}: {problem}$"):
            await accept(**{field: value})

    run()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"integer","multipleOf":99999989}'),
        ("grammar", "\n" * 65_000),
        ("regex", "("),
    ],
)
def test_a_grammar_that_cannot_be_had_is_refused_here_and_named(kind: str, text: str) -> None:
    """The first one ended the nodes, the second held up router and nodes for a minute each."""
    dispatcher = Dispatcher(make_pool(), LeastTokens())
    intake = intake_with(dispatcher, TOKENIZER, vocab_size=4096, default_timeout_s=60.0)

    async def ask(kind: str, text: str) -> None:
        structured_output = StructuredOutput(**{kind: text})  # type: ignore[arg-type]  # by name
        params = SamplingParams(max_tokens=1, structured_output=structured_output)
        await intake.accept([1, 2, 3], params, TERMS)

    @asynchronous
    async def run() -> None:
        for _ in range(3):  # found out once
            with pytest.raises(InvalidRequestError) as caught:
                await ask(kind, text)
            assert caught.value.field == f"structured_output.{kind}"
        await ask("regex", "[a-z]+")

    run()
    intake.close()


@pytest.mark.medium
def test_the_first_chat_and_the_first_schema_start_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = Dispatcher(make_pool(), LeastTokens())
    intake = intake_with(dispatcher, TOKENIZER, vocab_size=4096, default_timeout_s=60.0)
    schema = StructuredOutput(json_schema='{"type":"object"}')
    chat = ChatPrompt([{"role": "user", "content": "hello"}])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started for a request")

    @asynchronous
    async def run() -> None:
        assert not intake.reader.is_starting
        intake.reader.start()
        assert intake.reader.is_starting
        await intake.reader.prepare()
        assert not intake.reader.is_starting
        monkeypatch.setattr("baton.processes.worker_processes.subprocess.Popen", refuse)
        params = SamplingParams(max_tokens=1, structured_output=schema)
        call = await intake.accept(chat, params, TERMS)
        assert call.prompt_token_ids == TOKENIZER.encode_chat(list(chat.messages))

    run()
    intake.close()


@asynchronous
async def test_who_is_not_told_otherwise_may_wait_longer_and_not_go_before_others() -> None:
    keyed = Principal(name="alice", tenant="alice")
    with pytest.raises(InvalidRequestError, match=r"^priority: must be 0 or more with this"):
        await accept(principal=keyed, priority=-1)
    assert (await accept(principal=keyed, priority=5)).terms.priority == 5
    # Without keys there is one tenant, and what is urgent is its own affair.
    call = await accept(principal=ANYBODY, priority=-(2**31))
    assert call.terms.priority == -(2**31)
