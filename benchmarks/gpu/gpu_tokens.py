"""Parts of the GPU suite that check results; most of them use the demo model.

The part `ops` runs tests in `tests/`.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton_kernels.quantized import QuantizedFormat
from benchmarks.gpu.gpu_report import Report
from engine.executors.uniproc import worker_of

# Not imported from gpu_timing.py, because that file needs packages that may be missing.
Row = dict[str, float | str]
ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "demo_model")
TEXTS = ["def read_config(path):\n", "class Stack:\n", "import os\n\n\ndef " * 40]
KV_BYTES = 2**28
# Number of test processes; each needs half a GiB of GPU memory for its CUDA context
MAX_PROCESSES = 12
WEIGHTS = tuple(one.value for one in QuantizedFormat)
ROUNDING_WEIGHTS = ("int8", "fp8")
MOST_DIFFERENCE = 0.05  # largest allowed mean difference of a prompt's logprobs
OP_TESTS = ["tests/kernels", "tests/contract/test_attention_backends.py"]


def check_ops(device: str, report: Report) -> bool:
    """Test attention backends and, on a GPU, all Triton ops against the reference."""
    # fewer tests on a CPU, where Triton's interpreter takes minutes
    return run_tests(OP_TESTS if device != "cpu" else OP_TESTS[1:], report)


def run_tests(tests: Sequence[str], report: Report) -> bool:
    """Run tests by pytest, and report how many passed, failed and were skipped."""
    for module in ("pytest", "pytest_timeout"):
        if find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    command = [
        sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider",
        "--timeout=60", "-o", "addopts=--import-mode=importlib", "-W", "ignore",
        "--ignore=tests/kernels/test_aot.py", *tests,
    ]  # fmt: skip
    if find_spec("xdist") is not None:  # in parallel, because compiling takes most of the time
        command += ["--numprocesses", str(min(len(os.sched_getaffinity(0)), MAX_PROCESSES))]
    counts, failed = Counter[str](), list[str]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            found = outcome_of(line)
            if found:
                counts[found[1].lower()] += 1
                report["counts"] = dict(counts)
            if found and found[1] in ("FAILED", "ERROR"):
                failed.append(found[0])
                report["failed tests"] = failed
    return running.returncode == 0 and counts["passed"] > 0


def outcome_of(line: str) -> tuple[str, str] | None:
    """Parse the test and its outcome from a line of pytest; None: another line."""
    alone = re.match(r"(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)
    if alone:
        return alone[1], alone[2]
    several = re.match(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (tests/.+)", line)
    return (several[2].strip(), several[1]) if several else None


def check_engine(device: str, report: Report) -> bool:
    """Compare greedy and seeded tokens on the device with those on the CPU, both in float32."""
    from engine import LLM

    tokens = {}
    for where in dict.fromkeys(("cpu", device)):
        llm = LLM(MODEL, dtype="float32", device=where, kv_cache_bytes=KV_BYTES)
        tokens[where] = [
            c.token_ids for params in drawn_params() for c in llm.generate(TEXTS, params)
        ]
    equal = sum(a == b for a, b in zip(tokens["cpu"], tokens[device], strict=True))
    report["equal"] = f"{equal} of {len(tokens['cpu'])}"
    return equal == len(tokens["cpu"])


def check_graphs(device: str, report: Report) -> bool:
    """Compare the tokens of eager steps with those of replayed steps and of running ahead.

    In float32 all tokens must be equal; in bfloat16 they may differ, because padding may change how
    a product is rounded.
    """
    from engine import LLM

    right = True
    ways = {"graphs": (True, False), "ahead": (False, True), "graphs, ahead": (True, True)}
    prompts = [[(31 * row + 7 * index) % 4000 for index in range(5 + 9 * row)] for row in range(11)]
    for dtype in ("float32", "bfloat16"):
        options = {"dtype": dtype, "device": device, "kv_cache_bytes": KV_BYTES}
        llm = LLM(MODEL, cuda_graphs=False, async_scheduling=False, **options)
        expected = [llm.generate(prompts, params) for params in drawn_params()]
        for name, (graphs, ahead) in ways.items():
            llm = LLM(MODEL, cuda_graphs=graphs, async_scheduling=ahead, **options)
            found = [llm.generate(prompts, params) for params in drawn_params()]
            pairs = list(zip(chain(*expected), chain(*found), strict=True))
            equal = sum(a.token_ids == b.token_ids for a, b in pairs)
            sizes = worker_of(llm.engine.executor).runner.decode_graphs.sizes
            report[f"{dtype}, {name}"] = f"{equal} of {len(pairs)} equal, {len(sizes)} graphs"
            captured = bool(sizes) or not graphs or device == "cpu"
            right = right and captured and (equal == len(pairs) or dtype != "float32")
    return right


def check_split(device: str, report: Report) -> bool:
    """Compare a split deployment's tokens (KV in device memory) with one process's tokens."""
    from engine import LLM

    options = {"dtype": "float32", "device": device, "kv_cache_bytes": KV_BYTES}
    expected = LLM(MODEL, **options).generate(TEXTS, drawn_params()[0])
    found = _split_completions(device, [])
    equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True))
    pushes = [c.receipt.decode.push for c in found if c.receipt and c.receipt.decode]
    exposed = [push.exposed_transfer_s * 1e3 for push in pushes]
    report["equal"] = f"{equal} of {len(TEXTS)}"
    report["transport"] = pushes[0].transport if pushes else "-"
    report["exposed transfer, ms"] = statistics.median(exposed) if exposed else "-"
    return equal == len(TEXTS) == len(pushes)


def _split_completions(
    device: str, more_args: list[str], dtype: str = "float32"
) -> list[Completion]:
    from baton import Client
    from benchmarks.runner.deployments import deployed

    if find_spec("nixl") is None:
        raise ModuleNotFoundError(name="nixl")
    node_args = ["--dtype", dtype, "--device", device, "--kv-cache-memory", "256M", *more_args]
    with (
        deployed(MODEL, node_args=node_args) as deployment,
        Client(deployment.config.listen) as client,
    ):
        return [client.generate(text, drawn_params()[0]) for text in TEXTS]


def measure_kernels(device: str, report: Report) -> bool:
    """Run `kernels_gpu.py`, and report its rows; return False if a kernel's result is wrong."""
    from benchmarks.kernels.kernels_gpu import measure

    return all_right(measure(device), report)


