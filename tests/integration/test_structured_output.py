"""500 random schemas, regexes, grammars and choices: every output fits, in one process and split.

What fits is judged by jsonschema, `re`, membership and a parser of the test's own.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton import AsyncClient, Client, Completion, FinishReason, SamplingParams, StructuredOutput
from baton.api.errors import InvalidRequestError
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from router.intake.answers.call_forms import Function
from router.intake.parsers import TOOL_CALL_PARSERS
from router.intake.parsers.base import ParserContext
from router.intake.parsers.choice import OutputParsers
from tests.fakes.answers.parsed_outputs import parse
from tests.fakes.answers.structured_cases import MAX_TOKENS, Case, make_cases

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(400)]

NUM_CASES = 500


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(str(demo_model), dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(NUM_CASES, seed=20)


@pytest.fixture(scope="module")
def alone(llm: LLM, cases: list[Case]) -> list[Completion]:
    return llm.generate([case.prompt for case in cases], [case.params for case in cases])


def assert_valid(cases: list[Case], completions: list[Completion]) -> None:
    for case, completion in zip(cases, completions, strict=True):
        assert completion.finish_reason is FinishReason.STOP, (case, completion.text)
        assert case.is_valid(completion.text), (case.params.structured_output, completion.text)


def test_every_output_fits_in_one_process(cases: list[Case], alone: list[Completion]) -> None:
    assert_valid(cases, alone)
    assert len({completion.text for completion in alone}) > NUM_CASES // 2  # not all trivial


def test_every_output_fits_and_is_the_same_through_the_split_system(
    deployment: LocalDeployment, cases: list[Case], alone: list[Completion]
) -> None:
    async def run() -> list[Completion]:
        async with AsyncClient(deployment.config.listen) as client:
            return await asyncio.gather(
                *(client.generate(case.prompt, case.params) for case in cases)
            )

    split = asyncio.run(run())
    assert_valid(cases, split)
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    # Most were decoded on the decode node, where the grammar's state is made from token 1.
    handed_over = [c for c in split if c.receipt is not None and c.receipt.decode is not None]
    assert len(handed_over) > NUM_CASES // 2


LARK = """\
start: edit~1..3
edit: ("+" | "-" | "@@ \\"") WORD? NL
WORD: /[a-c"\\\\\\/é]{1,4}/
NL: /\\n/
"""
EDITS = re.compile(r'((\+|-|@@ ")([a-c"\\/é]{1,4})?\n){1,3}')
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "size": {"enum": ["small", "large"]},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", TOOL_CALL_PARSERS.names())
def test_every_forced_call_is_read_by_its_familys_parser_and_fits(llm: LLM, form: str) -> None:
    parsers = OutputParsers(llm.tokenizer, form, "none")
    functions = [Function("patch", held_text=("input", LARK)), Function("city", CITY)]
    tools: dict[str, dict[str, Any]] = {"patch": {"properties": {"input": {}}}, "city": CITY}
    for index, function in enumerate(functions):
        grammar, is_common = parsers.forced_calls([function], several=False)
        params = [
            SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=temperature,
                seed=seed,
                structured_output=StructuredOutput(grammar=grammar),
            )
            for seed, temperature in enumerate((0.0, 1.0, 1.5, 3.0))
        ]
        for completion in llm.generate(["def edit("] * len(params), params):
            assert completion.finish_reason is FinishReason.STOP, completion.text
            parser = parsers.make(ParserContext(tools), is_forced=is_common, is_constrained=True)
            (call,) = parse(parser, [completion.text])
            assert isinstance(call, tuple), completion.text
            name, written = call
            arguments = json.loads(written)
            assert name == ("patch", "city")[index]
            if name == "patch":
                assert EDITS.fullmatch(arguments["input"]), completion.text
            else:
                jsonschema.validate(arguments, CITY)


HOSTILE = {
    "not a schema": StructuredOutput(json_schema={"type": "thing"}),
    "unknown keyword": StructuredOutput(json_schema={"not": {}}),
    "remote reference": StructuredOutput(json_schema={"$ref": "http://127.0.0.1:9/schema"}),
    "broken regex": StructuredOutput(regex="([a-z"),
    "deep regex": StructuredOutput(regex="(" * 20_000 + "a" + ")" * 20_000),
    "unknown rule": StructuredOutput(grammar="start: nothing"),
    "no grammar": StructuredOutput(grammar="once upon a time"),
    "deep grammar": StructuredOutput(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "too many rules": StructuredOutput(
        grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "x"'
    ),
    "a rule of itself": StructuredOutput(grammar="start: start"),
    "deep schema": StructuredOutput(json_schema='{"not":' * 500 + "{}" + "}" * 500),
    "schema that multiplies": StructuredOutput(
        json_schema={
            "allOf": [
                {"anyOf": [{"properties": {f"{i}_{j}": {"const": j}}} for j in range(12)]}
                for i in range(12)
            ]
        }
    ),
    "huge repetition": StructuredOutput(regex="(a{1000}){1000}"),
    "huge repetition in a schema": StructuredOutput(
        json_schema={"type": "string", "pattern": "^((((a{99}){99}){99}){99}){99}$"}
    ),
    "rules that double": StructuredOutput(
        grammar="start: r0\n"
        + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40))
        + 'r40: "x"'
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_or_too_much_is_refused_by_one_line(
    deployment: LocalDeployment, llm: LLM, name: str
) -> None:
    params = SamplingParams(max_tokens=20, structured_output=HOSTILE[name])
    with Client(deployment.config.listen) as client:
        with pytest.raises(InvalidRequestError, match="structured_output") as refused:
            client.generate("x", params, timeout_s=30)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400
        assert client.generate("def f(", SamplingParams(max_tokens=3)).token_ids  # all alive


@pytest.mark.parametrize("texts", [("bca", "bcx"), ("abc", "xbc")])  # on P, on D
def test_bans_that_leave_no_token_fail_the_request_alone(
    deployment: LocalDeployment, llm: LLM, texts: tuple[str, ...]
) -> None:
    assert llm.tokenizer is not None
    params = SamplingParams(
        structured_output=StructuredOutput(choice=texts),
        allowed_token_ids=tuple(i for text in "ax" for i in llm.tokenizer.encode(text)),
    )
    assert llm.generate("x", params)[0].finish_reason is FinishReason.ABORT
    with Client(deployment.config.listen) as client:
        with pytest.raises(InvalidRequestError, match=r"^structured_output: no token is left"):
            client.generate("x", params, timeout_s=30)
        assert client.generate("def f(", SamplingParams(max_tokens=3)).token_ids


CHAINS = {
    "rules": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(990)) + 'r990: "x"',
    "terminals": "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(990)) + 'R990: "x"',
}
DEEP = {name: StructuredOutput(grammar=text) for name, text in CHAINS.items()} | {
    keyword: StructuredOutput(
        json_schema={
            "$ref": "#/$defs/0",
            "$defs": {
                **{str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(1500)},
                "1500": {"const": "x"},
            },
        }
    )
    for keyword in ("allOf", "anyOf")
}


@pytest.mark.parametrize("name", DEEP)
def test_references_as_deep_as_they_fit_in_a_request_end_no_process(
    deployment: LocalDeployment, name: str
) -> None:
    with Client(deployment.config.listen) as client:
        params = SamplingParams(max_tokens=20, structured_output=DEEP[name])
        assert client.generate("def f(", params, timeout_s=30).text in ("x", '"x"')
