"""All that needs a GPU, in one command: are the tokens right there, and what does a step cost.

    engine    the engine on the device gives the tokens that it gives on the CPU, in float32
    steps     milliseconds per prefill and decode step on the device, by dtype and batch
    split     prefill and decode processes on the device, KV in its memory, NIXL: same tokens
    kernels   the small Triton kernels against copies and torch's ops (kernels_gpu.py)
    attention paged attention in Triton against the best of libraries (attention_gpu.py)

Parts that cannot run (no NIXL here) say so and count as not run, never as passed. `--device cpu`
tries the suite itself on a machine without a GPU; nothing is written then.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton import BatonError, Client, SamplingParams
from baton.local_deployment import LocalDeployment, LocalDeploymentConfig
from engine import LLM
from environment import record_environment, write_results

MODEL = str(Path(__file__).resolve().parents[1] / "examples" / "demo_model")
PROMPTS = ["def read_config(path):\n", "class Stack:\n", "import os\n\n\ndef " * 40]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
READY_TIMEOUT_S = 120.0
KV_BYTES = 2**28

Result = dict[str, object]


def check_engine(device: str) -> Result:
    """Greedy and seeded tokens on the device against those on the CPU, both in float32."""
    seeded = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=1)
    tokens = {}
    for where in ("cpu", device):
        llm = LLM(MODEL, dtype="float32", device=where, kv_cache_bytes=KV_BYTES)
        tokens[where] = [
            completion.token_ids
            for params in (GREEDY, seeded)
            for completion in llm.generate(PROMPTS, params)
        ]
    equal = sum(a == b for a, b in zip(tokens["cpu"], tokens[device], strict=True))
    return {"ok": equal == len(tokens["cpu"]), "equal": f"{equal} of {len(tokens['cpu'])}"}


def measure_steps(device: str) -> Result:
    """Median milliseconds of a step: one prompt of 512 tokens, and decodes at three batches."""
    figures: Result = {"ok": True}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(
            MODEL, dtype=dtype, device=device, kv_cache_bytes=KV_BYTES, prefix_cache=False,
            max_num_batched_tokens=1024, long_prefill_token_threshold=1024,
        )  # fmt: skip
        prefill = _time_steps(llm, 1, 512, num_steps=1, repeat=10)
        figures[f"{dtype} prefill 512, ms"] = prefill
        for batch in (1, 8, 32):
            figures[f"{dtype} decode batch {batch}, ms"] = _time_steps(llm, batch, 16, 20, 1)
    return figures


def _time_steps(llm: LLM, batch: int, prompt_tokens: int, num_steps: int, repeat: int) -> float:
    """Median milliseconds of ``num_steps`` steps; with more than one, those of decodes only."""
    params = SamplingParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True)
    samples = []
    for _ in range(repeat + 1):
        for row in range(batch):
            prompt = [(7 * row + index) % 4000 for index in range(prompt_tokens)]
            llm.engine.add(llm._make_choices(prompt, params)[0])
        if num_steps > 1:
            llm.engine.step()  # the prompts
            llm.engine.step()  # warm
        for _ in range(num_steps):
            started = time.perf_counter()
            llm.engine.step()
            samples.append((time.perf_counter() - started) * 1e3)
        for request_id in list(llm.engine.requests):
            llm.engine.abort(request_id)
    return round(statistics.median(samples[num_steps if repeat > 1 else 0 :]), 3)


def check_split(device: str) -> Result:
    """Tokens of the split system with its KV in the device's memory against one process."""
    expected = LLM(MODEL, dtype="float32", device=device, kv_cache_bytes=KV_BYTES).generate(
        PROMPTS, GREEDY
    )
    node_args = ["--dtype", "float32", "--device", device, "--kv-cache-memory", "256M"]
    config = LocalDeploymentConfig(
        model=MODEL,
        listen=_free_address(),
        router_args=["--no-local-prefill"],
        node_args=node_args,
    )
    with LocalDeployment(config) as deployment, Client(config.listen) as client:
        deployment.wait_ready(READY_TIMEOUT_S)
        found = [client.generate(prompt, GREEDY) for prompt in PROMPTS]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True))
    pushes = [c.receipt.decode.push for c in found if c.receipt and c.receipt.decode]
    exposed = [push.exposed_transfer_s * 1e3 for push in pushes]
    return {
        "ok": equal == len(PROMPTS) == len(pushes),
        "equal": f"{equal} of {len(PROMPTS)}",
        "transport": pushes[0].transport if pushes else "-",
        "exposed transfer, ms": round(statistics.median(exposed), 2) if exposed else "-",
    }


def measure_kernels(device: str) -> Result:
    """Every row of `kernels_gpu.py`; a kernel that differs from its definition ends it."""
    # Triton asks when it is imported whether to interpret, so not before it is needed.
    from kernels_gpu import measure

    return _figures(measure(device))


def measure_attention(device: str) -> Result:
    """Every row of `attention_gpu.py`; attention that differs from a library's ends it."""
    from attention_gpu import geometric_mean, measure

    rows = measure(device)
    return {**_figures(rows), "decode, library / ours": geometric_mean(rows)}


def _figures(rows: list[dict[str, float | str]]) -> Result:
    return {
        "ok": True,
        **{
            str(row["what"]): ", ".join(
                f"{key} {value}" for key, value in row.items() if key not in ("part", "what")
            )
            for row in rows
        },
    }


PARTS: dict[str, Callable[[str], Result]] = {
    "engine": check_engine,
    "steps": measure_steps,
    "split": check_split,
    "kernels": measure_kernels,
    "attention": measure_attention,
}


def main() -> int:
    """Run the parts, print one table, write the JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (default: cuda)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    device = arguments.device
    if device != "cpu" and not torch.cuda.is_available():
        print("error: device: there is no CUDA device here; --device cpu tries the suite itself")
        return 2
    environment = record_environment()
    if device != "cpu":
        environment["gpu"] = torch.cuda.get_device_name(device)
    results: dict[str, Result] = {}
    for name in arguments.parts:
        started = time.perf_counter()
        try:
            results[name] = PARTS[name](device)
        except BatonError as error:
            results[name] = {"ok": False, "not run": str(error)}
        results[name]["seconds"] = round(time.perf_counter() - started, 1)
    table = Table("part", "ok", "figures")
    for name, result in results.items():
        shown = [f"{key}: {value}" for key, value in result.items() if key != "ok"]
        table.add_row(name, "yes" if result["ok"] else "NO", "\n".join(shown))
    if device != "cpu":
        write_results("gpu_suite", environment, {"device": device, "parts": results})
    Console(width=100).print(table)
    return 0 if all(result["ok"] for result in results.values()) else 1


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
