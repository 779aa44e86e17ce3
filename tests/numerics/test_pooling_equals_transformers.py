"""Embeddings, scores and labels equal transformers', and have the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.api.errors import InvalidRequestError
from baton.checkpoint.pooling.pairs import pair_text
from engine import LLM
from tests.fakes.checkpoints.pooling_models import (
    HIDDEN_SIZE,
    LABELS,
    NO,
    QUERY_PROMPT,
    YES,
    make_classifier,
    make_embedder,
    make_reranker,
)
from tests.numerics.tiny_models import make_hugging_face_model, save

TOLERANCE = 1e-5
VOCAB_SIZE, WINDOW = 61, 12
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(50)]
PROMPTS = [PROMPT, PROMPT[3:20], PROMPT[:1], PROMPT[5:48]]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3Model": {},
    "LlamaModel": {},
    "MistralModel": {"sliding_window": WINDOW},
    "Qwen2Model": {},
    "Gemma3TextModel": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 5,
    },
    "Qwen3MoeModel": {},
}
KINDS = ("last", "mean", "cls")
CASES = [
    *(("Qwen3Model", kind) for kind in KINDS),
    ("MistralModel", "mean"),
    *(
        pytest.param(architecture, kind, marks=pytest.mark.large)
        for architecture in ARCHITECTURES
        for kind in KINDS
        if architecture != "Qwen3Model"
    ),
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 64}


@torch.inference_mode()
def hidden_states(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Return transformers' hidden states after the last norm, `[num_tokens, hidden_size]`."""
    states: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).last_hidden_state[0]
    return states


def pooled(states: Tensor, kind: str) -> Tensor:
    row = {"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[kind]
    return torch.nn.functional.normalize(row, dim=0)


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_embeddings_equal_transformers_and_their_bits_know_no_company(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    fields = {"max_position_embeddings": 200, **ARCHITECTURES[architecture]}
    theirs = make_hugging_face_model(architecture, **fields)
    save(theirs, tmp_path)
    ours = LLM(str(tmp_path), pooling=kind, block_size=4, **OPTIONS)
    alone = [ours.embed(prompt)[0] for prompt in PROMPTS]
    for prompt, found in zip(PROMPTS, alone, strict=True):
        expected = pooled(hidden_states(theirs, prompt), kind)
        assert (torch.tensor(found.vector) - expected).abs().max() < TOLERANCE
        assert found.num_prompt_tokens == len(prompt)
    # In chunks of seven tokens, beside others, with and without cached prefixes, step after step in
    # flight.
    ways: dict[str, Any] = {"max_num_batched_tokens": 7, "async_scheduling": True}
    chunked = LLM(str(tmp_path), pooling=kind, block_size=4, **ways, **OPTIONS)
    for _ in range(2):
        together = chunked.embed(PROMPTS)
        assert [one.vector for one in together] == [one.vector for one in alone]
    assert (together[0].num_cached_tokens > 0) is (kind == "last")


def test_dimensions_are_cut_and_normalized_again(tmp_path: Path) -> None:
    make_embedder(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    whole, cut = llm.embed("a text")[0], llm.embed("a text", dimensions=8)[0]
    expected = torch.nn.functional.normalize(torch.tensor(whole.vector)[:8], dim=0)
    assert torch.allclose(torch.tensor(cut.vector), expected, atol=1e-6)
    for wrong in (0, HIDDEN_SIZE + 1):
        with pytest.raises(InvalidRequestError, match=rf"dimensions: must be 1 to {HIDDEN_SIZE}"):
            llm.embed("a text", dimensions=wrong)


def test_an_embedder_puts_prompts_before_texts_and_writes_none(tmp_path: Path) -> None:
    make_embedder(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    named = llm.embed("birds", prompt_name="query")[0]
    assert named.vector == llm.embed(QUERY_PROMPT + "birds")[0].vector
    assert named.vector != llm.embed("birds")[0].vector
    with pytest.raises(InvalidRequestError, match="prompt_name: 'other' is not known"):
        llm.embed("birds", prompt_name="other")
    with pytest.raises(InvalidRequestError, match="model: generates no text"):
        llm.generate("birds")
    with pytest.raises(InvalidRequestError, match="model: has no labels"):
        llm.classify("birds")
    one, other = llm.embed("birds", prompt_name="query")[0], llm.embed("fish")[0]
    cosine = float(torch.tensor(one.vector) @ torch.tensor(other.vector))
    assert llm.score("birds", "fish")[0].score == pytest.approx(cosine, abs=TOLERANCE)


@pytest.mark.parametrize("labels", [LABELS, {0: "only"}], ids=["3", "1"])
def test_labels_equal_transformers(labels: dict[int, str], tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, labels)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.tokenizer is not None
    text = "def read_config(path): return path"
    with torch.inference_mode():
        logits = theirs(torch.tensor([llm.tokenizer.encode(text)])).logits[0]
    expected = logits.sigmoid() if len(labels) == 1 else logits.softmax(0)
    found = llm.classify(text)[0]
    assert found.probabilities == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert found.label == labels[int(logits.argmax())]
    if len(labels) > 1:
        with pytest.raises(InvalidRequestError, match="1 label, it has 3"):
            llm.score("a", "b")
        return
    pair = llm.tokenizer.encode_pair("a query", "a document")
    with torch.inference_mode():
        logit = theirs(torch.tensor([pair])).logits[0, 0]
    score = llm.score("a query", "a document")[0].score
    assert score == pytest.approx(float(logit.sigmoid()), abs=TOLERANCE)


def test_a_reranker_asks_for_yes_or_no_and_shares_its_query(tmp_path: Path) -> None:
    theirs = make_reranker(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.tokenizer is not None
    documents = [f"Document number {number} of many" for number in range(4)]
    found = llm.score("which number is it?", documents)
    for document, one in zip(documents, found, strict=True):
        text = pair_text("which number is it?", document)
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            logits = theirs(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        expected = logits[[YES, NO]].softmax(0)[0]
        assert one.score == pytest.approx(float(expected), abs=TOLERANCE)
    assert found[0].num_cached_tokens == 0
    assert all(one.num_cached_tokens >= 64 for one in found[1:])
    with pytest.raises(InvalidRequestError, match="model: makes no embeddings; it makes scores"):
        llm.embed("a")


@pytest.mark.large
def test_ranks_pool_alike(tmp_path: Path) -> None:
    make_embedder(tmp_path, "mean_tokens")
    alone = LLM(str(tmp_path), **OPTIONS).embed("a text of some words")[0]
    for ranks in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        llm = LLM(str(tmp_path), **OPTIONS, **ranks)
        found = llm.embed("a text of some words")[0]
        llm.engine.close()
        assert found.vector == pytest.approx(alone.vector, abs=TOLERANCE)
