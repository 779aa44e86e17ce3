"""Measure the hand-off from a prefill to a decode node, with receipts of real requests.

A router, one prefill node and one decode node with NIXL serve the demo model on this machine, one
request at a time, so that only the hand-off delays token 2 after token 1. The decode node rests
between requests, and a core is slow after a rest. So a control computes the same first decode step
in one process, without a transfer: once after a rest and once without.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Literal

from baton import Client, Receipt, SamplingParams
from baton.engine_config import EngineConfig
from benchmarks.handoff.handoff_churn import measure_churn
from benchmarks.handoff.handoff_hybrids import BLOCK_SIZES, SHAPES, measure_hybrids
from benchmarks.handoff.handoff_modes import measure_macs, measure_modes, measure_transports
from benchmarks.runner.deployments import deployed, receipt_of
from benchmarks.runner.environment import DEMO_MODEL, summary
from benchmarks.runner.run import Run
from engine.core.request import Request
from engine.engine import Engine
from engine.make_engine import make_engine

PROMPT_LENGTHS = (64, 256, 1000)
FILES = {
    "costs": "handoff",
    "macs": "handoff_macs",
    "hybrids": "handoff_hybrids",
    "transports": "kv_transports",
}
OUTPUT_TOKENS = 16
REST_S = 0.1  # seconds for which the control rests, about as long as a prefill


def measure(num_requests: int) -> dict[int, list[Receipt]]:
    """Send prompts of all lengths in turns; return the receipts by prompt length.

    The first round warms up, and is left out.
    """
    draw = random.Random(0)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    receipts: dict[int, list[Receipt]] = {length: [] for length in PROMPT_LENGTHS}
    room = ["--kv-cache-memory", "256M"]
    with deployed(node_args=room) as deployment, Client(deployment.config.listen) as client:
        for index in range(num_requests + 1):
            for length, collected in receipts.items():
                # The prompt is new, so no prefix cache has blocks of it.
                prompt = draw.choices(range(4000), k=length)
                receipt, _ = receipt_of(client, prompt, params)
                if index:
                    collected.append(receipt)
    return receipts


def measure_control(num_requests: int) -> dict[int, dict[str, dict[str, float]]]:
    """Return the ms from commit to token 2 in one process, with and without a rest before.

    The result is by number of prompt tokens.
    """
    config = EngineConfig(device="cpu", num_threads=1, kv_cache_bytes=2**28)
    engine = make_engine(DEMO_MODEL, config)
    engine.kv_memory.tensor.zero_()
    draw = random.Random(1)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    samples: dict[int, dict[str, list[float]]] = {
        length: {"rested": [], "busy": []} for length in PROMPT_LENGTHS
    }
    for index in range(num_requests + 1):
        for length, by_state in samples.items():
            for state, collected in by_state.items():
                request = Request.create(
                    f"{index}-{length}-{state}",
                    draw.choices(range(4000), k=length),
                    params,
                    seed=0,
                    eos_token_ids=frozenset(),
                    max_model_len=engine.max_model_len,
                    max_tokens=OUTPUT_TOKENS,
                )
                milliseconds = _commit_to_token_2_ms(engine, request, rested=state == "rested")
                if index:
                    collected.append(milliseconds)
    return {
        length: {state: summary(collected, 4) for state, collected in by_state.items()}
        for length, by_state in samples.items()
    }


def _commit_to_token_2_ms(engine: Engine, request: Request, *, rested: bool) -> float:
    engine.park(request)
    assert engine.grant(request.request_id) is not None
    if rested:
        time.sleep(REST_S)
    start = time.perf_counter()
    engine.commit(request.request_id, 1)
    engine.step()
    milliseconds = (time.perf_counter() - start) * 1e3
    while engine.has_work:
        engine.step()
    return milliseconds


def figures(receipt: Receipt) -> dict[str, float]:
    """Return the figures of one request's receipt."""
    prefill, decode = receipt.prefill, receipt.decode
    assert prefill is not None
    assert decode is not None
    exposed_s, first_step_s = decode.push.exposed_transfer_s, decode.first_step_s
    return {
        "ttft_ms": receipt.ttft_s * 1e3,
        "prefill_ms": prefill.prefill_s * 1e3,
        "exposed_transfer_ms": exposed_s * 1e3,
        "commit_to_token_2_ms": first_step_s * 1e3,
        "token_1_to_token_2_ms": (exposed_s + first_step_s) * 1e3,
        "time_per_token_ms": receipt.time_per_token_s * 1e3,
        "steps_until_first": float(decode.steps_until_first),
        "exposed_transfer_per_ttft": exposed_s / receipt.ttft_s,
        "commit_to_token_2_per_time_per_token": first_step_s / receipt.time_per_token_s,
    }


def summarize(
    receipts: dict[int, list[Receipt]], control: dict[int, dict[str, dict[str, float]]]
) -> dict[str, object]:
    """Return the median and the p90 of each figure, by prompt length."""
    results: dict[str, object] = {}
    for length, collected in receipts.items():
        rows = [figures(receipt) for receipt in collected]
        summaries = {name: summary([row[name] for row in rows], 4) for name in rows[0]}
        for state, milliseconds in control[length].items():
            summaries[f"control_commit_to_token_2_{state}_ms"] = milliseconds
        prefill, decode = collected[0].prefill, collected[0].decode
        assert prefill is not None
        assert decode is not None
        results[f"{length} tokens"] = {
            "num_bytes": decode.push.num_bytes,
            "num_blocks": decode.push.num_blocks,
            "num_chunks": prefill.num_chunks,
            "transport": decode.push.transport,
            "num_prompt_tokens_computed_on_decode_node": max(
                r.decode.num_prompt_tokens_computed for r in collected if r.decode is not None
            ),
            **summaries,
        }
    return results


def run(
    run: Run,
    parts: Sequence[Literal["costs", "macs", "hybrids", "transports"]] = ("costs",),
    requests: int = 20,
    families: Sequence[str] = tuple(SHAPES),
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> None:
    """Measure the chosen parts of the hand-off; each has its own file of results.

    Args:
        parts: costs of a hand-off; macs: keyed digests; hybrids: layers with states; transports:
            NIXL compared with TLS sockets.
        requests: number of requests per prompt length; long prompts, hybrids and transports get
            fewer.
        families: model families of the part hybrids.
        block_sizes: block sizes of the part hybrids.
    """
    for part in parts:
        if part == "costs":
            document = measure_costs(run, requests)
        elif part == "macs":
            document = measure_macs(requests)
        elif part == "transports":
            document = measure_transports(max(2, requests // 2))
        else:
            document = measure_hybrids(families, block_sizes, max(1, requests // 4))
        run.judge(document, FILES[part])
        run.save(document, FILES[part])


def measure_costs(run: Run, num_requests: int) -> dict[str, object]:
    """Measure single hand-offs, push modes, and the fragmentation of block pools over an hour."""
    receipts, control = measure(num_requests), measure_control(num_requests)
    lengths = summarize(receipts, control)
    run.show("median", lengths)
    shape = {
        "model": "examples/demo_model",
        "num_prefill": 1,
        "num_decode": 1,
        "requests_per_length": num_requests,
        "output_tokens": OUTPUT_TOKENS,
        "concurrency": 1,
    }
    modes = measure_modes(max(2, num_requests // 2))
    return {"shape": shape, "prompt_lengths": lengths, "push": modes, "churn": measure_churn()}
