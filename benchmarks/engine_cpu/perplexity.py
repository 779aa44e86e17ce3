"""Measure the perplexity of a real model on the same text with every format of weights.

SmolLM2-135M-Instruct computes in float32. Windows of this repository's prose are scored as prompts.
The results are each format's perplexity divided by the perplexity with float32 weights, and how
often the most likely next token differs. Weights in formats that only GPUs can compute with are
rounded as the format defines, and computed in float32.

    python -m benchmarks perplexity
    python -m benchmarks perplexity --demo    score code with the demo model (16-bit weights)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from unittest import mock

import torch

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from baton.engine_config import WEIGHTS
from baton_kernels.quantized import QuantizedFormat
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Run
from engine import LLM
from engine.worker import worker
from examples.demo import fetch_model
from models.gpu.packing import GpuPacker

TEXTS = ("docs/architecture.md", "docs/inside.md", "docs/routing.md", "docs/security.md")
DEMO_MODEL = ROOT / "examples" / "demo_model"
# The demo model was trained before these texts were written, so it has not seen them.
DEMO_TEXTS = (
    "models/gpu/packing.py",
    "benchmarks/engine_cpu/families.py",
    "benchmarks/kernels/quantized_gpu.py",
    "benchmarks/router/router_site.py",
    "benchmarks/runner/answers.py",
)
BASE, ON_GPUS = "fp32", "on GPUs: "
OTHERS = [
    *(name for name in WEIGHTS if name not in ("auto", BASE)),
    *(f"{ON_GPUS}{one.value}" for one in QuantizedFormat),
]


def score(
    model: str, weights: str, texts: Sequence[str], num_windows: int, num_tokens: int
) -> tuple[list[float], list[int]]:
    """Return each token's log-likelihood given all earlier tokens, and the most likely tokens."""
    with contextlib.ExitStack() as replaced:
        if weights.startswith(ON_GPUS):
            format_ = QuantizedFormat(weights.removeprefix(ON_GPUS))
            packer = GpuPacker(torch.device("cpu"), format_, has_float8=True)
            choose = mock.patch.object(worker, "choose_packer", return_value=packer)
            replaced.enter_context(choose)
            weights = "auto"
        llm = LLM(model, dtype="float32", weights=weights, prefix_cache=False)
    assert llm.tokenizer is not None
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in texts)
    token_ids = list(llm.tokenizer.encode(text))
    windows = [token_ids[i * num_tokens : (i + 1) * num_tokens] for i in range(num_windows)]
    assert len(windows[-1]) == num_tokens, "the text is too short"
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    logprobs, likeliest = [], []
    for output in llm.generate(windows, params):
        for one in filter(None, output.prompt_logprobs):
            logprobs.append(one.logprob)
            likeliest.append(one.top[0][0])
    return logprobs, likeliest


def run(run: Run, windows: int = 24, tokens: int = 512, demo: bool = False) -> None:
    """Score the text with every format of weights.

    Args:
        tokens: number of tokens of a window.
        demo: whether to score code with the demo model.
    """
    model = str(DEMO_MODEL) if demo else fetch_model(run.console, SMOLLM2)
    if model is None:
        raise SystemExit("the model cannot be had")
    texts = DEMO_TEXTS if demo else TEXTS
    scored = {weights: score(model, weights, texts, windows, tokens) for weights in (BASE, *OTHERS)}
    perplexity = {
        weights: math.exp(-sum(logprobs) / len(logprobs))
        for weights, (logprobs, _) in scored.items()
    }
    rows = []
    for weights, (logprobs, likeliest) in scored.items():
        pairs = zip(likeliest, scored[BASE][1], strict=True)
        others = sum(mine != theirs for mine, theirs in pairs) / len(logprobs)
        rows.append(
            {
                "weights": weights,
                "perplexity": round(perplexity[weights], 4),
                "ratio": round(perplexity[weights] / perplexity[BASE], 5),
                "share_of_other_tokens": round(others, 4),
            }
        )
    run.show("demo model" if demo else SMOLLM2.name, rows)
    document = {"num_tokens": len(scored[BASE][0]), "rows": rows}
    run.save(document, "perplexity_demo" if demo else "perplexity")
