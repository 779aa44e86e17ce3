"""Measure the hand-off of hybrid models, which have state layers and attention layers.

A router, a prefill node and a decode node serve small random checkpoints, one request at a time,
with chunked prompts and several block sizes. Each prompt is sent twice: as a new prompt, and then
with a new end after the part that is now cached. A dense model gets the same prompts, for
comparison. Refuses to know: the models' speed, tokens (tests compare them).
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton import Client, Receipt, SamplingParams
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.deployments import deployed, receipt_of
from benchmarks.runner.environment import summary

PROMPT_LENGTHS = (1024, 4096, 16384)
BLOCK_SIZES = (64, 256)  # a Granite state of this shape takes as much memory as the KV of 48 tokens
CHUNK_TOKENS = 512
NEW_END_TOKENS = 200  # number of new tokens after a cached prompt
OUTPUT_TOKENS = 8

_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
}
_THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
# Row -> architecture, and the fields of config.json that differ from `_SHAPE`.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 (dense)": ("Qwen3ForCausalLM", {"head_dim": 64}),
    "Qwen3.5": (
        "Qwen3_5ForCausalLM",
        {
            "head_dim": 64,
            "layer_types": _THREE_TO_ONE,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "Granite 4.0 H": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": _THREE_TO_ONE,
            "shared_intermediate_size": 512,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
        },
    ),
    "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "conv", "conv", "full_attention"]}),
}


def measure(row: str, block_size: int, num_requests: int) -> dict[str, Any]:
    """Return figures of receipts, by prompt length, for new prompts and for cached ones."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    receipts: dict[int, dict[str, list[Receipt]]] = {
        length: {"new": [], "known": []} for length in PROMPT_LENGTHS
    }
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder), SHAPES[row][0], _SHAPE | SHAPES[row][1])
        node_args = [
            "--dtype", "float32", "--block-size", str(block_size),
            "--long-prefill-token-threshold", str(CHUNK_TOKENS), "--kv-cache-memory", "1G",
        ]  # fmt: skip
        with (
            deployed(folder, node_args=node_args) as deployment,
            Client(deployment.config.listen) as client,
        ):
            for index in range(num_requests + 1):
                for length, kinds in receipts.items():
                    prompt = draw.choices(range(10, 4000), k=length)
                    for collected in kinds.values():
                        receipt, _ = receipt_of(client, prompt, params)
                        if index:  # the first round warms up
                            collected.append(receipt)
                        prompt = prompt[:-1] + draw.choices(range(10, 4000), k=NEW_END_TOKENS)
    return {
        f"{length} tokens": {kind: figures(found) for kind, found in kinds.items()}
        for length, kinds in receipts.items()
    }


def figures(receipts: list[Receipt]) -> dict[str, Any]:
    """Return the medians of the receipts' figures."""
    exposed, computed_on_d, pushed, chunks, cached, num_bytes = [], [], 0, [], [], []
    for receipt in receipts:
        prefill, decode = receipt.prefill, receipt.decode
        assert decode is not None
        if prefill is None or not decode.push.transport:
            # There was no hand-off: the decode node itself computed the new end of the prompt
            continue
        pushed += 1
        exposed.append(decode.push.exposed_transfer_s * 1e3)
        computed_on_d.append(decode.num_prompt_tokens_computed)
        chunks.append(prefill.num_chunks)
        cached.append(prefill.num_cached_tokens)
        num_bytes.append(decode.push.num_bytes)
    if not pushed:
        return {"num_pushed": 0}
    return {
        "num_pushed": pushed,
        "exposed_transfer_ms": summary(exposed, 4),
        "most_prompt_tokens_computed_on_decode_node": max(computed_on_d),
        "num_chunks": max(chunks),
        "least_cached_on_prefill_node": min(cached),
        "num_bytes": max(num_bytes),
    }


def measure_hybrids(
    families: Sequence[str], block_sizes: Sequence[int], num_requests: int
) -> dict[str, object]:
    """Measure each family with each block size, with prompts of each kind and length."""
    results: dict[str, dict[str, Any]] = {
        row: {str(size): measure(row, size, num_requests) for size in block_sizes}
        for row in families
    }
    shape = {
        "shapes": {row: {"architecture": SHAPES[row][0], **SHAPES[row][1]} for row in results},
        "shape_of_all": _SHAPE,
        "chunk_tokens": CHUNK_TOKENS,
        "new_end_tokens": NEW_END_TOKENS,
        "requests_per_kind": num_requests,
        "concurrency": 1,
    }
    return {"shape": shape, "families": results}
