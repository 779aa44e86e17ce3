"""Measure what no GPU has run yet, in less than ten minutes.

    changed ops        attention, sampling and norms against their definitions (tests/kernels)
    few bits           decode steps of the 8B shape with 4- and 8-bit weights
    quantized          tokens with 4- and 8-bit weights compared with their definitions, split too
    company            with batch_invariant: requests alone and in a batch, and split
    invariant          the cost of batch_invariant: decode steps and a prompt of the 8B shape
    adapters           LoRA adapters on the device give the same tokens as on the CPU
    images             prompts with images get the tokens of transformers
    features           drafts, beams, sleep and embeddings are the same as on the CPU
    two ranks          two ranks give the same tokens as one rank, with sums by NCCL (two GPUs)
    own sums           two ranks on one GPU sum right, also in graphs, and give one rank's tokens
    sum times          own sums and NCCL's, by size (two GPUs); `python -m tools.rank_sums_table`
    library attention  steps with prompts by backend; `python -m tools.attention_table` reads them
    decodes            paged attention of one token per request, now and before
    kernels            small kernels and sampling, now and before
    decode             decode steps of the 0.6B and 8B shapes, now and before
    dependent launch   tokens and steps of 0.6B with programmatic dependent launches
    products           4- and 8-bit weights compared with the vendor's bfloat16

The most valuable parts come first. As in `gpu_suite`, each part is a process with a time limit, and
results are saved after each part, so an interrupted run keeps the finished parts. "before" stands
for the figures in results/gpu_suite.json. `--device cpu` tries all parts on tiny shapes, and saves
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.gpu_suite import Part, run_and_save
from benchmarks.runner.environment import RESULTS
from benchmarks.runner.run import Run

# The shares add up to the budget.
PARTS = {
    "changed ops": Part("gpu_unseen", "check_changed_ops", 60),
    "few bits": Part("gpu_decode", "measure_few_bits", 40),
    "quantized": Part("gpu_tokens", "check_quantized", 40),
    "company": Part("gpu_tokens", "check_company", 30),
    "invariant": Part("gpu_decode", "measure_invariant", 30),
    "adapters": Part("gpu_unseen", "check_adapters", 25),
    "images": Part("gpu_unseen", "check_images", 35),
    "features": Part("gpu_unseen", "check_features", 25),
    "two ranks": Part("gpu_ranks", "check_two_ranks", 15),
    "own sums": Part("gpu_ranks", "check_own_sums", 45),
    "sum times": Part("gpu_ranks", "measure_sums", 15),
    "library attention": Part("gpu_unseen", "measure_library_attention", 35),
    "decodes": Part("gpu_unseen", "measure_decodes", 40),
    "kernels": Part("gpu_tokens", "measure_kernels", 20),
    "decode": Part("gpu_decode", "measure_decode", 35),
    "dependent launch": Part("gpu_unseen", "measure_dependent_launch", 25),
    "products": Part("gpu_tokens", "measure_products", 35),
}
BUDGET_S = 550.0
# Parts whose earlier figures are in another part of results/gpu_suite.json.
EARLIER = {"decodes": "attention", "dependent launch": "decode"}


def run(
    run: Run,
    device: str = "cuda",
    only: Sequence[str] = tuple(PARTS),
    budget: float = BUDGET_S,
    out: Path | None = None,
) -> None:
    """Run parts that no GPU has run yet, and save the results after each part.

    Args:
        device: cuda or cuda:N; cpu: try the parts on tiny shapes, and save nothing.
        only: names of the parts to run.
        budget: seconds for all parts together.
        out: a file to which a second copy of the JSON is written.
    """
    path = RESULTS / "gpu_suite.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    before = {name: earlier.get(EARLIER.get(name, name), {}) for name in PARTS}
    run_and_save(run, PARTS, device, only, budget, out, before)
