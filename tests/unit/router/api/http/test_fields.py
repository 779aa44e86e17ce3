"""Unit tests of other servers' fields over HTTP: the effect of each, and the answer to the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.access.identity import Limits, Principal
from baton.api.outputs import FinishReason, RequestDelta, TokenLogprobs
from baton.api.structured_output import StructuredOutput
from baton.link.words import PrefillCommand
from baton.text.chat_template import ChatTemplate
from router.api.http import exchange
from router.api.http.conversation import chat_prompt, takes_effort
from router.api.http.ignored_fields import IGNORED_FIELDS_HEADER
from router.api.http.schema import ChatRequest, Message
from router.intake.cache_salts import CacheSalts
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, events_of, on_http
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT

pytestmark = pytest.mark.medium

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
EOS = min(TOKENIZER.special_token_ids)
SPECIAL = TOKENIZER.token_bytes(EOS).decode()


def say_ids(
    scene: HttpScene, command: PrefillCommand, token_ids: list[int], last: FinishReason
) -> None:
    """Have the nodes say these tokens, one by one."""
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        output = RequestDelta(
            command.request_id, index, (token_id,), last if is_last else None, epoch=command.epoch
        )
        if index == 0:
            scene.prefill.say(msgspec.structs.replace(output, prefill=PREFILL_RECEIPT))
        else:
            decode = DECODE_RECEIPT if is_last else None
            scene.decode.say(msgspec.structs.replace(output, decode=decode))


# ---------------------------------------------------------------- what has no effect


@on_http()
async def test_fields_without_an_effect_are_told_in_a_header_and_once_in_the_log(
    scene: HttpScene, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: such fields were errors, but OpenAI's clients send them with every request."""
    caplog.set_level(logging.WARNING)
    for number in range(2):
        reply = scene.post(verbosity="low", prediction={"type": "content"}, stream=number == 1)
        scene.say(await scene.command(number + 1), 0, "x", last=FinishReason.STOP)
        assert (await reply).headers[IGNORED_FIELDS_HEADER] == "verbosity, prediction"
    (line,) = [r.getMessage() for r in caplog.records]
    assert "fields without an effect: verbosity, prediction" in line
    reply = scene.post()
    scene.say(await scene.command(3), 0, "x", last=FinishReason.STOP)
    assert IGNORED_FIELDS_HEADER not in (await reply).headers


