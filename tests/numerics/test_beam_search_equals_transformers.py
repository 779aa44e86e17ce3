"""LLM.beam_search equals transformers' beam search: tokens, their order, and scores (float32)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from baton.api.beam_search import BeamCompletion, EarlyStopping
from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.large

VOCAB_SIZE = 61
MAX_MODEL_LEN = 128
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
PROMPTS = [PROMPT[:1], PROMPT[3:12], PROMPT]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, and the same model in transformers."""

    folder: str
    theirs: Any
    eos_token_ids: list[int]

    def expected(
        self,
        prompt: Sequence[int],
        width: int,
        max_tokens: int,
        penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> list[tuple[list[int], float]]:
        """(output tokens, score) of all beams, best first."""
        result = self.theirs.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=early_stopping,
            eos_token_id=self.eos_token_ids,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        if width == 1:  # greedy search there, which has no scores of whole outputs
            return [(result.sequences[0, len(prompt) :].tolist(), float("nan"))]
        lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
        return [
            (row[len(prompt) : len(prompt) + length].tolist(), float(score))
            for row, length, score in zip(
                result.sequences, lengths, result.sequences_scores, strict=True
            )
        ]


# End tokens that do occur, in any of the ways: often, now and then, several.
MODELS = {
    "qwen3": ("Qwen3ForCausalLM", [12], 0.4),
    "llama, three end tokens": ("LlamaForCausalLM", [18, 17, 40], 0.2),
    "mistral": ("MistralForCausalLM", [25, 17], 0.3),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture, eos_token_ids, spread = MODELS[request.param]
    theirs = make_hugging_face_model(
        architecture,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=spread,
        vocab_size=VOCAB_SIZE,
        eos_token_id=eos_token_ids,
    )
    folder = save(theirs, tmp_path_factory.mktemp("model"))
    return Checkpoint(str(folder), theirs, eos_token_ids)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return LLM(checkpoint.folder, dtype="float32", block_size=4, num_blocks=400)


def assert_same(found: list[BeamCompletion], expected: list[tuple[list[int], float]]) -> None:
    assert [list(beam.token_ids) for beam in found] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [beam.score for beam in found] == pytest.approx(scores, rel=1e-5, abs=1e-4)


def assert_at_rest(llm: LLM) -> None:
    assert llm.engine.requests == {}
    assert llm.engine.block_pool.num_free == llm.engine.num_blocks
    llm.engine.check()


# ---------------------------------------------------------------- the same outputs


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5, 2.0])
@pytest.mark.parametrize("width", [2, 4, 10])
def test_outputs_and_scores_are_those_of_transformers(
    checkpoint: Checkpoint, llm: LLM, width: int, penalty: float, early_stopping: EarlyStopping
) -> None:
    for prompt in PROMPTS:
        [found] = llm.beam_search(
            [prompt],
            beam_width=width,
            max_tokens=12,
            length_penalty=penalty,
            early_stopping=early_stopping,
        )
        assert_same(found, checkpoint.expected(prompt, width, 12, penalty, early_stopping))
    assert_at_rest(llm)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 64])
def test_any_length(checkpoint: Checkpoint, llm: LLM, max_tokens: int) -> None:
    [found] = llm.beam_search(PROMPTS[1], beam_width=4, max_tokens=max_tokens)
    assert_same(found, checkpoint.expected(PROMPTS[1], 4, max_tokens))


