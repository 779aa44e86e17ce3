"""A request gets the same bits in company as alone, in randomly shaped models of every family.

Heads, latents, experts and vocabularies have odd sizes, and blocks are few. In company prompts are
cut into chunks, requests lose their blocks and are computed again, find cached prefixes, and have
drafts. BATON_REQUESTS says how many requests all families draw in total; `make company-long` draws
many. Refuses to know: kernels, the split system.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.sampling_params import SamplingParams
from baton_kernels import dispatch, reference
from baton_kernels.attention import native as native_attention
from baton_kernels.native import ops as native_ops_module
from engine import LLM
from models.registry import MODELS
from tests.fakes.engine import drafters
from tests.numerics.drawn_models import draw_fields
from tests.numerics.test_results_in_any_company import KINDS, results
from tests.numerics.tiny_models import make_hugging_face_model, save
from tests.property.num_examples import num_requests

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here"),
]

GROUP = 8  # requests computed together
MAX_MODEL_LEN = 96
LENGTHS = (1, 5, 17, 33, 34, 40, 60)
MAX_TOKENS = 30
NUM_FAMILIES = len(MODELS.names())
NUM_MODELS = -(-num_requests(GROUP * NUM_FAMILIES) // (GROUP * NUM_FAMILIES))  # for each family
STATES = ("Bamba", "GraniteMoeHybrid", "Lfm2", "NemotronH", "Qwen3Next", "Qwen3_5")
# Families for which `drafters.options_of` can make drafters, from config and layers.
DRAFT_MODELS = ("Gemma", "Llama", "Mistral", "Mixtral", "Olmo", "Qwen2", "Qwen3")
MTP = ("Deepseek", "Qwen3ForCausalLM", "Qwen3Moe", "Glm4Moe", "Gemma3", "Olmo3")


# Have latents, two windows, sinks, states of both kinds, convolutions, norms of all heads.
KEPT = ("DeepseekV2", "Gemma3", "GptOss", "NemotronH", "Qwen3Next", "Lfm2", "Olmo3")
EXACT = ("largest",)  # reference ops that sum nothing, so company changes no bit


class NativeAlone:
    """The reference as native ops see it here: an op that falls back to torch is an error."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(reference, name)
        assert name in EXACT or not callable(found), f"{name} is computed in torch"
        return found


