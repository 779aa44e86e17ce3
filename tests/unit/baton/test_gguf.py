"""Unit tests of GGUF files: headers, configurations, tokenizers; one clear line for bad ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import tokenizers
from gguf import GGMLQuantizationType, TokenType

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.config import config_of, generation_config_of
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile
from baton.checkpoint.model_folder import config_digest, find_model_folder, weights_digest
from baton.checkpoint.model_identity import folder_identity
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.gguf_files import Vocabulary, plain_vocabulary, write_gguf
from tests.fakes.checkpoints.vocabularies import VOCABULARIES, original, random_text

F32 = GGMLQuantizationType.F32
FIELDS: dict[str, int | float | str] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500_000.0,
}


ONES = numpy.ones(4, dtype=numpy.float32)
SSM: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 1,
    "ssm.inner_size": 64,
    "ssm.time_step_rank": 4,
    "embedding_scale": 2.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BATON_CACHE", str(folder))
    return folder


def write(
    path: Path,
    architecture: str = "llama",
    vocabulary: Vocabulary | None = None,
    tensors: dict[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file without layers."""
    vocabulary = vocabulary or plain_vocabulary(40)
    rows = numpy.ones((len(vocabulary.tokens), 32), dtype=numpy.float32)
    found = {"token_embd.weight": (rows, F32)} | (tensors or {})
    return write_gguf(path, architecture, found, {**FIELDS, **(fields or {})}, vocabulary)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        find_model_folder(str(path))
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def test_the_kinds_of_storage_are_those_of_the_format() -> None:
    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    for type_id, kind in TENSOR_TYPES.items():
        assert (kind.name, kind.values_per_block, kind.bytes_per_block) == sizes[type_id]


def test_what_is_read_is_what_the_format_s_own_reader_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", vocabulary=VOCABULARIES["llama"]())
    found, expected = GgufFile.read(path), gguf.GGUFReader(path)
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            assert found.metadata[key] == field.contents(), key
    for tensor in expected.tensors:
        stored = found.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert (stored.start, stored.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_a_file_becomes_a_model_folder_once(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    folder = find_model_folder(str(path))
    assert folder.parent == cache / "gguf"
    assert folder.name.startswith("tiny-")
    assert (folder / "model.gguf").resolve() == path
    assert (folder.parent.stat().st_mode & 0o777) == 0o700
    before = (folder / "config.json").stat().st_mtime_ns
    assert find_model_folder(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert list(folder.parent.iterdir()) == [folder]


def test_another_header_is_another_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    before = find_model_folder(str(path))
    write(path, fields={"context_length": 32})
    after = find_model_folder(str(path))
    assert after != before
    assert config_digest(after) != config_digest(before)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    folder = find_model_folder(str(path))
    before = weights_digest(folder)
    rows = numpy.full((40, 32), 2, dtype=numpy.float32)
    write(path, tensors={"token_embd.weight": (rows, F32)})
    assert find_model_folder(str(path)) == folder
    assert weights_digest(folder) != before


def test_in_a_large_file_every_tensor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.checkpoint.weights_samples.WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr("baton.checkpoint.weights_samples.SMALL_TENSOR_BYTES", 100)
    monkeypatch.setattr("baton.checkpoint.weights_samples.TENSOR_SAMPLE_BYTES", 40)
    norm = numpy.ones(32, dtype=numpy.float32)
    digests = set()
    for value in (1, 2):
        tensors = {"output_norm.weight": (norm * value, F32)}
        folder = find_model_folder(str(write(tmp_path / "tiny.gguf", tensors=tensors)))
        digests.add(folder_identity(folder)["weights"])
    assert len(digests) == 2


def test_one_file_on_two_machines_is_one_model(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    here = find_model_folder(str(write(tmp_path / "here.gguf")))
    there = find_model_folder(str(write(tmp_path / "there" / "there.gguf")))
    assert here != there
    assert folder_identity(here) == folder_identity(there)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = write(model / "a.gguf")
    assert find_model_folder(str(model)) == find_model_folder(str(path))
    write(model / "b.gguf")
    refused_folder = f"folder {model} has several .gguf files; name one: a.gguf, b.gguf"
    with pytest.raises(ModelLoadError, match=refused_folder):
        find_model_folder(str(model))


def test_a_folder_with_weights_of_its_own_is_itself(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    assert find_model_folder(str(tmp_path)) == tmp_path


def test_an_installed_package_is_the_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "some_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    path = write(package / "some.gguf")
    facts = tmp_path / "site" / "some_model-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: some-model\nVersion: 1.0\n", encoding="utf-8")
    (facts / "RECORD").write_text("some_model/some.gguf,,\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("some-model", "some_model"):
        assert find_model_folder(name) == find_model_folder(str(path))


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "no GGUF file"), (3, "no GGUF file"), (20, "truncated"), (400, "truncated"),
     (-1, "truncated: token_embd.weight ends at byte"), (-6000, "truncated")],
)  # fmt: skip
def test_a_truncated_file_is_refused(tmp_path: Path, size: int, message: str) -> None:
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:size])
    refused(path, message)