def test_end_tokens_do_end_outputs_in_these_tests(llm: LLM) -> None:
    beams = [beam for beams in llm.beam_search(PROMPTS, max_tokens=12) for beam in beams]
    stopped = [beam for beam in beams if beam.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(beam.token_ids[-1] in llm.engine.eos_token_ids for beam in stopped)
    for beam in beams:
        assert not llm.engine.eos_token_ids & set(beam.token_ids[:-1])
        assert beam.score == pytest.approx(beam.logprob / len(beam.token_ids))


def test_one_beam_is_greedy_search(checkpoint: Checkpoint, llm: LLM) -> None:
    [[found]] = llm.beam_search([PROMPT], beam_width=1, max_tokens=15)
    assert list(found.token_ids) == checkpoint.expected(PROMPT, 1, 15)[0][0]


def test_many_prompts_at_once_find_what_each_finds_alone(llm: LLM) -> None:
    together = llm.beam_search(PROMPTS, beam_width=3, max_tokens=10)
    alone = [llm.beam_search([prompt], beam_width=3, max_tokens=10)[0] for prompt in PROMPTS]
    assert [[b.token_ids for b in beams] for beams in together] == [
        [b.token_ids for b in beams] for beams in alone
    ]


def test_the_models_length_ends_outputs(checkpoint: Checkpoint) -> None:
    small = LLM(checkpoint.folder, dtype="float32", block_size=4, num_blocks=60, max_model_len=44)
    [found] = small.beam_search([PROMPT], beam_width=3, max_tokens=100)
    assert_same(found, checkpoint.expected(PROMPT, 3, 4))


# ---------------------------------------------------------------- ways to the same outputs


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"num_blocks": 18},  # a prompt and its beams take turns
        {"max_num_requests": 2, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 5},
    ],
)
def test_without_a_prefix_cache_or_with_little_memory_they_are_the_same(
    checkpoint: Checkpoint, options: dict[str, Any]
) -> None:
    defaults = {"dtype": "float32", "block_size": 4, "num_blocks": 400, "max_model_len": 64}
    llm = LLM(checkpoint.folder, **(defaults | options))
    [found] = llm.beam_search([PROMPT], beam_width=4, max_tokens=9)
    assert_same(found, checkpoint.expected(PROMPT, 4, 9))
    assert_at_rest(llm)


def test_beams_share_the_blocks_of_their_beginning(llm: LLM) -> None:
    llm.engine.block_pool.reset_prefix_cache()
    before = llm.engine.metrics()
    llm.beam_search([PROMPT], beam_width=4, max_tokens=9)
    after = llm.engine.metrics()
    computed = after.prompt_tokens_computed_total - before.prompt_tokens_computed_total
    # The prompt once; then per beam and step what is behind the last full block, 4 at most, and
    # what another block had when beams parted.
    assert computed < len(PROMPT) + 8 * 4 * 6
    assert after.cached_prompt_tokens_total - before.cached_prompt_tokens_total > 8 * 4 * 30


def test_the_demo_model_searches_as_transformers_does() -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_blocks=300)
    checkpoint = Checkpoint(str(DEMO_MODEL), theirs.eval(), sorted(llm.engine.eos_token_ids))
    assert llm.tokenizer is not None
    for text in ("def read_config(path):", "import os\n"):
        prompt = llm.tokenizer.encode(text)
        for width, penalty in ((2, 1.0), (4, 0.5), (5, 2.0)):
            [found] = llm.beam_search(text, beam_width=width, max_tokens=24, length_penalty=penalty)
            assert_same(found, checkpoint.expected(prompt, width, 24, penalty))
            assert found[0].text == llm.tokenizer.decode(found[0].token_ids)
    assert_at_rest(llm)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("beam_width", 0, r"from 1 to 18, got 0"),
        ("beam_width", 20, r"from 1 to 18, got 20"),
        ("beam_width", 2.0, r"from 1 to 18, got 2\.0"),
        ("max_tokens", 0, r"from 1 to \d+, got 0"),
        ("length_penalty", float("nan"), r"must be a number from -10 to 10, got nan"),
        ("length_penalty", 11, r"must be a number from -10 to 10, got 11"),
        ("early_stopping", "soon", r"must be True, False or \"never\", got 'soon'"),
    ],
)
def test_a_parameter_outside_its_limit_is_refused_by_its_name(
    option: str, value: object, problem: str
) -> None:
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_blocks=50)
    with pytest.raises(InvalidRequestError, match=f"^{option}: .*{problem}$"):
        llm.beam_search([[1, 2]], **{option: value})  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidRequestError, match=r"^prompt: "):
        llm.beam_search([[1, 2], []])
    assert llm.engine.num_steps == 0
