"""The split system equals one process with a KV cache of float8; a byte travels per number."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton import SamplingParams
from engine import LLM
from tests.fakes.processes.deployments import complete_all, split_deployment

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.mark.parametrize("prefill_args", [[], ["--pipeline-parallel-size", "2"]])
def test_split_equals_one_process_and_moves_a_byte_for_each_number(
    demo_model: Path, prefill_args: list[str]
) -> None:
    llm = LLM(str(demo_model), dtype="float32", kv_cache_dtype="fp8", num_threads=1)
    assert llm.tokenizer is not None
    token_ids = llm.tokenizer.encode(Path(argparse.__file__).read_text(encoding="utf-8"))
    prompts = [token_ids[37 * k : 37 * k + 1 + 60 * k] for k in range(12)]
    alone = llm.generate(prompts, GREEDY)
    with split_deployment(
        demo_model, "--kv-cache-dtype", "fp8", "--kv-digests", prefill_args=prefill_args
    ) as running:
        split = complete_all(running, prompts, GREEDY)
        again = complete_all(running, prompts, GREEDY)  # both nodes know the prompts
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    assert [c.token_ids for c in again] == [c.token_ids for c in alone]
    model = llm.engine.model_config
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    for prompt, completion in zip(prompts, split, strict=True):
        assert completion.receipt is not None
        decode = completion.receipt.decode
        if decode is None:  # its first token was its last
            continue
        num_blocks = -(-len(prompt) // 16)
        assert decode.push.num_blocks == num_blocks
        assert decode.push.num_bytes == num_blocks * 16 * token_bytes