def test_no_cut_of_a_file_gets_by(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(ModelLoadError):
            GgufFile.read(path)


def patch(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"PK" + bytes(100)), "does not begin with GGUF"),
        (lambda path: patch(path, b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0"), "GGUF version 1 is not"),
        (lambda path: patch(path, b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03"), "big-endian is not"),
        (
            lambda path: patch(path, *(b"weight" + struct.pack("<IQQI", 2, 32, 40, kind)
                                       for kind in (0, 36))),
            r"quantization of token_embd.weight \(36\) is not supported; supported: F32, F16",
        ),
        (lambda path: write(path, "bloom"), "architecture 'bloom' is not supported; supported: "),
        (lambda path: write(path, "qwen3", fields={"expert_count": 8}),
         "qwen3.expert_count: experts are not supported with this architecture"),
        (lambda path: write(path, fields={"block_count": 2**20}),
         "llama.block_count: must be at most 16384, got 1048576"),
        (lambda path: write(path, "qwen3moe", fields={"expert_count": 8, "expert_used_count": 2}),
         "weights are missing: blk.0.ffn_up_exps.weight"),
        (lambda path: write(path, "glm4moe", fields={"nextn_predict_layers": 2}),
         "glm4moe.nextn_predict_layers: 2, but block_count is 2"),
        (lambda path: write(path, "mistral3", fields={"attention.temperature_scale": 0.1}),
         "mistral3.attention.temperature_scale: 0.1.* is not supported; supported: 0"),
        (lambda path: write(path, "gemma3", fields={"attention.sliding_window": 8,
                                                    "attention.sliding_window_pattern": [True]}),
         "gemma3.attention.sliding_window_pattern: 1 entries for 2 layers"),
        (lambda path: write(path, "deepseek2", fields={"rope.dimension_count": 8,
                                                       "attention.key_length": 8,
                                                       "attention.value_length": 8}),
         "deepseek2.rope.dimension_count: must be below 8, got 8"),
        (lambda path: write(path, "nemotron_h", fields=SSM),
         "nemotron_h.block_count: blk.0 has neither attention nor a state, a MLP or experts"),
        (lambda path: write(path, "granitehybrid", fields=SSM | {"ssm.inner_size": 40}),
         "granitehybrid.ssm.inner_size: must be a multiple of embedding_length 32, got 40"),
        (lambda path: write(path, "phi3", tensors={"rope_factors_long.weight": (ONES, F32)}),
         "weights are missing: rope_factors_short.weight"),
        (lambda path: write(path, fields={"expert_count": 8}),
         "llama.expert_used_count: must be a number above 0, got None"),
        (lambda path: write(path, fields={"expert_count": 8, "expert_shared_count": 1}),
         "llama.expert_shared_count: shared experts are not supported"),
        (lambda path: write(path, fields={"rope.dimension_count": 4, "attention.key_length": 8}),
         "llama.rope.dimension_count: must be the keys' length 8, got 4"),
        (lambda path: write(path, fields={"rope.scaling.type": "longrope"}),
         "rope.scaling.type: 'longrope' is not supported"),
        (lambda path: write(path, vocabulary=changed(pre="mine")),
         "tokenizer.ggml.pre: 'mine' is not known; known: gpt-2"),
        (lambda path: write(path, vocabulary=changed(pre="")),
         "tokenizer.ggml.pre: missing"),
        (lambda path: write(path, vocabulary=changed(kind="bert")),
         "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2, llama"),
        (lambda path: write(path, vocabulary=changed(merges=["ab"])), "merges: 'ab' is not a pair"),
        (lambda path: write(path, vocabulary=changed(fields={"eos_token_id": 700})),
         "eos_token_id: must be one of 40 tokens, got 700"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    path = write(tmp_path / "model.gguf")
    change(path)
    refused(path, message)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


TEXTS = struct.pack("<II", 9, 8)  # a list of texts follows
LONG = ["x" * 1025, *"abc"]
HOSTILE: dict[str, tuple[dict[str, bytes], str]] = {
    "alignment": (
        {"general.alignment": struct.pack("<IQ", 10, 2**45)},
        "general.alignment: must be a number from 1 to 65536",  # as much memory was asked for
    ),
    "length": (
        {"x": TEXTS + struct.pack("<QQ", 2, 2**64 - 1) + bytes(64)},
        "truncated: needs",
    ),
    "architecture": (
        {"general.architecture": TEXTS + struct.pack("<Q", 1) + text("llama")},
        r"architecture \['llama'\] is not supported",
    ),
    "no tensors": ({}, "weights are missing: token_embd.weight"),
    "a name of two lines": (
        {"a\nb": struct.pack("<IQ", 10, 5)},
        r"a name is not printable: 'a\\nb'",
    ),
    "long token": (
        {
            "tokenizer.ggml.model": struct.pack("<I", 8) + text("llama"),
            "tokenizer.ggml.tokens": TEXTS + struct.pack("<Q", 4) + b"".join(map(text, LONG)),
            "tokenizer.ggml.scores": struct.pack("<IIQ4f", 9, 6, 4, 0, 0, 0, 0),
        },
        "tokens: must have at most 1024 characters each, got 1025",  # a million took minutes
    ),
    "pre": (
        {
            "tokenizer.ggml.model": struct.pack("<I", 8) + text("gpt2"),
            "tokenizer.ggml.tokens": TEXTS + struct.pack("<Q", 1) + text("a"),
            "tokenizer.ggml.pre": TEXTS + struct.pack("<Q", 1) + text("a"),
        },
        r"pre: \['a'\] is not known",
    ),
    "template": (
        {
            "tokenizer.ggml.model": struct.pack("<I", 8) + text("llama"),
            "tokenizer.ggml.tokens": TEXTS + struct.pack("<Q", 1) + text("a"),
            "tokenizer.ggml.scores": struct.pack("<IIQf", 9, 6, 1, 0),
            "tokenizer.chat_template": struct.pack("<IQ", 10, 5),
        },
        "tokenizer.chat_template: must be a text, got 5",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_untrusted_hands_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """Regression: these files caused unexpected errors, or took much memory or minutes."""
    changes, message = HOSTILE[name]
    integers = {field: value for field, value in FIELDS.items() if isinstance(value, int)}
    metadata = {
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        **{f"llama.{field}": struct.pack("<IQ", 10, value) for field, value in integers.items()},
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
        **changes,
    }
    tensors = b"" if name == "no tensors" else text("token_embd.weight")
    tensors += struct.pack("<IQQIQ", 2, 32, 4, 0, 0) if tensors else b""
    head = b"GGUF" + struct.pack("<IQQ", 3, bool(tensors), len(metadata))
    head += b"".join(text(key) + value for key, value in metadata.items()) + tensors
    path = tmp_path / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32 + 512))
    refused(path, message)


@pytest.mark.parametrize(
    ("factors", "message"),
    [([0.0, 1.0, 1.0, 1.0], "rope_freqs.weight: must be numbers above 0"),
     ([math.nan, 1.0, 1.0, 1.0], "rope_freqs.weight: must be numbers above 0"),
     ([], "rope_freqs.weight: a tensor without values")],
)  # fmt: skip
def test_factors_that_cannot_be_are_refused(
    tmp_path: Path, factors: list[float], message: str
) -> None:
    values = numpy.array(factors, dtype=numpy.float32)
    path = write(tmp_path / "model.gguf", tensors={"rope_freqs.weight": (values, F32)})
    refused(path, message)


def changed(**changes: Any) -> Vocabulary:
    return dataclasses.replace(plain_vocabulary(40), **changes)


def config(path: Path) -> dict[str, Any]:
    return config_of(GgufFile.read(path))


def test_a_configuration_is_what_the_file_says(tmp_path: Path) -> None:
    found = config(write(tmp_path / "model.gguf", "qwen2", fields={"attention.key_length": 16}))
    assert found["architectures"] == ["Qwen2ForCausalLM"]
    assert found["head_dim"] == 16
    assert found["rope_theta"] == 500_000.0
    assert (found["vocab_size"], found["tie_word_embeddings"]) == (40, True)
    assert found["rope_scaling"] is None


def test_a_sliding_window_is_mistral_s(tmp_path: Path) -> None:
    found = config(write(tmp_path / "model.gguf", fields={"attention.sliding_window": 16}))
    assert (found["architectures"], found["sliding_window"]) == (["MistralForCausalLM"], 16)


def test_yarn_is_carried_over(tmp_path: Path) -> None:
    fields: dict[str, int | float | str] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    scaling = config(write(tmp_path / "model.gguf", fields=fields))["rope_scaling"]
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert scaling == expected


def factors(path: Path, values: list[float]) -> Any:
    stored = numpy.array(values, dtype=numpy.float32)
    return config(write(path, tensors={"rope_freqs.weight": (stored, F32)}))["rope_scaling"]


def test_llama3_s_factors_are_its_scaling(tmp_path: Path) -> None:
    # What the converter writes for theta 500,000 and heads of 8 (Llama 3.1's rule).
    values = []
    for index in range(4):
        wavelength = 2 * numpy.pi * 500_000 ** (index / 4)
        smooth = (8192 / wavelength - 1) / 3
        values.append(1.0 if wavelength < 2048 else 32.0 if wavelength > 8192
                      else 1 / ((1 - smooth) / 32 + smooth))  # fmt: skip
    assert factors(tmp_path / "model.gguf", values) == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_are_taken_one_by_one(tmp_path: Path) -> None:
    scaling = factors(tmp_path / "model.gguf", [1.0, 1.5, 2.0, 3.0])
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [1.0, 1.5, 2.0, 3.0]


def test_every_token_that_ends_a_turn_ends_an_output(tmp_path: Path) -> None:
    tokens = ["a", "<|eot_id|>", "<|im_end|>", "x", "y"]
    types = [TokenType.NORMAL, TokenType.CONTROL, TokenType.NORMAL, *[TokenType.CONTROL] * 2]
    vocabulary = Vocabulary(tokens, [int(t) for t in types], pre="gpt-2", merges=["a b"],
                            fields={"eos_token_id": 3, "eom_token_id": 4})  # fmt: skip
    path = write(tmp_path / "model.gguf", vocabulary=vocabulary)
    assert generation_config_of(GgufFile.read(path)) == {"eos_token_id": [1, 3, 4]}


def test_a_message_of_gpt_oss_does_not_end_its_output(tmp_path: Path) -> None:
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    types = [int(TokenType.NORMAL), *[int(TokenType.CONTROL)] * 4]
    vocabulary = Vocabulary(tokens, types, pre="gpt-4o", merges=["a b"], fields={"eos_token_id": 2})
    path = write(tmp_path / "model.gguf", vocabulary=vocabulary)
    assert generation_config_of(GgufFile.read(path)) == {"eos_token_id": [2, 3, 4]}


def test_gemma_s_turn_ends_an_output(tmp_path: Path) -> None:
    tokens, types = ["a", "<eos>", "<end_of_turn>"], [TokenType.NORMAL, *[TokenType.CONTROL] * 2]
    vocabulary = Vocabulary(tokens, [int(t) for t in types], kind="llama", scores=[0.0] * 3,
                            fields={"eos_token_id": 1})  # fmt: skip
    path = write(tmp_path / "model.gguf", "gemma3", vocabulary=vocabulary)
    assert generation_config_of(GgufFile.read(path)) == {"eos_token_id": [1, 2]}


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    path = write(tmp_path / "model.gguf", vocabulary=changed(chat_template=templates))
    text = (find_model_folder(str(path)) / "tokenizer_config.json").read_text(encoding="utf-8")
    assert json.loads(text)["chat_template"] == templates


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_becomes_the_tokens_of_the_original_tokenizer(tmp_path: Path, name: str) -> None:
    expected = original(name)
    path = write(tmp_path / "model.gguf", vocabulary=VOCABULARIES[name]())
    found = Tokenizer(find_model_folder(str(path)))
    plain = tokenizers.Tokenizer.from_file(str(found.folder / "tokenizer.json"))
    rng = random.Random(name)
    for _ in range(600):
        text = random_text(rng)
        ids = expected.encode(text, add_special_tokens=False).ids
        assert plain.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids) == expected.decode(ids), text


@pytest.mark.parametrize(
    ("name", "begins"),
    [("gpt-2", False), ("qwen2", False), ("llama-bpe", True), ("tekken", True), ("llama", True)],
)
def test_a_text_begins_as_its_family_s_do(tmp_path: Path, name: str, begins: bool) -> None:
    vocabulary = VOCABULARIES[name]()
    path = write(tmp_path / "model.gguf", vocabulary=vocabulary)
    ids = Tokenizer(find_model_folder(str(path))).encode("the router")
    begin = (vocabulary.fields or {})["bos_token_id"]
    assert (ids[0] == begin) is begins
    assert begin not in ids[1:]


def test_a_file_says_itself_how_a_text_begins_and_ends(tmp_path: Path) -> None:
    vocabulary = VOCABULARIES["llama"]()
    fields = {**(vocabulary.fields or {}), "add_bos_token": False, "add_eos_token": True}
    fields["add_space_prefix"] = False
    path = write(tmp_path / "m.gguf", vocabulary=dataclasses.replace(vocabulary, fields=fields))
    tokenizer = Tokenizer(find_model_folder(str(path)))
    ids = tokenizer.encode("the router")
    assert (ids[0] != 1, ids[-1]) == (True, 2)
    assert tokenizer.decode(ids) == "the router"
    assert tokenizer.token_bytes(ids[0])[:1] == b"t"
