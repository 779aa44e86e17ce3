"""What the hand-over of hybrids costs: layers with states beside layers that attend.

A router, a prefill and a decode node, small random checkpoints, one request at a time; prompts in
chunks, with several block sizes. Each prompt comes twice: new, and with a new end behind what both
nodes have cached of it. A dense model takes the same prompts, for comparison.
Refuses to know: speed of the models, tokens (tests compare those).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton import Client, Receipt, SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from environment import record_environment, summary, write_results

PROMPT_LENGTHS = (1024, 4096, 16384)
BLOCK_SIZES = (64, 256)  # a block has to hold a state: Granite needs 48 tokens of this shape
CHUNK_TOKENS = 512
NEW_END_TOKENS = 200  # behind a prompt that is known
OUTPUT_TOKENS = 8
READY_TIMEOUT_S = 120.0

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
# Row -> architecture, and what its config has beyond _SHAPE.
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


def make_checkpoint(row: str, folder: Path) -> None:
    """Write the random checkpoint of a row."""
    import torch
    import transformers

    architecture, others = SHAPES[row]
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**_SHAPE | others)).save_pretrained(folder)


def measure(row: str, block_size: int, num_requests: int) -> dict[str, Any]:
    """Receipts' numbers by prompt length, of new prompts and of known ones with a new end."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    receipts: dict[int, dict[str, list[Receipt]]] = {
        length: {"new": [], "known": []} for length in PROMPT_LENGTHS
    }
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(row, Path(folder))
        config = LocalDeploymentConfig(
            model=folder,
            listen=free_address(),
            router_args=["--no-local-prefill"],
            node_args=[
                "--dtype", "float32", "--block-size", str(block_size),
                "--long-prefill-token-threshold", str(CHUNK_TOKENS), "--kv-cache-memory", "1G",
            ],
        )  # fmt: skip
        with LocalDeployment(config) as deployment, Client(config.listen) as client:
            deployment.wait_ready(READY_TIMEOUT_S)
            for index in range(num_requests + 1):
                for length, kinds in receipts.items():
                    prompt = draw.choices(range(10, 4000), k=length)
                    for collected in kinds.values():
                        receipt = client.generate(prompt, params).receipt
                        assert receipt is not None
                        if index:  # the first round warms up
                            collected.append(receipt)
                        prompt = prompt[:-1] + draw.choices(range(10, 4000), k=NEW_END_TOKENS)
    return {
        f"{length} tokens": {kind: figures(found) for kind, found in kinds.items()}
        for length, kinds in receipts.items()
    }


def figures(receipts: list[Receipt]) -> dict[str, Any]:
    """Medians and more of requests of one kind."""
    exposed, computed_on_d, pushed, chunks, cached, num_bytes = [], [], 0, [], [], []
    for receipt in receipts:
        prefill, decode = receipt.prefill, receipt.decode
        assert decode is not None
        if prefill is None or not decode.push.transport:
            continue  # the decode node computed a short rest itself
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


def report(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print medians (p90) of the exposed transfer, in milliseconds."""
    names = [f"{length} tokens" for length in PROMPT_LENGTHS]
    table = Table(
        "family", "block", "prompt", *names, "computed on D", title="exposed transfer, ms"
    )
    for row, by_block in results.items():
        for block_size, lengths in by_block.items():
            for kind in ("new", "known"):
                found = [lengths[name][kind] for name in names]
                times = [one.get("exposed_transfer_ms") for one in found]
                cells = [f"{t['median']:.2f} ({t['p90']:.2f})" if t else "-" for t in times]
                most = max(
                    one.get("most_prompt_tokens_computed_on_decode_node", 0) for one in found
                )
                table.add_row(row, block_size, kind, *cells, str(most))
    console.print(table)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5, help="of each kind and length")
    parser.add_argument("--rows", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--block-sizes", nargs="+", type=int, default=list(BLOCK_SIZES))
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    environment = record_environment()
    results: dict[str, dict[str, Any]] = {}
    for row in arguments.rows:
        results[row] = {
            str(block_size): measure(row, block_size, arguments.requests)
            for block_size in arguments.block_sizes
        }
    report(Console(highlight=False, width=120), results)
    if arguments.dry:
        return
    shape = {
        "shapes": {row: {"architecture": SHAPES[row][0], **SHAPES[row][1]} for row in results},
        "shape_of_all": _SHAPE,
        "chunk_tokens": CHUNK_TOKENS,
        "new_end_tokens": NEW_END_TOKENS,
        "requests_per_kind": arguments.requests,
        "concurrency": 1,
    }
    write_results("handoff_hybrids", environment, {"shape": shape, "families": results})


if __name__ == "__main__":
    main()