@pytest.fixture(autouse=True)
def _nothing_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid torch's ops: in torch a row's bits depend on the number of rows."""
    monkeypatch.setattr(native_ops_module, "reference", NativeAlone())
    monkeypatch.setattr(native_attention, "CpuAttention", lambda: None)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw_requests(
    vocab_size: int, draw: random.Random
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draw requests: some share prefixes; three grow until the few blocks run out."""
    family = [draw.randrange(3, vocab_size) for _ in range(max(LENGTHS))]
    prompts, params = [], []
    for number in range(GROUP):
        grows = number < 3
        length = 40 if grows else draw.choice(LENGTHS)
        own = [draw.randrange(3, vocab_size) for _ in range(length)]
        shared = 0 if grows else draw.choice([0, length // 2, length])
        prompts.append(family[:shared] + own[shared:])
        params.append(
            SamplingParams(
                max_tokens=MAX_TOKENS if grows else draw.choice([1, 5, 20, MAX_TOKENS]),
                temperature=draw.choice([0.0, 1.0]),
                top_k=draw.choice([0, 20]),
                top_p=draw.choice([1.0, 0.9]),
                seed=draw.randrange(1000),
                ignore_eos=True,
                logprobs=draw.choice([0, 1, 5]),
                repetition_penalty=draw.choice([1.0, 1.2]),
                prompt_logprobs=1 if shared == 0 and draw.random() < 0.3 else None,
            )
        )
    return prompts, params


def draw_methods(architecture: str, folder: Path, draw: random.Random) -> list[dict[str, Any]]:
    """Draw engine options: without drafts, with n-grams, and with a drafter if possible."""
    if architecture.startswith(STATES):  # their states cannot be rolled back
        return [{}, {}]
    if architecture.endswith("ForConditionalGeneration"):  # fakes of drafters read plain configs
        return [{}, drafters.options_of("ngram", folder)]
    names = ["medusa"]
    if architecture.startswith(DRAFT_MODELS):
        names.append("draft_model")
    if architecture == "LlamaForCausalLM":
        names.append("eagle")
    if architecture.startswith(MTP):
        names.append("mtp")
    methods = [{}, drafters.options_of("ngram", folder)]
    methods.append(drafters.options_of(draw.choice(names), folder))
    more = {"num_speculative_tokens": draw.choice([1, 3, 5]), "adaptive_speculation": False}
    return [methods[0], *(one | more for one in methods[1:])]


def min_num_blocks(llm: LLM) -> int:
    """Return the fewest blocks that hold one request of MAX_MODEL_LEN tokens."""
    manager = llm.engine._scheduler.kv_cache_manager
    return manager.num_blocks_for(MAX_MODEL_LEN) + manager.slides


def compare(architecture: str, number: int, folder: Path) -> tuple[int, int]:
    """Draw a model and requests, and compare; returns the numbers of preemptions and drafts."""
    draw = random.Random(f"{architecture} {number}")
    fields = draw_fields(architecture, draw)
    model = make_hugging_face_model(architecture, max_position_embeddings=256, **fields)
    save(model, folder)
    has_latents = "kv_lora_rank" in fields
    kinds = [kind for kind in KINDS if not (has_latents and kind == "fp8 cache")]
    kind = draw.choice(kinds)
    block_size = 0 if architecture.startswith(STATES) else draw.choice([4, 8, 16])
    shared = {**KINDS[kind], "block_size": block_size, "max_model_len": MAX_MODEL_LEN}
    alone = LLM(str(folder), num_threads=1, prefix_cache=False, kv_cache_bytes=2**24, **shared)
    prompts, params = draw_requests(fields["vocab_size"], draw)
    expected = [
        alone.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    num_preemptions = num_drafts = 0
    for is_first, options in zip(
        (True, False, False), draw_methods(architecture, folder, draw), strict=False
    ):
        company: dict[str, Any] = {
            "num_threads": draw.choice([1, 2]),
            "preemption": "recompute",
            "max_num_requests": GROUP,
            "max_num_batched_tokens": draw.choice([11, 40, 300]),
            "long_prefill_token_threshold": draw.choice([7, 20, 64]),
            "prefill_tokens_beside_decodes": draw.choice([3, 13, 300]),
            "prefix_cache": draw.random() < 0.6,
            "async_scheduling": draw.random() < 0.5,
            **options,
        }
        num_blocks = min_num_blocks(LLM(str(folder), kv_cache_bytes=2**24, **shared, **options))
        company["num_blocks"] = num_blocks + (0 if is_first else draw.choice([0, 1, 5]))
        llm = LLM(str(folder), **shared, **company)
        found = llm.generate(prompts, params)
        differing = [
            index
            for index, pair in enumerate(zip(results(found), results(expected), strict=True))
            if pair[0] != pair[1]
        ]
        assert not differing, (
            f"requests {differing} of {architecture} {number}, {kind}, {fields}, {company}"
        )
        metrics = llm.engine.metrics()
        num_preemptions += metrics.preemptions_total
        num_drafts += metrics.drafts_total
    return num_preemptions, num_drafts


def architectures() -> list[Any]:
    """List families; `make test` keeps some that together have every kind of layer."""
    return [
        pytest.param(name, marks=() if name.startswith(KEPT) else pytest.mark.large)
        for name in MODELS.names()
    ]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.timeout(0)
def test_alone_and_in_company(
    architecture: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    num_preemptions = num_drafts = 0
    for number in range(NUM_MODELS):
        more_preemptions, more_drafts = compare(architecture, number, tmp_path / str(number))
        num_preemptions += more_preemptions
        num_drafts += more_drafts
    record_property("requests", NUM_MODELS * GROUP)
    record_property("preemptions", num_preemptions)
    record_property("drafts", num_drafts)
    # One model with states may be drawn with blocks that hold whole requests.
    assert num_preemptions or (architecture.startswith(STATES) and NUM_MODELS == 1)
    assert num_drafts or architecture.startswith(STATES)
