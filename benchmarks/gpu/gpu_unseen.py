"""Parts of `gpu_first` that the GPU suite does not have, such as adapters and images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from baton.api.errors import ConfigError
from benchmarks.gpu.gpu_report import CannotRunError, Report
from benchmarks.gpu.gpu_tokens import KV_BYTES, MODEL, TEXTS, all_right, drawn_params, run_tests

CHANGED = ("triton_attention", "latents", "sampling", "norm", "norm_rotary_store")
NUM_PROMPTS, NUM_TOKENS = 3, 6  # prompts with images, and greedy tokens of each
MOST_VECTOR_DIFFERENCE = 1e-4  # of a value of a normalized embedding


def check_changed_ops(device: str, report: Report) -> bool:
    """Test the kernels that changed since a GPU last ran them, in bfloat16 too."""
    names = CHANGED if device != "cpu" else CHANGED[-1:]  # the interpreter takes minutes
    return run_tests([f"tests/kernels/test_{name}.py" for name in names], report)


def check_adapters(device: str, report: Report) -> bool:
    """Compare tokens with LoRA adapters on the device with those on the CPU, in float32."""
    from benchmarks.runner.demo_adapters import write_adapters
    from engine import LLM

    tokens: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder))
        for where in dict.fromkeys((device, "cpu")):
            options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": KV_BYTES}
            try:
                llm = LLM(MODEL, device=where, adapters=adapters, **options)
            except ConfigError as error:  # adapters may be refused on a GPU
                raise CannotRunError(str(error)) from error
            names = ["", *adapters]
            prompts = [text for text in TEXTS for _ in names]
            found = llm.generate(prompts, drawn_params()[0], adapter=names * len(TEXTS))
            tokens[where] = {
                name: [one.token_ids for one in found[row :: len(names)]]
                for row, name in enumerate(names)
            }
    right = len({str(of) for of in tokens["cpu"].values()}) == len(tokens["cpu"])
    for name, expected in tokens["cpu"].items():
        equal = sum(a == b for a, b in zip(expected, tokens[device][name], strict=True))
        report[f"adapter {name or 'none'}: equal"] = f"{equal} of {len(expected)}"
        right = right and equal == len(expected)
    return right


def check_features(device: str, report: Report) -> bool:
    """Compare drafts, beams, embeddings and tokens after a sleep with those of the CPU, float32."""
    from engine import LLM

    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": KV_BYTES, "pooling": "mean"}
    greedy = drawn_params()[0]
    on_cpu = LLM(MODEL, device="cpu", **options)
    tokens = [one.token_ids for one in on_cpu.generate(TEXTS, greedy)]
    beams = on_cpu.beam_search(TEXTS, max_tokens=NUM_TOKENS)
    found: dict[str, bool] = {}
    for method, model in (("ngram", ""), ("draft_model", MODEL)):
        drafts = {"speculative_method": method, "speculative_model": model}
        llm = LLM(MODEL, device=device, **options, **drafts)
        found[method] = [one.token_ids for one in llm.generate(TEXTS, greedy)] == tokens
    llm = LLM(MODEL, device=device, **options)
    searched = llm.beam_search(TEXTS, max_tokens=NUM_TOKENS)
    found["beams"] = [[one.token_ids for one in of] for of in searched] == [
        [one.token_ids for one in of] for of in beams
    ]
    for level in ("host", "dropped"):
        llm.sleep(level)
        llm.wake()
        found[f"sleep, {level}"] = [one.token_ids for one in llm.generate(TEXTS, greedy)] == tokens
    pairs = zip(on_cpu.embed(TEXTS), llm.embed(TEXTS), strict=True)
    error = max(abs(x - y) for a, b in pairs for x, y in zip(a.vector, b.vector, strict=True))
    report["embeddings: largest difference"] = error
    for name, is_equal in found.items():
        report[f"{name}: equal"] = is_equal
    return all(found.values()) and error < MOST_VECTOR_DIFFERENCE


def check_images(device: str, report: Report) -> bool:
    """Compare prompts with images on the device with transformers on the CPU, in float32.

    Models in which the tokens of an image see each other are left out on a GPU, where these models
    read text only.
    """
    from models.config import ModelConfig
    from tests.numerics.vision_checkpoints import VISION_FAMILIES, make_vision_checkpoint

    right = True
    for family in VISION_FAMILIES if device != "cpu" else list(VISION_FAMILIES)[:1]:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_vision_checkpoint(family, Path(folder))
            is_whole = bool(ModelConfig.from_folder(checkpoint.folder).whole_image_layers)
            if is_whole and device != "cpu":
                continue
            equal = _equal_prompts(checkpoint, device)
        report[f"{family}: equal"] = f"{equal} of {NUM_PROMPTS}"
        right = right and equal == NUM_PROMPTS
    return right


def _equal_prompts(checkpoint: Any, device: str) -> int:
    """Count the prompts whose tokens equal those of transformers, as far as each is certain."""
    from tests.numerics.test_images_equal_transformers import (
        GREEDY,
        draw_parts,
        expected,
        load,
        prompt_of,
    )

    drawn = [draw_parts(checkpoint, 10 * row, row) for row in range(NUM_PROMPTS)]
    llm = load(checkpoint, device=device)
    found = llm.generate([prompt_of(checkpoint, parts) for parts in drawn], GREEDY)
    wanted = [expected(checkpoint, parts) for parts in drawn]
    return sum(
        list(one.token_ids[: len(tokens)]) == tokens
        for one, tokens in zip(found, wanted, strict=True)
    )


def measure_dependent_launch(device: str, report: Report) -> bool:
    """Compare tokens, and measure decode steps, with dependent launches of small kernels."""
    from baton_kernels.triton import launch
    from benchmarks.gpu.gpu_decode import measure_shapes
    from benchmarks.gpu.gpu_tokens import check_graphs

    with mock.patch.object(launch, "DEPENDENT_LAUNCHES", True):
        if device != "cpu" and not launch.dependent_options()["PDL"]:
            raise CannotRunError("dependent launches need a GPU of compute capability 9.0")
        measure_shapes(device, report, {"0.6B": (1, 8)})
        return check_graphs(device, report)


def measure_library_attention(device: str, report: Report) -> bool:
    """Measure steps with prompts by backend; return False if a backend's result is wrong."""
    from benchmarks.kernels.attention_gpu import measure_steps, peers

    here, missing = peers()
    report["libraries beside torch"] = ", ".join(here) or "none"
    report["libraries that are not here"] = ", ".join(missing) or "none"
    return all_right(measure_steps(device), report)


def measure_decodes(device: str, report: Report) -> bool:
    """Measure decode attention beside the best library; return False if a result is wrong."""
    from benchmarks.kernels.attention_gpu import decode_cells, geometric_mean, measure_cells

    rows: list[dict[str, float | str]] = []
    is_right = all_right(measure_cells(device, decode_cells(device)), report, rows)
    report["decode, library / ours"] = geometric_mean(rows)
    return is_right
