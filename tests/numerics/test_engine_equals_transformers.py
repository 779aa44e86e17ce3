"""Tests that engine.LLM gives the tokens of transformers' greedy generate, token for token.

Chunks, block sizes, prefix hits, preemption and batches are ways to the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.request import Request
from engine.worker.kv_cache import kv_cache_spec
from models import load_model
from tests.numerics.tiny_models import make_hugging_face_model, save

VOCAB_SIZE = 61
MAX_MODEL_LEN = 200
WINDOW = 12
NUM_OUTPUTS = 8
# Float noise between two ways to sum is about 1e-5 of a logit; a token is certain beyond this.
CLEAR_CUT = 1e-3

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(70)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A random model on disk, and the same model in transformers."""

    folder: str
    theirs: Any
    num_groups: int  # of KV cache
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def expected(self, prompt: Sequence[int], num_tokens: int = NUM_OUTPUTS) -> list[int]:
        """Greedy tokens by transformers; the prompt must not be a toss-up."""
        key = (num_tokens, *prompt)
        if key not in self.known:
            self.known[key] = self._generate(prompt, num_tokens)
        return self.known[key]

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        result = self.theirs.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(result.logits).squeeze(1).topk(2).values  # [num_tokens, 2]
        assert float((best[:, 0] - best[:, 1]).min()) > CLEAR_CUT
        tokens: list[int] = result.sequences[0, len(prompt) :].tolist()
        return tokens


def mixed(pattern: str) -> dict[str, Any]:
    """A Qwen3 with a layer per letter: s has a window, f has full attention."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [names[letter] for letter in pattern],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral, window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen3, 1:1": ("Qwen3ForCausalLM", mixed("sfsf")),
    "qwen3, 5:1": ("Qwen3ForCausalLM", mixed("sssssf") | {"intermediate_size": 44}),
    "qwen3, empty places": ("Qwen3ForCausalLM", mixed("sfsssfsssfs")),
    "qwen2, 2:1": (
        "Qwen2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
}


# The others' layers are among the layers of these.
RICHEST = ("llama", "mistral, window", "qwen3, empty places", "qwen2, 2:1")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in RICHEST else pytest.mark.thorough)
        for name in CHECKPOINTS
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture, overrides = CHECKPOINTS[request.param]
    theirs = make_hugging_face_model(
        architecture,
        **overrides,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.5,
        vocab_size=VOCAB_SIZE,
    )
    folder = save(theirs, tmp_path_factory.mktemp("model"))
    return Checkpoint(
        str(folder),
        theirs,
        kv_cache_spec(load_model(folder).kv_layers, 16, torch.float32).num_groups,
    )


def make_llm(checkpoint: Checkpoint, **options: Any) -> LLM:
    """``num_blocks`` is for each KV cache group."""
    block_size = options.get("block_size", 16)
    defaults = {"dtype": "float32", "num_blocks": -(-1600 // block_size), "max_num_requests": 16}
    options = defaults | options
    num_groups = checkpoint.num_groups
    return LLM(checkpoint.folder, **(options | {"num_blocks": options["num_blocks"] * num_groups}))


def greedy(num_tokens: int = NUM_OUTPUTS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


def make_requests(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = NUM_OUTPUTS,
) -> list[Request]:
    """Requests for `run`, for tests that look at what became of them."""
    return [
        Request.create(
            f"r{index}",
            list(prompt),
            greedy(num_tokens),
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=llm.engine.max_model_len,
        )
        for index, prompt in enumerate(prompts)
    ]


def run(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    """Output tokens in the order of the requests; the engine's invariants hold after each step."""
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    spec = llm.engine.kv_memory.spec
    assert llm.engine.block_pool.num_free == llm.engine.num_blocks - spec.num_null_blocks
    return [request.output_token_ids for request in requests]


def family(num_prompts: int, length: int, num_shared: int) -> list[list[int]]:
    """Prompts that share their first ``num_shared`` tokens, with ends of their own."""
    return [
        PROMPT[:num_shared]
        + [(11 * i * i + 5 * k * i + 13 * k + 1) % VOCAB_SIZE for i in range(length - num_shared)]
        for k in range(num_prompts)
    ]


# ---------------------------------------------------------------- chunks and blocks


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("threshold", [1, 7, 64, 1024])
def test_any_chunk_and_block_size_gives_the_tokens_of_transformers(
    checkpoint: Checkpoint, threshold: int, block_size: int
) -> None:
    llm = make_llm(checkpoint, block_size=block_size, long_prefill_token_threshold=threshold)
    [request] = make_requests(llm, [PROMPT])
    assert run(llm, [request]) == [checkpoint.expected(PROMPT)]
    assert request.num_forwards == -(-len(PROMPT) // threshold) + NUM_OUTPUTS - 1


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17])
def test_prompts_of_any_length_through_generate(checkpoint: Checkpoint, length: int) -> None:
    llm = make_llm(checkpoint)
    [completion] = llm.generate([PROMPT[:length]], greedy())
    assert list(completion.token_ids) == checkpoint.expected(PROMPT[:length])


