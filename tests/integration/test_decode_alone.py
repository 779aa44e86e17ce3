"""A router with decode nodes only: token for token what one process gives, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from baton import AsyncClient, Completion, SamplingParams
from baton.local_deployment import LocalDeployment, LocalDeploymentConfig
from engine import LLM
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S, free_address

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(400)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=7)


def test_a_decode_node_without_prefill_nodes_equals_one_process() -> None:
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1)
    assert llm.tokenizer is not None
    text = llm.tokenizer.encode(GREEDY.__class__.__doc__ or "")
    prompts = [(text * 20)[7 * index : 7 * index + 1 + 43 * index] for index in range(16)]
    config = LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=0,
        node_args=["--dtype", "float32", "--long-prefill-token-threshold", "256"],
    )
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        params = [GREEDY if index % 2 else SAMPLED for index in range(len(prompts))]
        split = asyncio.run(complete_all(config.listen, prompts, params))
    for prompt, one, completion in zip(prompts, params, split, strict=True):
        [alone] = llm.generate([prompt], one)
        assert completion.token_ids == alone.token_ids
        assert completion.finish_reason == alone.finish_reason
        receipt = completion.receipt
        assert receipt is not None
        assert (receipt.prefill_node, receipt.prefill) == ("", None)
        assert receipt.decode is not None
        computed = receipt.decode.num_prompt_tokens_computed
        assert computed + receipt.decode.num_cached_tokens == len(prompt)
        assert receipt.decode.push.num_blocks == 0


async def complete_all(
    address: str, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Completion]:
    async with AsyncClient(address) as client:
        calls = [client.generate(p, one) for p, one in zip(prompts, params, strict=True)]
        return await asyncio.gather(*calls)