def measure_attention(device: str, report: Report) -> bool:
    """Run `attention_gpu.py`, and report its rows; return False if a result is wrong."""
    from benchmarks.kernels.attention_gpu import geometric_mean, measure, measure_steps, peers

    here, missing = peers()
    report["libraries beside torch"] = ", ".join(here) or "none"
    report["libraries that are not here"] = ", ".join(missing) or "none"
    rows = list[Row]()
    is_right = all_right(measure(device), report, rows)
    report["decode, library / ours"] = geometric_mean(rows)
    return all_right(measure_steps(device), report) and is_right


def measure_products(device: str, report: Report) -> bool:
    """Run `quantized_gpu.py`, and report its rows; return False if a product is wrong."""
    from benchmarks.kernels.quantized_gpu import measure

    return all_right(measure(device), report)


def check_quantized(device: str, report: Report) -> bool:
    """Compare the tokens of 4- and 8-bit weights with those of their definitions; also split.

    In formats that round the inputs of layers, a rounding error may change the next layer's input
    by a whole quantization step. For these formats, the prompts' logprobs are compared in place of
    tokens.
    """
    from baton_kernels import reference
    from baton_kernels.dispatch import ops_for
    from engine import LLM

    options: dict[str, Any] = {"dtype": "float32", "device": device, "kv_cache_bytes": KV_BYTES}
    ops, right = ops_for(torch.empty(0, device=device)), True
    of_int4: list[tuple[int, ...]] = []
    params = replace(drawn_params()[0], prompt_logprobs=0)
    for weights in WEIGHTS if device != "cpu" else WEIGHTS[:1]:
        with mock.patch.object(ops, "quantized_linear", reference.quantized_linear):
            llm = LLM(MODEL, weights=weights, cuda_graphs=False, **options)
            expected = llm.generate(TEXTS, params)
        found = LLM(MODEL, weights=weights, **options).generate(TEXTS, params)
        equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True))
        error = max(map(_mean_difference, expected, found))
        key = f"{weights}: equal tokens, mean difference of logprobs"
        report[key] = f"{equal} of {len(expected)}, {error:.2g}"
        right = right and error < MOST_DIFFERENCE
        right = right and (equal == len(expected) or weights in ROUNDING_WEIGHTS)
        of_int4 = of_int4 or [one.token_ids for one in found]
    split = _split_completions(device, ["--weights", WEIGHTS[0]])
    equal = sum(a == b.token_ids for a, b in zip(of_int4, split, strict=True))
    report[f"{WEIGHTS[0]}, split: equal"] = f"{equal} of {len(TEXTS)}"
    return right and equal == len(TEXTS)