@on_http()
async def test_names_of_fields_in_headers_and_logs_are_bounded(
    scene: HttpScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    names = ["x" * 200_000, "a\r\nSet-Cookie: b", "ä", *(f"f{i}" for i in range(3000))]
    fields: dict[str, Any] = dict.fromkeys(names, 1)
    response = await scene.post(**fields, n=0)
    assert response.status == 400  # errors tell it, too
    header = response.headers[IGNORED_FIELDS_HEADER]
    assert header.startswith(f"{'x' * 64}, ?, ?, f0, f1")
    assert header.endswith(f"and {len(names) - 16} more")
    assert len(header) < 2000
    assert all(len(record.getMessage()) < 2500 for record in caplog.records)


@on_http(strict_fields=True)
async def test_an_operator_may_want_them_refused(scene: HttpScene) -> None:
    response = await scene.post(verbosity="low")
    assert response.status == 400
    error = (await response.json())["error"]
    assert error["message"] == "verbosity: is no field that Baton knows"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, 'modalities: must be ["text"]'),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template: is the operator's choice"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions: is not supported: use tools"),
        *(
            (
                path,
                {"prompt_logprobs": 1, "stream": True},
                "prompt_logprobs: is for stream: false only",
            )
            for path in (CHAT, "/v1/completions")
        ),
        (
            "/v1/completions",
            {"guided_json": {}, "guided_regex": "a"},
            "guided_regex: cannot be together with guided_json",
        ),
        ("/v1/completions", {"guided_json": "{"}, "guided_json: is not JSON"),
        ("/v1/completions", {"guided_regex": "("}, "guided_regex: "),
        ("/v1/completions", {"cache_salt": "x" * 257}, "cache_salt: must have at most 256"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    path: str, fields: dict[str, Any], message: str
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        prompt = {"messages": MESSAGES} if path == CHAT else {}
        response = await scene.post(path, **prompt, **fields)
        assert response.status == 400
        assert (await response.json())["error"]["message"].startswith(message)
        assert scene.prefill.of(PrefillCommand) == []

    run()


# ---------------------------------------------------------------- what has one


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": {"type": "null"}}, StructuredOutput(json_schema={"type": "null"})),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
    ],
)
def test_older_names_of_structured_outputs_hold(
    fields: dict[str, Any], expected: StructuredOutput
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = scene.post(**fields)
        command = await scene.command()
        assert command.sampling_params.structured_output == expected
        scene.say(command, 0, "a", last=FinishReason.STOP)
        assert (await reply).status == 200

    run()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": True}, "ab"),
        ({"skip_special_tokens": False}, f"a{SPECIAL}b"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            f"a{SPECIAL}b{SPECIAL}",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_special_tokens_are_shown_if_that_is_asked_for(
    fields: dict[str, Any], expected: str, path: str
) -> None:
    """The one that ends the output is a stop like others, as with vLLM."""

    @on_http()
    async def run(scene: HttpScene) -> None:
        a, b = TOKENIZER.encode("a"), TOKENIZER.encode("b")
        prompt = {"messages": MESSAGES} if path == CHAT else {}
        reply = scene.post(path, **prompt, **fields)
        say_ids(scene, await scene.command(), [*a, EOS, *b, EOS], FinishReason.STOP)
        (choice,) = (await (await reply).json())["choices"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == expected

    run()


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one two")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_part_of_the_text_if_that_is_asked_for(
    include: bool, expected: str, stream: bool
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = scene.post(stop="two", include_stop_str_in_output=include, stream=stream)
        scene.say(await scene.command(), 0, "one two three")
        response = await reply
        if stream:
            *chunks, _ = events_of(await response.text())
            choices = [chunk["choices"][0] for chunk in chunks]
        else:
            choices = (await response.json())["choices"]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"

    run()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_when_they_are_asked_for(path: str, stream: bool) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        prompt = {"messages": MESSAGES} if path == CHAT else {}
        reply = scene.post(path, stream=stream, return_token_ids=True, n=2, **prompt)
        commands = [await scene.command(number) for number in (1, 2)]
        texts = ["one two", "three"]
        for command, text in zip(commands, texts, strict=True):
            scene.say(command, 0, text, last=FinishReason.STOP)
        response = await reply
        bodies = events_of(await response.text())[:-1] if stream else [await response.json()]
        found: dict[int, list[int]] = {0: [], 1: []}
        prompts = []
        for body in bodies:
            prompts += [body["prompt_token_ids"]] if "prompt_token_ids" in body else []
            for choice in body["choices"]:
                found[choice["index"]] += choice["token_ids"]
                prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
        assert [found[0], found[1]] == [TOKENIZER.encode(text) for text in texts]
        assert len(prompts) == (1 if path == CHAT and not stream else 2)
        assert all(ids == list(commands[0].prompt_token_ids) for ids in prompts)

    run()


@on_http()
async def test_prompts_are_not_returned_a_hundredfold(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_RETURNED_TOKEN_IDS", 100)
    response = await scene.post(prompt=[70] * 51, n=2, return_token_ids=True)
    assert response.status == 400
    assert (await response.json())["error"]["message"].startswith("return_token_ids: prompts of")


@on_http()
async def test_logprobs_of_a_prompt_come_as_vllm_has_them(scene: HttpScene) -> None:
    """With fewer of the best in the echo's, whose number is a field of its own."""
    prompt = TOKENIZER.encode("def f")
    reply = scene.post(
        prompt=prompt, prompt_logprobs=2, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    command = await scene.command()
    assert command.sampling_params.prompt_logprobs == 2
    top = ((prompt[1], -0.1), (EOS, -2.0))
    told = (None, *(TokenLogprobs(-0.1, top) for _ in prompt[1:]))
    drawn = (TokenLogprobs(-0.5, top[:1]),)
    scene.prefill.say(
        RequestDelta(
            command.request_id,
            0,
            (260,),
            FinishReason.LENGTH,
            drawn,
            told,
            epoch=command.epoch,
            prefill=PREFILL_RECEIPT,
        )
    )
    (choice,) = (await (await reply).json())["choices"]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    by_rank = [(entry["rank"], entry["decoded_token"]) for entry in second.values()]
    assert by_rank == [(1, TOKENIZER.token_bytes(prompt[1]).decode()), (2, SPECIAL)]
    assert [entry["logprob"] for entry in second.values()] == pytest.approx([-0.1, -2.0])
    assert list(second) == [str(prompt[1]), str(EOS)]
    assert len(choice["prompt_logprobs"]) == len(prompt)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


@on_http()
async def test_logprobs_of_a_chats_prompt_come_with_its_answer(scene: HttpScene) -> None:
    """Regression: prompt logprobs were left out, with only a line in the log."""
    reply = scene.post(CHAT, messages=MESSAGES, prompt_logprobs=0, max_tokens=1)
    command = await scene.command()
    assert command.sampling_params.prompt_logprobs == 0
    prompt = command.prompt_token_ids
    told = (None, *(TokenLogprobs(-0.1) for _ in prompt[1:]))
    scene.prefill.say(
        RequestDelta(
            command.request_id,
            0,
            (260,),
            FinishReason.LENGTH,
            (),
            told,
            epoch=command.epoch,
            prefill=PREFILL_RECEIPT,
        )
    )
    response = await reply
    assert IGNORED_FIELDS_HEADER not in response.headers
    first, second, *rest = (await response.json())["prompt_logprobs"]
    assert first is None
    assert second == {
        str(prompt[1]): {
            "logprob": pytest.approx(-0.1),
            "rank": None,
            "decoded_token": TOKENIZER.token_bytes(prompt[1]).decode(),
        }
    }
    assert len(rest) == len(prompt) - 2


@on_http(trusts_templates=True)
async def test_a_chat_brings_its_own_template_where_the_operator_trusts_it(
    scene: HttpScene,
) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    reply = scene.post(CHAT, messages=MESSAGES, chat_template=template)
    command = await scene.command()
    text = "".join(f"<{message['content']}>" for message in MESSAGES)
    assert list(command.prompt_token_ids) == TOKENIZER.encode(text)
    scene.say(command, 0, "x", last=FinishReason.STOP)
    assert (await reply).status == 200


@on_http()
async def test_offsets_of_an_echo_that_shows_special_tokens_count_them(scene: HttpScene) -> None:
    """A special token that a client wrote in its prompt is part of the text."""
    prompt = f"a{SPECIAL}b"
    reply = scene.post(prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    command = await scene.command()
    assert EOS in command.prompt_token_ids
    none = TokenLogprobs(-1.0)
    told = (None, *(none for _ in command.prompt_token_ids[1:]))
    scene.prefill.say(
        RequestDelta(
            command.request_id,
            0,
            (260,),
            FinishReason.LENGTH,
            (none,),
            told,
            epoch=command.epoch,
            prefill=PREFILL_RECEIPT,
        )
    )
    (choice,) = (await (await reply).json())["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == prompt
    assert [prompt[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens


@on_http()
async def test_what_the_chat_template_is_told(scene: HttpScene) -> None:
    """The demo model's looks at add_generation_prompt alone, which is told of the effort."""
    lengths = []
    given: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": False},
        {"reasoning_effort": "none", "documents": [{}]},
    ]
    for number, fields in enumerate(given):
        reply = scene.post(CHAT, messages=MESSAGES, modalities=["text"], **fields)
        command = await scene.command(number + 1)
        lengths.append(len(command.prompt_token_ids))
        scene.say(command, 0, "x", last=FinishReason.STOP)
        told = (await reply).headers.get(IGNORED_FIELDS_HEADER, "")
        assert told == ("reasoning_effort" if "reasoning_effort" in fields else "")
    assert lengths[1] < lengths[0] == lengths[2]


# ---------------------------------------------------------------- cache salts


def principal(tenant: str, group: str = "") -> Principal:
    return Principal(name=tenant, tenant=tenant, cache_group=group, limits=Limits())


def test_a_clients_word_narrows_who_shares_a_prompt_and_never_widens() -> None:
    salts = CacheSalts(b"a secret of the router")
    callers = [principal(""), principal("a"), principal("b"), principal("a", "g")]
    words = ["", "x", "y", "g", "a", "tenant"]
    found = {(i, word): salts.of(who, word) for i, who in enumerate(callers) for word in words}
    assert len(set(found.values())) == len(found)  # nobody gets another's, whatever they say
    assert salts.of(principal("b", "g"), "x") == found[3, "x"]  # who shares goes on to, with both
    assert salts.of_tenant(callers[3], "x") != salts.of_tenant(callers[3])


@on_http()
async def test_the_salt_of_a_request_has_the_clients_word_in_it(scene: HttpScene) -> None:
    salts = []
    for number, fields in enumerate([{}, {"cache_salt": "x"}, {"cache_salt": "x"}]):
        reply = scene.post(**fields)
        command = await scene.command(number + 1)
        salts.append(command.cache_salt)
        scene.say(command, 0, "x", last=FinishReason.STOP)
        await reply
    assert salts[0] == b"" != salts[1] == salts[2]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, Path("here"))


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", True),
        ("{{ enable_thinking }}", "none", True),
        ("{{ enable_thinking }}", "low", True),
        ("{{ thinking }}", "high", True),
        ("{{ messages }}", "none", False),
    ],
)
def test_an_effort_has_an_effect_where_the_template_knows_one(
    source: str, effort: str, expected: bool
) -> None:
    assert takes_effort(template(source)) is expected
    assert not takes_effort(None)
    options = chat_prompt(
        ChatRequest(
            model="m", messages=[Message(role="user", content="x")], reasoning_effort=effort
        )
    ).template_options
    shown = template(source).render([], options=options)
    assert (shown != template(source).render([])) is expected
