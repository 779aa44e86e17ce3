"""The equality that defines the project: split == one process == transformers, token for token."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
import transformers

from baton import Completion, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.processes.deployments import complete_all

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(400)]

# Prompts, and where in the text the first of them begins: none begins as one of the others does.
SOME, MANY = (24, 0), (64, 4000)
MAX_PROMPT_TOKENS = 1000
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(str(demo_model), dtype="float32", num_threads=1)


@pytest.fixture(
    scope="module", params=[SOME, pytest.param(MANY, marks=pytest.mark.large)], ids=["24", "64"]
)
def prompts(request: pytest.FixtureRequest, llm: LLM) -> list[list[int]]:
    """Prompts of 1 to 1,000 tokens of real text: slices of a module of the standard library."""
    num_prompts, start = request.param
    assert llm.tokenizer is not None
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    token_ids = llm.tokenizer.encode(text)[start:]
    lengths = [
        1 + index * (MAX_PROMPT_TOKENS - 1) // (num_prompts - 1) for index in range(num_prompts)
    ]
    assert (lengths[0], lengths[-1]) == (1, MAX_PROMPT_TOKENS)
    return [token_ids[37 * index : 37 * index + length] for index, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def split(deployment: LocalDeployment, prompts: list[list[int]]) -> list[Completion]:
    return complete_all(deployment, prompts, GREEDY)


def test_split_equals_one_process_greedily(
    split: list[Completion], llm: LLM, prompts: list[list[int]]
) -> None:
    alone = llm.generate(prompts, GREEDY)
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    assert [c.text for c in split] == [c.text for c in alone]
    assert [c.finish_reason for c in split] == [c.finish_reason for c in alone]


def test_split_equals_transformers_greedily(
    split: list[Completion], demo_model: Path, prompts: list[list[int]]
) -> None:
    """Some as `generate` says; of all, each token is the likeliest one behind those before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for prompt, completion in zip(prompts, split, strict=True):
        tokens = completion.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
        assert tuple(logits[len(prompt) - 1 :].argmax(-1).tolist()) == tokens
        assert not ends & set(tokens[:-1])
        assert len(tokens) == GREEDY.max_tokens or tokens[-1] in ends
    for prompt, completion in list(zip(prompts, split, strict=True))[::8]:
        input_ids = torch.tensor([prompt])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=GREEDY.max_tokens,
            pad_token_id=0,
        )
        assert tuple(output[0, len(prompt) :].tolist()) == completion.token_ids


def test_prompts_went_through_the_decode_node(
    split: list[Completion], prompts: list[list[int]]
) -> None:
    for prompt, completion in zip(prompts, split, strict=True):
        receipt = completion.receipt
        assert receipt is not None
        assert receipt.num_prompt_tokens == len(prompt)
        assert receipt.num_output_tokens == len(completion.token_ids)
        if len(completion.token_ids) == 1:  # ended with token 1, on the prefill node
            assert receipt.decode is None
            continue
        assert receipt.decode is not None
        assert receipt.decode.num_prompt_tokens_computed == 0
        assert receipt.decode.num_forwards == len(completion.token_ids) - 1
        # A second attempt finds what the first one left in the decode node's cache.
        num_sent = len(prompt) - receipt.decode.num_cached_tokens
        assert receipt.decode.push.num_blocks == -(-num_sent // 16)
        assert receipt.decode.push.num_bytes > 0
        assert receipt.decode.push.transport.startswith("nixl")


def test_prompts_that_the_decode_node_knows_give_the_same_and_only_the_rest_travels(
    split: list[Completion], deployment: LocalDeployment, prompts: list[list[int]]
) -> None:
    again = complete_all(deployment, prompts, GREEDY)
    assert [c.token_ids for c in again] == [c.token_ids for c in split]
    for prompt, completion in zip(prompts, again, strict=True):
        assert completion.receipt is not None
        decode = completion.receipt.decode
        if decode is None:
            continue
        assert decode.num_cached_tokens % 16 == 0
        if decode.push.transport:
            assert decode.num_cached_tokens == len(prompt) // 16 * 16
            assert decode.push.num_blocks == -(-len(prompt) // 16) - decode.num_cached_tokens // 16
            assert decode.num_prompt_tokens_computed == 0
        else:  # the short-cut: it computed the rest itself
            assert decode.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 0
            assert decode.num_prompt_tokens_computed == len(prompt) - decode.num_cached_tokens


def test_split_equals_one_process_with_seeds(
    deployment: LocalDeployment, llm: LLM, prompts: list[list[int]]
) -> None:
    chosen = prompts[::3]
    params = [
        SamplingParams(
            max_tokens=20,
            temperature=0.7 + 0.1 * (index % 5),
            top_k=(0, 40)[index % 2],
            top_p=(1.0, 0.9, 0.8)[index % 3],
            seed=index - 3,
        )
        for index in range(len(chosen))
    ]
    split = complete_all(deployment, chosen, params)
    alone = llm.generate(chosen, params)
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in alone}) > len(alone) // 2