def check_company(device: str, report: Report) -> bool:
    """Compare requests alone with requests in a batch, bit by bit; also split.

    Tokens and logprobs must be equal. The engine has the option ``batch_invariant``; on CPUs,
    results never depend on the batch.
    """
    from engine import LLM

    dtype = "bfloat16" if device != "cpu" else "float32"
    options: dict[str, Any] = {"dtype": dtype, "device": device, "kv_cache_bytes": KV_BYTES}
    options |= {"batch_invariant": True, "prefix_cache": False}
    # Prompts have up to four parts of keys. Different sampling parameters make the requests of a
    # step use different code.
    lengths = [3 + 231 * row for row in range(9)]
    prompts = [[(31 * row + 7 * i) % 4000 for i in range(n)] for row, n in enumerate(lengths)]
    greedy, drawn = drawn_params()
    params = [
        replace(
            (greedy, drawn)[row % 2],
            logprobs=(None, 2, 5)[row % 3],
            presence_penalty=0.5 * (row % 4 == 3),
        )
        for row in range(len(prompts))
    ]
    llm, right = LLM(MODEL, **options), True
    narrow = LLM(MODEL, max_num_batched_tokens=200, max_num_requests=5, **options)
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for name, engine in {"with others": llm, "in chunks": narrow}.items():
        pairs = list(zip(alone, engine.generate(prompts, params), strict=True))
        equal = sum((a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) for a, b in pairs)
        report[f"{name}: equal"] = f"{equal} of {len(pairs)}"
        right = right and equal == len(pairs)
    expected = llm.generate(TEXTS, drawn_params()[0])
    split = _split_completions(device, ["--batch-invariant"], dtype)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, split, strict=True))
    report["split: equal"] = f"{equal} of {len(TEXTS)}"
    return right and equal == len(TEXTS)


def _mean_difference(one: Completion, other: Completion) -> float:
    """Return the mean absolute difference of two completions' prompt logprobs."""
    pairs = zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)
    return statistics.mean(abs(a.logprob - b.logprob) for a, b in pairs if a and b)


def all_right(rows: Iterable[Row], report: Report, kept: list[Row] | None = None) -> bool:
    """Report each row when it arrives; return whether there are rows and none has failed."""
    kept = [] if kept is None else kept
    for row in rows:
        report[f"{row.get('part', 'attention')}: {row['what']}"] = ", ".join(
            f"{key} {value}" for key, value in row.items() if key not in ("part", "what")
        )
        kept.append(row)
    return bool(kept) and not any("failed" in row for row in kept)


def drawn_params() -> tuple[SamplingParams, ...]:
    """Return the parameters of the suite's requests: greedy, and drawn by a seed."""
    return (
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=1),
    )
