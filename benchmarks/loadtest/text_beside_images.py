"""Measure text requests beside requests with images: TTFT and ITL, with and without an encode node.

Real processes serve a random checkpoint with SmolVLM-256M's widths and few layers. Three cases take
turns and get the same arrivals: a load without images; the load with images, encoded by the prefill
node; and the load with images, encoded by an encode node. Only requests without images are
compared. The last core belongs to the encode node, the router and this program. The prefill and the
decode node divide the other cores in all three cases.

    python -m benchmarks text_beside_images
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
from pathlib import Path
from typing import Any

from baton.processes.cores import usable_cores
from benchmarks.engine_cpu.engine_cpu import instruction_set
from benchmarks.runner.checkpoints import random_checkpoint
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run
from loadtest.drills.site import UpOptions, started
from loadtest.load.generate import Lengths
from loadtest.load.images import ImageLoad
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.distribution import Distribution
from loadtest.report.summary import Summary
from loadtest.session import Session
from loadtest.targets import open_target
from loadtest.targets.base import TargetOptions

BUILD = ROOT / "build" / "text_beside_images"
SIDE = 512  # pixels of an image, which is one tile of 64 tokens
TEXT = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49280,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "patch_size": 16,
    "image_size": SIDE,
}
# Number of encode nodes by case; None: the load has no images.
CASES = {"no images": None, "images on the prefill node": 0, "images on an encode node": 1}
METRICS = {
    "itl_p50_ms": ("itl", "p50"),
    "itl_p99_ms": ("itl", "p99"),
    "ttft_p50_ms": ("ttft", "p50"),
    "ttft_p99_ms": ("ttft", "p99"),
}


def checkpoint(text_layers: int, vision_layers: int) -> Path:
    """Write the checkpoint, its image processor, tokenizer and chat template once."""
    import transformers

    from tests.numerics.vision_checkpoints import CHAT_TEMPLATE, VISION_FAMILIES, make_tokenizer

    name = "SmolVLMForConditionalGeneration"
    family = VISION_FAMILIES[name]
    tokenizer = make_tokenizer(family.tokens)
    fields = {
        "text_config": {**TEXT, "num_hidden_layers": text_layers},
        "vision_config": {**VISION, "num_hidden_layers": vision_layers},
        "scale_factor": 4,
        "image_token_id": tokenizer.convert_tokens_to_ids(family.tokens[0]),
    }
    folder = random_checkpoint(BUILD / f"{text_layers}-{vision_layers}", name, fields)
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
    transformers.SmolVLMImageProcessorPil(**sizes).save_pretrained(folder)
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": (SIDE // 16 // 4) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    template = CHAT_TEMPLATE.replace("MARKER", family.tokens[0])
    (folder / "chat_template.jinja").write_text(template)
    return folder


def run(
    run: Run,
    rate: float = 0.5,
    share: float = 0.2,
    images: int = 4,
    rounds: int = 3,
    duration_s: float = 90.0,
    text_layers: int = 8,
    vision_layers: int = 2,
    seed: int = 1,
) -> Document:
    """Play the three cases in turns.

    Args:
        run: the run.
        rate: requests per second.
        share: share of requests with images.
        images: images of such a request.
        rounds: rounds of all cases; each has other requests.
        duration_s: seconds of each load, of which the first fifth is not measured.
        text_layers: layers of the language model.
        vision_layers: layers of the vision encoder.
        seed: seed of the requests.
    """
    model = checkpoint(text_layers, vision_layers)
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=rate),
        input_lengths=Lengths(128),
        output_lengths=Lengths(64),
        warmup_s=duration_s / 5,
        duration_s=duration_s,
        vocab_size=250,
        seed=seed,
        max_lag_s=0.05,
        images=ImageLoad(counts=Lengths(images), sizes=((SIDE, SIDE),), share=share, repeats=0.0),
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for number in range(rounds):
        names = list(CASES)
        for name in names[number % 3 :] + names[: number % 3]:
            row = asyncio.run(_play(model, plan, number, CASES[name]))
            found[name].append(row)
            run.show(f"round {number}", {name: row})
            if row["failed"] or not row["kept_up"]:
                run.problems.append(f"{name}: {row['failed']} failed; on time: {row['kept_up']}")
    cases = {name: _medians(rows) for name, rows in found.items()}
    ratios = {name: _ratios(rows, found["no images"]) for name, rows in found.items()}
    document = {
        "instruction_set": instruction_set(),
        "cores": len(usable_cores()),
        "rate": rate,
        "share": share,
        "images": images,
        "cases": cases,
        "ratios": ratios,
        "rounds": found,
    }
    run.show("text requests, medians of the rounds", cases)
    run.show("divided by the load without images", ratios)
    return document


async def _play(model: Path, plan: LoadPlan, number: int, num_encode: int | None) -> dict[str, Any]:
    """Start a deployment, play one load, and return the figures of text requests."""
    from dataclasses import replace

    cores = sorted(usable_cores())
    dtype = ("--dtype", "float32")
    options = UpOptions(
        model=str(model),
        num_encode=num_encode or 0,
        router_args=("--no-local-prefill",),
        node_args=(*dtype, "--kv-cache-memory", "256M"),
        encode_args=dtype,
        cores=tuple(cores[:-1] or cores),
    )
    stop = asyncio.Event()
    async with started(options, stop) as (site, address):
        for name in ("router", "e0")[: 2 if num_encode else 1]:
            _bind(site.pid(name), cores[-1])
        target = await open_target(TargetOptions(url=f"grpc://{address}", api_key=site.admin_token))
        try:
            drawn = replace(plan, round=number)
            if num_encode is None:
                drawn = replace(drawn, images=None)
            result = await Session(target, stop).play(drawn)
        finally:
            await target.close()
    return _figures(result.summary, has_images=num_encode is not None)


def _bind(pid: int, core: int) -> None:
    """Let all threads of a process run on this core alone."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), {core})


def _figures(summary: Summary, *, has_images: bool) -> dict[str, Any]:
    text = "_text" if has_images else ""
    row: dict[str, Any] = {}
    for name, (latency, percentile) in METRICS.items():
        values: Distribution | None = summary.latencies.get(f"{latency}{text}_s")
        row[name] = None if values is None else round(1e3 * getattr(values, percentile), 3)
    shown = summary.images.encodings if summary.images is not None else None
    return row | {
        "requests": summary.num_requests,
        "failed": sum(summary.errors.values()),
        "kept_up": summary.lag.kept_up,
        "received": 0 if shown is None else shown.num_received,
        "made": 0 if shown is None else shown.num_made,
        "lost": 0 if shown is None else shown.num_lost,
    }


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in METRICS}


def _ratios(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the rounds of each figure divided by that of the other rows."""
    return {
        name: round(
            statistics.median(
                row[name] / other[name] for row, other in zip(rows, others, strict=True)
            ),
            3,
        )
        for name in METRICS
    }
