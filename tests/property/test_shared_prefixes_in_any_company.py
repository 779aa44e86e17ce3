"""Test that requests with equal first blocks get the same bits in one engine as each gets alone.

Long prompts have equal beginnings, so that decodes share whole spans of keys (ADR 0106). The cache
has few blocks, so that requests are preempted. `make test` draws some requests; a large test draws
two thousand in each dtype. Refuses to know: kernels (`numerics/test_shared_prefixes.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton_kernels import dispatch
from engine import LLM
from tests.numerics.tiny_models import make_hugging_face_model, save
from tests.property.num_examples import num_requests

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")

VOCAB_SIZE = 61
SPAN = 576  # keys, as in `kernels/csrc/attention.h`
BLOCK_SIZE = 16
LENGTHS = (SPAN + 24, 2 * SPAN + 8)  # lengths of the common beginnings
OPTIONS: dict[str, Any] = {"num_threads": 1, "block_size": BLOCK_SIZE, "max_num_requests": 16}
# Room for two beginnings, and with the first number also for the tokens of 16 requests behind them.
ENOUGH_BLOCKS, FEW_BLOCKS = 170, 120
MANY = [pytest.param(2000, one, marks=pytest.mark.large) for one in ("float32", "bfloat16")]
Drawn = tuple[list[list[int]], list[SamplingParams]]


def draw_requests(num: int) -> Drawn:
    """Draw prompts that start with a whole or partial common beginning, and their parameters."""
    draw = random.Random(num)
    tokens = range(3, VOCAB_SIZE)
    beginnings = [draw.choices(tokens, k=length) for length in LENGTHS]
    prompts = [
        draw.choice(beginnings)[: draw.choice([None, None, None, SPAN + 16, SPAN - 5, 40])]
        + draw.choices(tokens, k=draw.randint(1, 30))
        for _ in range(num)
    ]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 12),
            temperature=draw.choice([0.0, 0.0, 1.0]),
            seed=index,
            ignore_eos=True,
            logprobs=1,
        )
        for index in range(num)
    ]
    return prompts, params


class Sharers:
    """Counts, for each step, the decodes that share their first span."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        step, requests = llm.engine.step, llm.engine.requests

        def counted() -> Any:
            firsts = Counter(
                tuple(request.block_ids[: SPAN // BLOCK_SIZE])
                for request in requests.values()
                if request.output_token_ids and request.num_computed_tokens > SPAN
            )
            self.most = max(self.most, *firsts.values(), 0)
            return step()

        monkeypatch.setattr(llm.engine, "step", counted)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_hugging_face_model(
        "Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        num_attention_heads=8,
        num_key_value_heads=1,  # two decodes have the 16 rows from which on sharing saves time
    )


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("num", "dtype"), [(24, "float32"), *MANY])
def test_shared_spans_change_no_bit(
    num: int,
    dtype: str,
    theirs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    folder = str(save(theirs, tmp_path))
    prompts, params = draw_requests(num_requests(num) if num > 24 else num)
    alone = LLM(folder, dtype=dtype, **OPTIONS | {"max_num_requests": 1}, num_blocks=400)
    expected = alone.generate(prompts, params)
    together = LLM(
        folder, dtype=dtype, **OPTIONS, num_blocks=FEW_BLOCKS if num > 24 else ENOUGH_BLOCKS
    )
    sharers = Sharers(together, monkeypatch)
    assert_equal(together.generate(prompts, params), expected)
    together.engine.check()
    assert sharers.most >= 4
    if num > 24:
        assert together.metrics().preemptions_total > 0
    record_property("requests", len(prompts))
    if dtype == "float32":
        assert_as_transformers(theirs, prompts[:12], params[:12], expected[:12])


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == other.logprobs


def assert_as_transformers(
    theirs: Any, prompts: list[list[int]], params: list[SamplingParams], found: list[Completion]
) -> None:
    """Assert that greedy outputs equal the outputs of transformers."""
    for prompt, one, mine in zip(prompts, params, found, strict=True):
        if one.temperature == 0:
            rows = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=one.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert rows[0, len(prompt) :].tolist() == list(mine.token_ids)
