"""Parts of `gpu_first` about several ranks: their tokens, and the sums over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from baton.api.errors import ConfigError
from benchmarks.gpu.gpu_report import CannotRunError, Report
from benchmarks.gpu.gpu_tokens import KV_BYTES, TEXTS, drawn_params, run_tests
from benchmarks.gpu.gpu_tokens import MODEL as DEMO_MODEL
from benchmarks.runner.own_process import call_words, own_environment

OWN_TEST = (
    "tests/kernels/test_rank_collectives.py"
    "::test_all_ranks_get_the_sum_in_the_order_of_the_ranks_and_none_waits_for_ever"
)


def check_two_ranks(device: str, report: Report) -> bool:
    """Compare the greedy tokens of two ranks with those of one rank, in float32."""
    return _equal_tokens(device, report)


def check_own_sums(device: str, report: Report) -> bool:
    """Check own sums of two ranks on one GPU: drawn sums, replayed sums, and tokens."""
    right = run_tests([OWN_TEST], report)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # of the ranks, which this process starts
        return _equal_tokens(device, report, rank_sums="own") and right
    wrong = _on_ranks("check_replays", ["cuda:0", "cuda:0"])["wrong"]
    report["replayed sums: wrong"] = wrong
    for graphs in (False, True):
        ranks = {"devices": "0,0", "rank_sums": "own", "cuda_graphs": graphs}
        right = _equal_tokens("cuda", report, **ranks) and right
    return right and wrong == 0


def _equal_tokens(device: str, report: Report, **ranks: Any) -> bool:
    """Compare greedy tokens of two ranks, with some options, with those of one rank."""
    from engine import LLM

    options: Mapping[str, Any] = {
        "dtype": "float32", "device": device, "kv_cache_bytes": KV_BYTES,
    }  # fmt: skip
    start = partial(LLM, DEMO_MODEL, **options)
    expected = start().generate(TEXTS, drawn_params()[0])
    try:
        llm = start(tensor_parallel_size=2, **ranks)
    except ConfigError as error:
        raise CannotRunError(str(error)) from error
    found = llm.generate(TEXTS, drawn_params()[0])
    llm.engine.close()
    equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True))
    shown = ", ".join(f"{name} {value}" for name, value in ranks.items())
    report[f"{shown}: equal" if shown else "equal"] = f"{equal} of {len(TEXTS)}"
    return equal == len(TEXTS)


def measure_sums(device: str, report: Report) -> bool:
    """Measure own sums in one pass and in two passes, and NCCL's, in captured graphs."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        raise CannotRunError(f"two GPUs are needed to compare own sums with NCCL's, got {num_gpus}")
    for num_ranks in (2, 4, 8):
        if num_ranks <= num_gpus:
            devices = [f"cuda:{index}" for index in range(num_ranks)]
            for num_bytes, us in _on_ranks("time_sums", devices).items():
                times = ", ".join(f"{way} {value:.1f}" for way, value in us.items())
                report[f"sum: {num_ranks} ranks, {num_bytes} bytes"] = times
    return True


def _on_ranks(function: str, devices: Sequence[str]) -> Any:
    """Call a function of `gpu_rank_process` on ranks in processes of their own.

    Returns:
        What rank 0 printed, as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = f"benchmarks.gpu.gpu_rank_process:{function}"
        ranks = [
            subprocess.Popen(
                call_words(target, rank, len(devices), folder, device),
                env=own_environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, device in enumerate(devices)
        ]
        printed = [rank.communicate()[0] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        raise RuntimeError(f"{function}: the ranks' processes ended with {codes}")
    return json.loads(printed[0].splitlines()[-1])