# ---------------------------------------------------------------- prefix cache


def test_prefix_hits_of_every_length_change_no_token(checkpoint: Checkpoint) -> None:
    block_size = 8
    llm = make_llm(checkpoint, block_size=block_size, num_blocks=400)
    run(llm, make_requests(llm, [PROMPT[:32]]))
    for num_shared in range(33):
        prompt = PROMPT[:num_shared] + [(3 * num_shared + 1) % VOCAB_SIZE] * (33 - num_shared)
        [request] = make_requests(llm, [prompt])
        [tokens] = run(llm, [request])
        assert tokens == checkpoint.expected(prompt)
        # Prompts before this one may have more in common with it than the first one has.
        assert request.num_hit_tokens >= num_shared // block_size * block_size
    assert request.num_hit_tokens == 32


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_talks_of_many_turns_build_on_what_was_generated(
    checkpoint: Checkpoint, block_size: int
) -> None:
    llm = make_llm(checkpoint, block_size=block_size, prefix_hash="sha256")
    talk = PROMPT[:9]
    for turn in range(5):
        [request] = make_requests(llm, [talk])
        [tokens] = run(llm, [request])
        assert tokens == checkpoint.expected(talk)
        if turn:
            known = len(talk) - 4  # without the last answer's last token, and what was added
            assert request.num_hit_tokens == known // block_size * block_size
        talk = [*talk, *tokens, 7 + turn, 40, 3]


def test_evicted_prefixes_are_computed_again_and_a_reset_forgets_them(
    checkpoint: Checkpoint,
) -> None:
    llm = make_llm(checkpoint, block_size=4, num_blocks=18)
    prompts = family(5, 30, 14)
    expected = [checkpoint.expected(prompt) for prompt in prompts]
    num_cached = []
    for index in (0, 1, 2, 0, 3, 4, 1, 0):
        if index == 4:
            llm.engine.block_pool.reset_prefix_cache()
        [request] = make_requests(llm, [prompts[index]])
        assert run(llm, [request]) == [expected[index]]
        num_cached.append(request.num_hit_tokens)
    assert (num_cached[0], num_cached[5]) == (0, 0)  # nothing computed yet, all forgotten
    assert all(num_cached[index] for index in (1, 4, 6))
    assert num_cached[3] < 28  # it was computed before, but not all of it is still there


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_cache_saves_forwards_or_not_but_never_changes_a_token(
    checkpoint: Checkpoint, prefix_cache: bool
) -> None:
    llm = make_llm(checkpoint, block_size=8, prefix_cache=prefix_cache)
    prompts = family(4, 40, 24)
    for prompt in prompts:
        [request] = make_requests(llm, [prompt])
        assert run(llm, [request]) == [checkpoint.expected(prompt)]
    assert request.num_hit_tokens == (24 if prefix_cache else 0)


# ---------------------------------------------------------------- batches and memory


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_any_order_in_a_batch_gives_each_its_own_tokens(
    checkpoint: Checkpoint, order: list[int], prefix_cache: bool
) -> None:
    llm = make_llm(
        checkpoint,
        block_size=8,
        prefix_cache=prefix_cache,
        max_num_requests=3,
        max_num_batched_tokens=25,
        long_prefill_token_threshold=11,
    )
    family_prompts = family(5, 36, 20)
    prompts = [family_prompts[index][: 20 + 4 * index] for index in order]
    found = run(llm, make_requests(llm, prompts))
    assert found == [checkpoint.expected(prompt) for prompt in prompts]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_lose_and_change_no_token(
    checkpoint: Checkpoint, prefix_cache: bool
) -> None:
    llm = make_llm(
        checkpoint,
        block_size=2,
        num_blocks=25,
        max_num_batched_tokens=30,
        long_prefill_token_threshold=7,
        prefix_cache=prefix_cache,
    )
    prompts = [prompt[: 7 + index] for index, prompt in enumerate(family(5, 20, 6))]
    requests = make_requests(llm, prompts, 30)
    found = run(llm, requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert found == [checkpoint.expected(prompt, 30) for prompt in prompts]


def test_a_long_output_holds_what_each_group_of_layers_looks_at(checkpoint: Checkpoint) -> None:
    block_size = 4
    llm = make_llm(checkpoint, block_size=block_size, long_prefill_token_threshold=8)
    windows = llm.engine.kv_memory.spec.sliding_windows
    num_free = llm.engine.block_pool.num_free
    [request] = make_requests(llm, [PROMPT[:5]], 120)
    llm.engine.add_request(request)
    while True:
        llm.engine.step()
        if not llm.engine.has_work:
            break
        end = request.num_computed_tokens
        oldest = [0 if window is None else max(end - window + 1, 0) for window in windows]
        needed = sum(-(-end // block_size) - start // block_size for start in oldest)
        assert num_free - llm.engine.block_pool.num_free == needed
    assert request.output_token_ids == checkpoint.expected(PROMPT[:5], 120)
