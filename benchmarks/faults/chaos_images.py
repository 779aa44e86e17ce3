"""Chaos drills of encode nodes: a load with images, and the death or stop of the encode node.

Prompts repeat, but each request sends new files: a comment in a file changes the digest of the
image, and not its pixels. So no cache has an encoding, and all encodings travel. A lost encoding is
made again by the prefill node, so no request may fail, wait long or get a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeploymentConfig
from baton.processes.free_address import free_address
from benchmarks.faults.chaos_load import CHUNK_TOKENS, Asked, certain_answers
from benchmarks.runner.answers import Answer, Case
from loadtest.load.images import DrawnImage

# Arrow of the encoding's diagram -> process to kill, and the point in it.
ENCODING_ARROWS = {
    4: [("e0", "Start:send"), ("p0", "Start:recv")],
    5: [("p0", "Grant:send"), ("e0", "Grant:recv")],
    6: [("e0", "Write:send")],
    8: [("e0", "Commit:send"), ("p0", "Commit:recv")],
    9: [("p0", "Cancel:send"), ("e0", "Cancel:recv")],
    10: [("e0", "Quiet:send"), ("p0", "Quiet:recv")],
}
NODE_ARGS = [
    *("--dtype", "float32", "--num-blocks", "600", "--max-num-requests", "16"),
    *("--long-prefill-token-threshold", str(CHUNK_TOKENS)),
]
_SIZES = ((64, 64), (100, 40), (30, 120), (128, 96))
_NUM_WORDS = 250  # the checkpoint's first tokens are the bytes


def vision_checkpoint(folder: Path) -> tuple[Path, int]:
    """Write a tiny random checkpoint of SmolVLM; return its folder and its marker's token id."""
    from tests.numerics.vision_checkpoints import FIRST_SPECIAL, make_vision_checkpoint

    folder.mkdir()
    make_vision_checkpoint("SmolVLMForConditionalGeneration", folder)
    return folder, FIRST_SPECIAL


def make_image_cases(model: str, marker: int, num_cases: int, seed: int) -> list[Case]:
    """Make requests with up to three images, greedy and seeded, whose answers are certain."""
    draw = random.Random(seed)
    drawn: list[tuple[list[int], tuple[bytes, ...], SamplingParams]] = []
    for index in range(num_cases):
        prompt, images = _words(draw), list[bytes]()
        for _ in range(index % 4):
            prompt += [marker, *_words(draw)]
            size = draw.choice(_SIZES)
            images.append(DrawnImage(f"{seed} {index} {len(images)}", *size).make())
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 20, 60]),
            temperature=0.0 if index % 2 else 0.8,
            seed=index,
            ignore_eos=True,
        )
        drawn.append((prompt, tuple(images), params))
    prompts: list[Asked] = [{"prompt": prompt, "images": images} for prompt, images, _ in drawn]
    params_of = [params for _, _, params in drawn]
    answers = certain_answers(model, prompts, params_of, long_prefill_token_threshold=CHUNK_TOKENS)
    return [
        Case(prompt, params, answer, images=images)
        for (prompt, images, params), answer in zip(drawn, answers, strict=True)
        if answer is not None
    ]


def image_config(model: Path, kv_connector: str) -> LocalDeploymentConfig:
    """Return a deployment of two prefill nodes, a decode node and an encode node."""
    connector = ["--kv-connector", kv_connector]
    return LocalDeploymentConfig(
        model=str(model),
        listen=free_address(),
        num_prefill=2,
        num_decode=1,
        num_encode=1,
        router_args=["--no-local-prefill"],
        node_args=[*NODE_ARGS, *connector],
        prefill_args=["--metrics-listen", "127.0.0.1:0"],  # any free port
        encode_args=["--dtype", "float32", *connector],
    )


def count_encodings(answers: Sequence[Answer]) -> dict[str, int]:
    """Count the encodings in the receipts: those received, and those lost."""
    receipts = [answer.receipt.prefill for answer in answers if answer.receipt is not None]
    computed = [receipt for receipt in receipts if receipt is not None]
    return {
        "received": sum(one.num_encodings_received for one in computed),
        "lost": sum(one.num_encodings_lost for one in computed),
    }


def _words(draw: random.Random) -> list[int]:
    return [draw.randrange(_NUM_WORDS) for _ in range(draw.choice([1, 5, 20, 90]))]
