"""Compare the forward passes of vision encoders with those of transformers, for two image sizes.

The encoders have published shapes, but only two layers and random weights. Both engines encode an
image in one process, in turns, and their embeddings must agree.

    python -m benchmarks vision
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine_cpu.engine_cpu import instruction_set
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run

BUILD = ROOT / "build" / "vision"
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "pad_token_id": 0,
}
# Largest allowed error, relative to the largest value, by dtype.
MOST_ERROR = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a vision encoder, and inputs for it.

    Attributes:
        vision: fields of the config's vision part.
        whole: fields of the whole config.
        sides: pixels of an image's sides, by name of the case.
        inputs: returns the encoder's inputs, by name, for a random image with sides of a given
            length.
        text: fields of the config's text part, in addition to `TEXT`.
    """

    architecture: str
    vision: Mapping[str, Any]
    whole: Mapping[str, Any]
    sides: Mapping[str, int]
    inputs: Callable[[int], dict[str, Any]]
    text: Mapping[str, Any] = field(default_factory=dict)


def _tile(side: int) -> dict[str, Any]:
    """Return the encoder's inputs for one tile with sides of ``side`` pixels."""
    import torch

    return {"pixel_values": torch.randn(1, 1, 3, side, side)}


def _patches(side: int) -> dict[str, Any]:
    """Return the encoder's inputs for a square image: its patches of 14 x 14 pixels."""
    import torch

    rows = side // 14
    return {
        "pixel_values": torch.randn(rows * rows, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, rows, rows]]),
    }


SHAPES = {
    # SigLIP so400m, as in SmolVLM2 2.2B; an image's sides are multiples of three patches.
    "siglip": Shape(
        "Idefics3ForConditionalGeneration",
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 378,
        },
        {"scale_factor": 3},
        {"384": 378, "1024": 1008},
        _tile,
    ),
    # Qwen2.5-VL 3B: a layer with windowed attention, and a layer with full attention.
    "qwen2.5-vl": Shape(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "depth": 2,
            "num_heads": 16,
            "out_hidden_size": 512,
            "fullatt_block_indexes": [1],
        },
        {},
        {"384": 392, "1024": 1036},
        _patches,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
    ),
}


def run(
    run: Run,
    shapes: Sequence[str] = tuple(SHAPES),
    dtypes: Sequence[str] = tuple(MOST_ERROR),
    threads: int = 2,
    rounds: int = 3,
) -> Document:
    """Time the encoders of both engines in turns.

    Args:
        run: the run.
        shapes: encoders to time.
        dtypes: types to compute in.
        threads: threads of both engines.
        rounds: number of timed rounds, after one round that warms up.
    """
    import torch

    from engine.worker.host.allocator import keep_freed_memory

    keep_freed_memory()  # as in a node; both engines then reuse the memory of activations
    torch.set_num_threads(threads)
    cases: dict[str, dict[str, float]] = {}
    for name in shapes:
        for dtype in dtypes:
            found = time_shape(run, name, dtype, rounds)
            run.show("case", found)
            cases |= found
    return {"instruction_set": instruction_set(), "threads": threads, "cases": cases}


def time_shape(run: Run, name: str, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return both engines' milliseconds, and their ratio, by case."""
    import torch

    shape = SHAPES[name]
    ours, theirs = both_engines(name, shape, dtype)
    found: dict[str, dict[str, float]] = {}
    for size, side in shape.sides.items():
        torch.manual_seed(0)
        inputs = shape.inputs(side)
        results: dict[str, Any] = {}
        times: dict[str, list[float]] = {"baton": [], "transformers": []}
        engines = {"baton": ours, "transformers": theirs}
        for number in range(rounds + 1):
            for engine in engines if number % 2 else reversed(engines):
                start = time.perf_counter()
                results[engine] = engines[engine](inputs)
                if number:  # the first round warms up
                    times[engine].append(1000 * (time.perf_counter() - start))
        case = f"{name}, {size} pixels, {dtype}"
        expected = results["transformers"].float()
        error = float((results["baton"].float() - expected).abs().max() / expected.abs().max())
        if not error <= MOST_ERROR[dtype]:
            run.problems.append(f"{case}: results differ by {error:.3g} of the largest number")
        ms = {engine: statistics.median(all_ms) for engine, all_ms in times.items()}
        found[case] = {
            **{f"{engine}_ms": round(one, 2) for engine, one in ms.items()},
            "ratio": round(ms["transformers"] / ms["baton"], 3),
            "error": error,
        }
    return found


def both_engines(
    name: str, shape: Shape, dtype: str
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return two functions from an image's inputs to its embeddings: Baton's, transformers'."""
    import torch
    import transformers

    from models import load_model
    from models.cpu.packing import CpuPacker

    text = {**TEXT, **shape.text}
    fields = {"text_config": text, "vision_config": dict(shape.vision), **shape.whole}
    folder = random_checkpoint(BUILD / name, shape.architecture, fields)
    kind = getattr(torch, dtype)
    packer = CpuPacker.choose(kind, "auto")
    model: Any = load_model(folder, dtype=kind, packer=packer, images=True)
    theirs = getattr(transformers, shape.architecture).from_pretrained(folder, dtype=kind).eval()

    @torch.inference_mode()
    def ours(inputs: Any) -> Any:
        # Baton's encoder takes one image, without the axis of images, which comes first. A list of
        # patches lacks this axis already.
        one = {n: x if n == "pixel_values" and x.dim() == 2 else x[0] for n, x in inputs.items()}
        return model.vision.encode(one)

    @torch.inference_mode()
    def other(inputs: Any) -> Any:
        given = {n: x.to(kind) if x.is_floating_point() else x for n, x in inputs.items()}
        return torch.cat(list(theirs.model.get_image_features(**given).pooler_output))

    return ours, other
