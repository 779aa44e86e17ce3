"""Tests that a request's tokens and logprobs have equal bits alone and in a batch, in every dtype.

In company it is cut into chunks, loses its blocks to others and is computed again, finds prefixes,
and is decoded beside others. BATON_REQUESTS says how many requests all cases draw together (usually
180); `make company-long` draws many.
Refuses to know: kernels (``test_rows_in_any_company.py``), the split system.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton_kernels import dispatch
from engine import LLM
from tests.fakes.system.split_cases import NUMBERS
from tests.numerics.tiny_models import make_hugging_face_model, save

KINDS = NUMBERS | {"int4 weights": {"dtype": "float32", "weights": "int4"}}
MODELS = {
    "full attention": ("MistralForCausalLM", None),
    "sliding window": ("MistralForCausalLM", 210),
    "experts": ("MixtralForCausalLM", None),
}
# Some texts are longer than the tiles (192 keys) and spans (576) by which attention sums.
MAX_MODEL_LEN, VOCABULARY, BLOCK_SIZE = 700, 61, 16
LENGTHS = (1, 5, 17, 40, 90, 185, 190, 200, 400, 560, 570, 590)
GROUP = 10  # requests of one company
FEW = 45  # blocks: three texts of 186 tokens begin in 36 of them, and need 48 before they end
NUM_REQUESTS = int(os.environ.get("BATON_REQUESTS") or 180)
NUM_GROUPS = max(1, NUM_REQUESTS // (GROUP * len(MODELS) * len(KINDS)))

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


@functools.cache
def _saved(name: str) -> tempfile.TemporaryDirectory[str]:
    architecture, window = MODELS[name]
    folder = tempfile.TemporaryDirectory(prefix="baton-test-")
    model = make_hugging_face_model(
        architecture,
        max_position_embeddings=MAX_MODEL_LEN,
        sliding_window=window,
        intermediate_size=64,  # experts of whole panels
        num_attention_heads=6,
        head_dim=24,
    )
    save(model, Path(folder.name))
    return folder


def load(kind: str, model: str, **options: Any) -> LLM:
    return LLM(
        _saved(model).name,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        **(KINDS[kind] | options),
    )


def draw_requests(random_: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Some prompts are prefixes of others; most outputs are sampled.

    The first three begin together and outgrow the FEW blocks: somebody is preempted.
    """
    family = [random_.randrange(3, VOCABULARY) for _ in range(max(LENGTHS))]
    prompts, params = [], []
    for number in range(GROUP):
        grows = number < 3
        length = 186 if grows else max(1, random_.choice(LENGTHS) - random_.randrange(5))
        own = [random_.randrange(3, VOCABULARY) for _ in range(length)]
        shared = 0 if grows else random_.choice([0, 0, length // 2, length])
        prompts.append(family[:shared] + own[shared:])
        params.append(
            SamplingParams(
                max_tokens=70 if grows else random_.choice([1, 5, 20, 70]),
                temperature=random_.choice([0.0, 1.0]),
                top_k=random_.choice([0, 20]),
                top_p=random_.choice([1.0, 0.9]),
                seed=random_.randrange(1000),
                ignore_eos=True,
                logprobs=random_.choice([0, 1, 2, 5, 20]),  # of equal ones any might be left out
                prompt_logprobs=1 if shared == 0 else None,
            )
        )
    return prompts, params


def results(completions: Sequence[Completion]) -> list[object]:
    """Floats are compared as they are: one bit is a difference."""
    return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in completions]


def cases() -> list[Any]:
    """Each kind with full attention, and two kinds with what attends or computes otherwise."""
    kept = {("float32", "sliding window"), ("int8 weights", "sliding window")}
    kept |= {("bfloat16", "experts"), ("int4 weights", "experts")}
    return [
        pytest.param(
            kind,
            model,
            marks=()
            if model == "full attention" or (kind, model) in kept
            else pytest.mark.thorough,
        )
        for kind in KINDS
        for model in MODELS
    ]


@pytest.mark.parametrize(("kind", "model"), cases())
def test_alone_and_in_company(kind: str, model: str) -> None:
    """Alone on one thread, in company on one or two."""
    alone = load(kind, model, num_blocks=60, num_threads=1, prefix_cache=False)
    for number in range(NUM_GROUPS):
        random_ = random.Random(f"{kind} {model} {number}")
        prompts, params = draw_requests(random_)
        torch.set_num_threads(1)
        expected = [
            alone.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)
        ]
        full = number % 2 == 0
        company = load(
            kind,
            model,
            num_threads=random_.choice([1, 2]),
            num_blocks=FEW if full else random_.choice([46, 60]),
            preemption="recompute",
            max_num_requests=GROUP,
            max_num_batched_tokens=random_.choice([64, 300, 1024] if full else [11, 64]),
            long_prefill_token_threshold=random_.choice([7, 50, 193, 512]),
            prefix_cache=random_.random() < 0.5,
            prefill_tokens_beside_decodes=2048 if full else random_.choice([5, 64]),
        )
        found = company.generate(prompts, params)
        assert results(found) == results(expected)
        if full and MODELS[model][1] is None:  # a window gives blocks back by itself
            assert company.engine.metrics().preemptions_total, "nobody lost its blocks"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_as_a_prompt_scores_what_decoding_it_gave(kind: str) -> None:
    """Logprobs of an output, and of the same tokens as a part of a prompt."""
    llm = load(kind, "full attention", num_blocks=60)
    random_ = random.Random(kind)
    prompt = [random_.randrange(3, VOCABULARY) for _ in range(560)]
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    [decoded] = llm.generate([prompt], params)
    text = [*prompt, *decoded.token_ids]
    [scored] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert scored.prompt_logprobs[len(prompt) :] == decoded.logprobs
    assert scored.prompt_logprobs[: len(prompt)] == decoded.prompt_logprobs
