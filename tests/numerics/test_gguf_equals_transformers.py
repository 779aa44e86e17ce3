"""Tests that Baton and transformers read equal weights, logits, tokens and text from GGUF."""

from __future__ import annotations

import copy
import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers.integrations.gguf import dequant

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.gguf import folder as gguf_folder
from baton.checkpoint.gguf.file import TENSOR_TYPES
from baton.checkpoint.model_folder import find_model_folder
from baton.text.tokenizer import Tokenizer
from engine import LLM
from models import ModelConfig, load_model
from models.cpu.packing import CpuPacker
from models.layers.linear import PackedLinear
from models.loading.gguf_weights import read_gguf
from tests.fakes.checkpoints.gguf_conversion import converted, write_checkpoint
from tests.fakes.checkpoints.gguf_files import stored, write_gguf, write_model
from tests.fakes.checkpoints.vocabularies import VOCABULARIES, random_text
from tests.numerics.gguf_families import common_fields
from tests.numerics.gguf_gemma import GEMMA4_LARGE, gemma4, proportional_factors
from tests.numerics.tiny_models import (
    hugging_face_logits,
    make_hugging_face_model,
    paged_logits,
)

# K kinds have blocks of 256 values.
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
KINDS = sorted(TENSOR_TYPES)
ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep folders of files apart, but not the native kernels, which take long to compile."""
    (tmp_path / "folders").mkdir()
    monkeypatch.setattr(gguf_folder, "own_cache_folder", lambda name: tmp_path / "folders")


def by_transformers(path: Path, **options: Any) -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **options
    ).eval()


def make_file(tmp_path: Path, architecture: str, kind: int, **overrides: Any) -> Path:
    model = make_hugging_face_model(architecture, **(SHAPE | overrides))
    return write_model(tmp_path / "model.gguf", model, GGMLQuantizationType(kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: TENSOR_TYPES[kind].name)
def test_every_kind_of_storage_gives_the_weights_and_logits_of_transformers(
    tmp_path: Path, kind: int
) -> None:
    path = make_file(tmp_path, "LlamaForCausalLM", kind)
    theirs = by_transformers(path)
    folder = find_model_folder(str(path))
    config = ModelConfig.from_folder(folder)
    expected = dict(theirs.state_dict())
    for one in read_gguf(folder / "model.gguf", config):
        assert torch.equal(one.read().float(), expected.pop(one.name)), one.name
    assert not expected
    if config.dtype != "float32":  # for 16-bit files, equal weights suffice
        return
    found = paged_logits(load_model(folder), TOKENS)
    # In float64, because transformers is less exact than Baton in float32.
    logits = hugging_face_logits(theirs.double(), TOKENS).float()
    atol = 1e-5 * float(logits.abs().max())
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_gives_the_greedy_tokens_of_transformers(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    head_dim = 128 if "Qwen3" in architecture else 64  # transformers forgets a file's for Qwen3
    shape = {"tie_word_embeddings": tied, "head_dim": head_dim, "initializer_range": 0.2}
    path = make_file(tmp_path, architecture, 8, **shape)
    theirs = by_transformers(path)
    assert our_tokens(path) == their_tokens(theirs)


def test_gemma4_gives_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    """Without experts and numbers of layers, which transformers does not read from GGUF files."""
    shape = SHAPE | GEMMA4_LARGE | {"initializer_range": 0.2}
    model = make_hugging_face_model("Gemma4ForCausalLM", **shape)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1)
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True
    tensors = converted("gemma4", model.state_dict(), config)
    tensors["rope_freqs.weight"] = proportional_factors(config)
    path = write_checkpoint(
        tmp_path / "model.gguf",
        "gemma4",
        tensors,
        GGMLQuantizationType.Q8_0,
        common_fields(config) | gemma4(config),
        vocab_size=config.vocab_size,
    )
    # The fields are not compared: transformers reads half of Gemma 4's from a file.
    theirs = by_transformers(path, config=model.config)
    assert our_tokens(path) == their_tokens(theirs)


def our_tokens(path: Path) -> tuple[int, ...]:
    # Dequantized: transformers knows no products of integers.
    llm = LLM(str(path), dtype="float32", weights="fp32", kv_cache_bytes=16 << 20)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return llm.generate([TOKENS], params)[0].token_ids


def their_tokens(theirs: Any) -> tuple[int, ...]:
    result = theirs.generate(
        torch.tensor([TOKENS]),
        attention_mask=torch.ones(1, len(TOKENS), dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(result[0, len(TOKENS) :].tolist())


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "IQ4_XS"])
def test_experts_are_those_that_were_written(tmp_path: Path, architecture: str, kind: str) -> None:
    """Each by itself, and as the model of transformers that has the same numbers computes."""
    of_qwen = {"moe_intermediate_size": 256, "norm_topk_prob": True}
    inner = of_qwen if "Qwen" in architecture else {}
    model = make_hugging_face_model(architecture, **(SHAPE | inner))
    path = write_model(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])
    folder = find_model_folder(str(path))
    if kind == "F32":
        ours = paged_logits(load_model(folder), TOKENS)
        theirs = hugging_face_logits(model, TOKENS)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
        return
    kept = load_model(folder, dtype=torch.float32, packer=CpuPacker.choose(torch.float32, "auto"))
    plain = load_model(folder, dtype=torch.float32)
    assert isinstance(kept, torch.nn.Module)
    assert isinstance(plain, torch.nn.Module)
    for name in ("model.layers.0.mlp.gate_up", "model.layers.1.mlp.down"):
        layer = kept.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        assert layer.packed.format.code_bits == (4 if kind == "Q4_K" else 8)
        theirs = plain.get_submodule(name).get_parameter("weight")
        assert torch.equal(layer.packed.unpacked(), theirs)


@pytest.mark.parametrize("kind", sorted(dequant.GGML_BLOCK.keys() & TENSOR_TYPES.keys()))
def test_blocks_are_dequantized_as_a_second_implementation_does(kind: int) -> None:
    name = GGMLQuantizationType(kind)
    values = numpy.random.default_rng(kind).normal(size=(8, 512)).astype(numpy.float32)
    blocks = stored(values, name, seed=kind)
    found = torch.from_numpy(gguf.dequantize(blocks, name))
    expected = dequant.dequantize(torch.from_numpy(blocks.copy()), kind).view(found.shape)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "tekken", "llama", "gemma4"])
def test_text_becomes_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    vocabulary = VOCABULARIES[name]()
    one = numpy.ones((len(vocabulary.tokens), 32), dtype=numpy.float32)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        {"token_embd.weight": (one, GGMLQuantizationType.F32)},
        {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
         "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5},
        vocabulary,
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer(find_model_folder(str(path)))
    rng = random.Random(name)
    for _ in range(600):
        text = random_text(rng)
        if name == "llama":
            # SentencePiece and llama.cpp put a space before every text and behind every added
            # token; transformers before texts that begin with none, and only there.
            text = text.replace("<|end|>", "").replace("<think>", "").lstrip()
        if name == "qwen2":  # which composes characters first; transformers forgets it for GGUF
            text = unicodedata.normalize("NFC", text)
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text)[-len(expected) :] == expected if expected else True, text