def test_split_equals_one_process_with_penalties_and_logprobs(
    deployment: LocalDeployment, llm: LLM, prompts: list[list[int]]
) -> None:
    chosen = prompts[1::4]
    params = [
        SamplingParams(
            max_tokens=20,
            min_tokens=index % 4,
            temperature=0.8 * (index % 3),
            min_p=0.05,
            seed=index,
            repetition_penalty=1.2,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias=((prompt[0], -3.0), (prompt[-1], 1.5)),
            banned_token_ids=(prompt[0] + 1,),
            logprobs=index % 4,
        )
        for index, prompt in enumerate(chosen)
    ]
    split = complete_all(deployment, chosen, params)
    alone = llm.generate(chosen, params)
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    plain = llm.generate(chosen, SamplingParams(max_tokens=20, temperature=0))
    assert all(a.token_ids != b.token_ids for a, b in zip(alone, plain, strict=True))
    for one, other, param in zip(split, alone, params, strict=True):
        assert len(one.logprobs) == len(other.logprobs) == len(one.token_ids)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token_id for token_id, _ in mine.top] == [t for t, _ in theirs.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
            assert len(mine.top) == param.logprobs


def test_prompt_logprobs_are_those_of_one_process_and_need_no_cold_cache(
    split: list[Completion], deployment: LocalDeployment, llm: LLM, prompts: list[list[int]]
) -> None:
    chosen = prompts[::7]  # the prefill node has computed them before, for `split`
    params = [
        SamplingParams(max_tokens=1 + index % 3, temperature=0, prompt_logprobs=index % 4)
        for index in range(len(chosen))
    ]
    found = complete_all(deployment, chosen, params)
    alone = llm.generate(chosen, params)
    for prompt, param, one, other in zip(chosen, params, found, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(prompt)
        assert one.prompt_logprobs[0] is other.prompt_logprobs[0] is None
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert len(mine.top) == len(theirs.top) == param.prompt_logprobs
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-3)


def test_a_stop_string_ends_the_output_at_the_same_token(
    deployment: LocalDeployment, llm: LLM, prompts: list[list[int]]
) -> None:
    chosen = prompts[::8]
    whole = llm.generate(chosen, GREEDY)
    params = [
        SamplingParams(max_tokens=20, temperature=0, stop=(c.text[len(c.text) // 2 :][:3] or "x",))
        for c in whole
    ]
    split = complete_all(deployment, chosen, params)
    alone = llm.generate(chosen, params)
    for one, other, param in zip(split, alone, params, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.finish_reason is other.finish_reason
        assert param.stop[0] not in one.text
        assert one.receipt is not None
        assert one.receipt.num_output_tokens == len(one.token_ids)
    assert any(len(c.token_ids) < 20 for c in split)


def test_text_and_token_ids_give_the_same(deployment: LocalDeployment, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "def read_config(path):"
    as_text, as_ids = complete_all(deployment, [text, llm.tokenizer.encode(text)], GREEDY)
    assert as_text.token_ids == as_ids.token_ids
    assert as_text.text == llm.generate(text, GREEDY)[0].text
