"""Unit tests of data sets: files in other load generators' formats, and the requests from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ConfigError
from loadtest.load.datasets import read_dataset
from loadtest.load.generate import Lengths
from loadtest.load.prompts import Message, WrittenPrompt
from loadtest.load.workload import PlannedRequest, planned_requests
from loadtest.plan import ClosedLoop, LoadPlan
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

SHAREGPT = [
    {"id": "a", "conversations": [
        {"from": "system", "value": "Be short."}, {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello, who are you?"}, {"from": "human", "value": "Nobody"},
        {"from": "gpt", "value": "I see."},
    ]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "Begin"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "What is it?"}]},
]  # fmt: skip
LINES = [
    {"prompt": "Once upon", "output_tokens": 7, "prompt_tokens_count": 2},
    {"text": "A time"},
    {"text_input": "there was", "output_length": 9},
    {"session_id": "s", "turns": [{"text": "One"}, {"text": "Two", "delay": 250}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
                  {"role": "user", "content": "Again"}]},
]  # fmt: skip


def write(path: Path, entries: Any, is_lines: bool = False) -> Path:
    text = "\n".join(map(json.dumps, entries)) if is_lines else json.dumps(entries)
    path.write_text(text, encoding="utf-8")
    return path


def sent(path: Path, num_requests: int, seed: int = 0, **options: Any) -> list[PlannedRequest]:
    plan = LoadPlan(
        load=ClosedLoop(concurrency=1), input_lengths=Lengths(1), output_lengths=Lengths(33),
        num_requests=num_requests, dataset=path, seed=seed, **options,
    )  # fmt: skip
    return list(planned_requests(plan))


def messages(request: PlannedRequest) -> tuple[Message, ...]:
    assert isinstance(request.prompt, WrittenPrompt)
    return request.prompt.messages


def test_sharegpt_is_conversations_with_their_recorded_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "sharegpt.json", SHAREGPT)
    conversations = read_dataset(path)
    assert [len(one) for one in conversations] == [2, 1]  # the second asks nothing
    requests = sent(path, 3)
    turns = [request for request in requests if len(messages(request)) > 1]
    assert [request.turn for request in turns] == [0, 1]
    system, first = messages(turns[0])
    assert (system.role, first) == ("system", Message("user", "Hi"))
    assert system.content.endswith("] Be short.")
    assert messages(turns[1]) == (
        system, first, Message("assistant", "Hello, who are you?"), Message("user", "Nobody"),
    )  # fmt: skip
    assert {request.output_length for request in requests} == {33}
    with_tokenizer = sent(path, 3, tokenizer=DEMO_MODEL)
    lengths = {len(messages(r)[-1].content): r.output_length for r in with_tokenizer}
    assert lengths[len("Hi")] > lengths[len("Nobody")] >= 2
    with pytest.raises(ConfigError, match=r"tokenizer: .*no such"):
        sent(path, 1, tokenizer=tmp_path / "no such")


def test_lines_are_prompts_turns_or_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", LINES, is_lines=True)
    requests = sent(path, 7)
    texts = [messages(r) for r in requests if not messages(r)[0].role]
    assert {text[0].content.split("] ")[1] for text in texts} == {
        "Once upon",
        "A time",
        "there was",
    }
    lengths = {
        messages(r)[0].content.split("] ")[1]: r.output_length for r in requests if r.turn == 0
    }
    assert (lengths["Once upon"], lengths["A time"], lengths["there was"]) == (7, 33, 9)
    [two] = [r for r in requests if messages(r)[-1].content == "Two"]
    assert (two.turn, two.think_s) == (1, 0.25)
    assert [one.role for one in messages(two)] == ["user", "assistant", "user"]
    [again] = [r for r in requests if messages(r)[-1].content == "Again"]
    assert messages(again)[1] == Message("assistant", "Ho")


def test_no_run_and_no_round_meets_what_another_has_left_in_a_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", LINES[:3], is_lines=True)
    beginnings = [{messages(r)[0].content for r in sent(path, 6, seed=seed)} for seed in (1, 2)]
    assert [len(one) for one in beginnings] == [6, 6]  # the data came twice
    assert not beginnings[0] & beginnings[1]
    assert {messages(r)[0].content for r in sent(path, 6, seed=1)} == beginnings[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no prompt in it"),
        ("[]", "has no prompt in it"),
        ("[{", "Expecting property name"),
        ('{"prompt": "a"}\nnonsense', "line 2: not valid JSON"),
        ('{"name": "a"}', "line 1: must be an object with conversations, messages, turns or one"),
        ('[{"conversations": [{"from": "dog", "value": "a"}]}]', "entry 1: a message must have"),
        ('{"conversations": 3}', "line 1: must be a list of messages"),
        ('{"turns": 3}', "turns: must be a list"),
        ('{"turns": [{"text": 3}]}', "prompt: must be a text"),
        ('{"prompt": "a", "output_tokens": 0}', "output_length: must be 1"),
        ('{"prompt": "a", "delay": -1}', "delay: must be milliseconds"),
        ('{"prompt": "a", "delay": true}', "delay: must be milliseconds"),
        ("3", "line 1: must be an object"),
    ],
)
def test_what_is_no_data_set_is_said_with_its_place(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "d").write_text(text)
    with pytest.raises(ConfigError, match=f"dataset: .*{problem}"):
        read_dataset(tmp_path / "d")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "none")
