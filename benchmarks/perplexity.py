"""Perplexity of a real model in every format of weights, on the same text.

SmolLM2-135M-Instruct, computed in float32; the text is this repository's own prose, cut into
windows that are scored as prompts. Told is each perplexity over that of float32 weights, and how
often the likeliest next token is another one. Formats of GPUs are computed by their definition.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --demo    the demo model, whose weights have 16 bits, on code
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from baton.engine_config import WEIGHTS
from baton_kernels.quantized import QuantizedFormat
from engine import LLM
from engine.worker import worker
from environment import record_environment, write_results
from examples.demo import fetch_model
from models.gpu.packing import GpuPacker

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("docs/architecture.md", "docs/inside.md", "docs/routing.md", "docs/security.md")
DEMO_MODEL = ROOT / "examples" / "demo_model"
# Written after the model was trained.
DEMO_TEXTS = (
    "models/gpu/packing.py",
    "benchmarks/compile_layers.py",
    "benchmarks/quantized_gpu.py",
)
BASE, ON_GPUS = "fp32", "on GPUs: "
OTHERS = [
    *(name for name in WEIGHTS if name not in ("auto", BASE)),
    *(f"{ON_GPUS}{one.value}" for one in QuantizedFormat),
]


def score(
    model: str, weights: str, texts: Sequence[str], num_windows: int, num_tokens: int
) -> tuple[list[float], list[int]]:
    """Return each token's log-likelihood after those before it, and the likeliest token there."""
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


def main() -> None:
    """Score, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Perplexity of a real model by format of weights.")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--demo", action="store_true", help="the demo model, on code")
    arguments = parser.parse_args()
    environment = record_environment()
    console = Console(highlight=False)
    model = str(DEMO_MODEL) if arguments.demo else fetch_model(console, SMOLLM2)
    if model is None:
        raise SystemExit("the model cannot be had")
    texts = DEMO_TEXTS if arguments.demo else TEXTS
    scored = {
        weights: score(model, weights, texts, arguments.windows, arguments.tokens)
        for weights in (BASE, *OTHERS)
    }
    perplexity = {
        weights: math.exp(-sum(logprobs) / len(logprobs))
        for weights, (logprobs, _) in scored.items()
    }
    table = Table(
        "weights",
        "perplexity",
        f"/ {BASE}",
        "other likeliest tokens",
        title="demo model" if arguments.demo else SMOLLM2.name,
    )
    rows = []
    for weights, (logprobs, likeliest) in scored.items():
        pairs = zip(likeliest, scored[BASE][1], strict=True)
        others = sum(mine != theirs for mine, theirs in pairs) / len(logprobs)
        ratio = perplexity[weights] / perplexity[BASE]
        rows.append(
            {
                "weights": weights,
                "perplexity": round(perplexity[weights], 4),
                "ratio": round(ratio, 5),
                "share_of_other_tokens": round(others, 4),
            }
        )
        table.add_row(weights, f"{perplexity[weights]:.3f}", f"{ratio:.4f}", f"{others:.2%}")
    console.print(table)
    num_tokens = len(scored[BASE][0])
    name = "perplexity_demo" if arguments.demo else "perplexity"
    write_results(name, environment, {"num_tokens": num_tokens, "rows": rows})


if __name__ == "__main__":
    main()
