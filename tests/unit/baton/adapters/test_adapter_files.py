"""Unit tests of adapters' files: reading, digests, and one-line refusals."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.adapters import numbers as in_python
from baton.adapters.config import AdapterConfig
from baton.adapters.digest import AdapterError, check_digest
from baton.adapters.files import adapter_digest, find_adapter, open_adapter, read_adapter
from baton.api.errors import InvalidRequestError, status_name
from engine import adapter_numbers as in_numpy
from tests.fakes.adapter_files import (
    Q_PROJ,
    numbers,
    pair,
    safetensors,
    with_header,
    write_adapter,
)

K_PROJ = Q_PROJ.replace("q_proj", "k_proj")
A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
MAGNITUDE = f"{Q_PROJ}.lora_magnitude_vector"
NAME = "model.layers.0.self_attn.q_proj"


def test_an_adapter_is_read_with_its_scales(tmp_path: Path) -> None:
    tensors = pair() | pair(K_PROJ, rank=4, outputs=16, dtype="BF16")
    folder = write_adapter(tmp_path, tensors, rank_pattern={"k_proj": 4}, alpha_pattern={NAME: 8})
    adapter = read_adapter(folder)
    modules = adapter.files.modules
    assert [(one.rank, one.scale) for one in modules.values()] == [(4, 1.0), (2, 4.0)]
    assert list(modules) == [NAME.replace("q_proj", "k_proj"), NAME]
    assert adapter.data[A] == tensors[A][2]
    assert adapter.files.num_bytes == sum(len(one[2]) for one in tensors.values())
    assert adapter_digest(folder) == adapter.digest == check_digest(adapter.digest)


def test_rslora_and_dora(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path,
        pair(rank=4) | {MAGNITUDE: numbers("F32", 32)},
        r=4, lora_alpha=4, use_rslora=True, use_dora=True,
    )  # fmt: skip
    [module] = open_adapter(folder).modules.values()
    assert module.scale == 2.0
    assert module.magnitude is not None
    # Older versions of PEFT kept the vector as a module's weight.
    named = pair(rank=4) | {f"{MAGNITUDE}.weight": numbers("F32", 32)}
    write_adapter(tmp_path, named, r=4, use_dora=True)
    assert open_adapter(tmp_path).modules[NAME].magnitude is not None


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    """Order in the file, metadata, and settings without effect change no digest."""
    tensors = pair() | pair(K_PROJ, seed=5)
    plain = adapter_digest(write_adapter(tmp_path / "a", tensors))
    turned = dict(reversed(tensors.items()))
    write_adapter(tmp_path / "b", safetensors(turned, {"format": "pt"}), lora_dropout=0.5)
    assert adapter_digest(tmp_path / "b") == plain
    others = {
        "numbers": pair() | pair(K_PROJ, seed=6),
        "alpha": tensors,
        "fewer": pair(),
        "dtype": pair(dtype="F16") | pair(K_PROJ, seed=5),
    }
    digests = {plain}
    for name, changed in others.items():
        alpha = 5 if name == "alpha" else 4
        digests.add(adapter_digest(write_adapter(tmp_path / name, changed, lora_alpha=alpha)))
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize(
    "text", ["", "ab", "A" * 64, "g" * 64, "0" * 63, "0" * 65, "0" * 63 + "\n"]
)
def test_other_texts_are_no_digests(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^adapter: must be a digest of 64 digits"):
        check_digest(text)


@pytest.mark.parametrize(
    ("dtype", "code"), [("F32", "<f"), ("F16", "<e"), ("BF16", "")], ids=["F32", "F16", "BF16"]
)
@pytest.mark.parametrize("is_finite", [in_python.is_finite, in_numpy.is_finite])
def test_numbers_that_are_none_are_found_wherever_they_are(
    is_finite: Callable[[bytes, str], bool], dtype: str, code: str
) -> None:
    size = 4 if dtype == "F32" else 2
    many = numbers(dtype, 100, scale=60_000.0)[2]
    assert is_finite(many, dtype)
    for wrong in (float("nan"), float("inf"), float("-inf")):
        packed = struct.pack(code, wrong) if code else struct.pack("<f", wrong)[2:]
        for place in (0, 57, 99):
            broken = bytearray(many)
            broken[place * size : (place + 1) * size] = packed
            assert not is_finite(bytes(broken), dtype)


# ------------------------------------------------------------------ hostile files


def config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: write_adapter(folder, pair(), **fields)


def config_text(text: bytes) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        write_adapter(folder, pair())
        (folder / "adapter_config.json").write_bytes(text)

    return write


def weights(content: Any, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: write_adapter(folder, content, **fields)


def header(described: dict[str, Any], data: bytes = b"") -> Callable[[Path], object]:
    return weights(with_header(json.dumps(described).encode(), data))


def changed(name: str, tensor: Any) -> Callable[[Path], object]:
    return weights(pair() | {name: tensor})


def renamed(name: str) -> Callable[[Path], object]:
    return weights({name: numbers("F32", 2, 2)})


def with_number(dtype: str, packed: bytes) -> Callable[[Path], object]:
    kind, shape, content = numbers(dtype, 2, 32)
    return changed(A, (kind, shape, content[: -len(packed)] + packed))


def link_to(target: str, name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        write_adapter(folder, pair())
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return write


def pipe(name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        write_adapter(folder, pair())
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return write


def pickled(folder: Path) -> None:
    write_adapter(folder, pair())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def without_file(folder: Path) -> None:
    (write_adapter(folder, pair()) / WEIGHTS).unlink()


def sparse(folder: Path) -> None:
    """A file that says to have a terabyte."""
    write_adapter(folder, pair())
    with (folder / "adapter_config.json").open("r+b") as file:
        file.truncate(2**40)


def tiny_pair(layer: int) -> dict[str, Any]:
    return pair(f"base_model.model.l{layer}", inputs=1, outputs=1)


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
NAN, INFINITE = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    # Settings.
    "no folder": (lambda folder: None, "no such folder"),
    "no settings": (lambda folder: folder.mkdir(), "No such file"),
    "settings are no JSON": (config_text(b"{"), "not valid JSON"),
    "settings are a list": (config_text(b"[]"), "expected a JSON object, found list"),
    "settings are null": (config_text(b"null"), "expected a JSON object, found null"),
    "settings are no text": (config_text(b"\xff\xfe{}"), "not valid JSON"),
    "settings are empty": (config_text(b""), "not valid JSON"),
    "settings are deep": (config_text(b'{"a":' * 5000 + b"1" + b"}" * 5000), "more than 64"),
    "settings are a deep list": (config_text(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}"), "64 levels"),
    "settings are large": (config_text(b"{" + b" " * 2**20 + b"}"), "at most 1048576 bytes"),
    "settings of a terabyte": (sparse, "at most 1048576 bytes"),
    "settings have a long number": (config_text(b'{"r": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "settings have NaN": (config_text(b'{"r": NaN}'), "NaN is no JSON"),
    "settings are a pipe": (pipe(CONFIG), "not a regular file"),
    "settings are a device": (link_to("/dev/zero", CONFIG), "not a regular file"),
    "settings are a circle": (link_to(CONFIG, CONFIG), "Too many levels of symbolic links"),
    "another method": (config(peft_type="IA3"), "peft_type: only LORA"),
    "no method": (config(peft_type=None), "peft_type: only LORA"),
    "rank 0": (config(r=0), "r: must be a rank of 1 to 256, got 0"),
    "rank below 0": (config(r=-1), "r: must be a rank of 1 to 256"),
    "rank of 257": (config(r=257), "r: must be a rank of 1 to 256, got 257"),
    "rank of a fraction": (config(r=2.0), "r: must be a rank"),
    "rank is true": (config(r=True), "r: must be a rank"),
    "rank is a text": (config(r="2"), 'r: must be a rank of 1 to 256, got "2"'),
    "alpha is a text": (config(lora_alpha="x"), "lora_alpha: must be a number"),
    "alpha is infinite": (config(lora_alpha=float("inf")), "lora_alpha: must be a number up to"),
    "alpha is huge": (config(lora_alpha=10**30), "lora_alpha: must be a number up to 1e.06"),
    "alpha is true": (config(lora_alpha=True), "lora_alpha: must be a number"),
    "DoRA is a text": (config(use_dora="yes"), "use_dora: must be true or false"),
    "rsLoRA is a number": (config(use_rslora=1), "use_rslora: must be true or false"),
    "patterns are a list": (config(rank_pattern=["q"]), "rank_pattern: must be an object"),
    "a pattern that never ends": (
        config(rank_pattern={"(a+)+b": 2}), "rank_pattern: .* must be a module's name",
    ),
    **{
        f"a pattern with {name}": (
            config(rank_pattern={pattern: 2}), "rank_pattern: .* must be a module's name",
        )
        for name, pattern in {
            "repetitions in a row": ".*.*.*.*.*.*.*.*x",
            "many copies": "(a{999}){999}",
            "a look ahead": "(?=.*a)(?=.*b)q_proj",
            "an echo": r"(a*)\1b",
            "a flag": "(?i)q_proj",
            "a class": "[a-z]+",
            "a prefix twice": r".*\..*\.q_proj",
            "an end of line": "q_proj$\n",
        }.items()
    },
    "a pattern of alternatives": (config(alpha_pattern={"q|k": 2}), "alpha_pattern: .*q|k"),
    "a long pattern": (config(rank_pattern={"q" * 300: 2}), "at most 256 letters"),
    "an empty pattern": (config(rank_pattern={"": 2}), "must be a module's name"),
    "many patterns": (
        config(rank_pattern={f"q{i}": 2 for i in range(10_001)}), "at most 10000 patterns",
    ),
    "a rank pattern of 0": (config(rank_pattern={"q_proj": 0}), "rank_pattern.q_proj: must be"),
    "a bias": (config(bias="all"), "bias: only none is supported"),
    "a bias of B": (config(lora_bias=True), "lora_bias: is not supported, got true"),
    "whole modules": (config(modules_to_save=["lm_head"]), "modules_to_save: is not supported"),
    "turned weights": (config(fan_in_fan_out=True), "fan_in_fan_out: is not supported"),
    "doubled layers": (config(layer_replication=[[0, 4]]), "layer_replication: is not supported"),
    "parameters as a text": (config(target_parameters="experts"), "target_parameters: must be a"),
    "a parameter that is a number": (config(target_parameters=[3]), "must have names of 1 to 256"),
    "many parameters": (config(target_parameters=["q"] * 10_001), "at most 10000 names"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights: .*changes the base"),
    "a setting of the future": (config(use_magic=3), "use_magic: is not supported, got 3"),
    # The file.
    "no file": (without_file, "cannot be read"),
    "a pickled file": (pickled, "adapter_model.bin: runs code when it is read"),
    "a file that is a pipe": (pipe(WEIGHTS), "not a regular file"),
    "a file that is a device": (link_to("/dev/zero", WEIGHTS), "not a regular file"),
    "a file that is a folder": (link_to("/tmp", WEIGHTS), "not a regular file"),
    "an empty file": (weights(b""), "truncated: 0 bytes"),
    "a file of 7 bytes": (weights(b"1234567"), "truncated: 7 bytes"),
    "a header that is longer": (weights(with_header(b"{}", length=3)), "header: must have at most"),
    "a header of 2**63 bytes": (weights(with_header(b"{}", length=2**63)), "header: must have at"),
    "a header of no JSON": (weights(with_header(b"{]")), "not valid JSON"),
    "a header that is a list": (weights(with_header(b"[]")), "expected a JSON object"),
    "a deep header": (weights(with_header(b'{"a":' * 999 + b"1" + b"}" * 999)), "64 levels"),
    "no tensor": (weights(with_header(b"{}")), "must have 1 to 200000 tensors, got 0"),
    # Tensors.
    "described by a number": (header({A: 3}), "expected an object"),
    "no dtype": (header({A: F32 | {"dtype": None}}), "dtype: None is not known"),
    "an unknown dtype": (header({A: F32 | {"dtype": "Q9"}}), "dtype: 'Q9' is not known"),
    "a shape below 0": (header({A: F32 | {"shape": [-1, 2]}}), "shape: must be sizes"),
    "a shape of 2**60": (header({A: F32 | {"shape": [2**60, 2]}}), "shape: must be sizes"),
    "a bomb": (header({A: F32 | {"shape": [2**40, 2**40]}}, bytes(16)), "16 bytes cannot be"),
    "offsets backwards": (header({A: F32 | {"data_offsets": [16, 0]}}), "two rising numbers"),
    "offsets behind the end": (header({A: F32}), "ends at byte"),
    "overlapping": (header({A: F32, B: F32}, bytes(16)), "overlaps"),
    "an unprintable name": (header({"a\nb": F32}, bytes(16)), "not printable"),
    "integers": (changed(A, numbers("I32", 2, 32)), f"{A}: dtype must be one of F32, BF16, F16"),
    "doubles": (changed(A, numbers("F64", 2, 32)), f"{A}: dtype must be one of"),
    "an A of one dimension": (changed(A, numbers("F32", 64)), f"{A}: shape .64., but"),
    "an A of three": (changed(A, numbers("F32", 2, 4, 8)), rf"{A}: shape .2, 4, 8., but"),
    "an A without inputs": (changed(A, numbers("F32", 2, 0)), f"{A}: sizes must be 1 to"),
    "another rank in A": (changed(A, numbers("F32", 3, 32)), rf"{A}: shape .*means \[2, inputs\]"),
    "another rank in B": (changed(B, numbers("F32", 32, 3)), rf"{B}: shape .*\[outputs, 2\]"),
    "a pattern of another rank": (config(rank_pattern={"q_proj": 4}), r"means \[4, inputs\]"),
    "no B": (weights({A: pair()[A]}), f"{B}: is missing"),
    "no A": (weights({B: pair()[B]}), f"{A}: is missing"),
    "no magnitude": (config(use_dora=True), f"{MAGNITUDE}: is missing"),
    "a magnitude without DoRA": (changed(MAGNITUDE, numbers("F32", 32)), "does not set use_dora"),
    "a short magnitude": (
        weights(pair() | {MAGNITUDE: numbers("F32", 31)}, use_dora=True),
        f"{MAGNITUDE}: shape .31., but lora_B has 32 outputs",
    ),
    "a magnitude twice": (
        weights(
            pair() | {name: numbers("F32", 32) for name in (MAGNITUDE, f"{MAGNITUDE}.weight")},
            use_dora=True,
        ),
        "is there twice",
    ),
    "NaN in a magnitude": (
        weights(
            pair() | {MAGNITUDE: ("F32", (32,), numbers("F32", 31)[2] + NAN)}, use_dora=True
        ),
        f"{MAGNITUDE}: a number is NaN or infinite",
    ),
    "infinity below 0 in B": (
        changed(B, ("F32", (32, 2), numbers("F32", 63)[2] + struct.pack("<f", float("-inf")))),
        f"{B}: a number is NaN or infinite",
    ),
    "a magnitude of a layer that has no other tensor": (
        weights(
            pair()
            | {name: numbers("F32", 32) for name in (MAGNITUDE, MAGNITUDE.replace("q_", "k_"))},
            use_dora=True,
        ),
        "k_proj.lora_A.weight: is missing",
    ),
    "a magnitude of two dimensions": (
        weights(pair() | {MAGNITUDE: numbers("F32", 32, 1)}, use_dora=True),
        rf"{MAGNITUDE}: shape .32, 1., but lora_B has 32 outputs",
    ),
    "half of an embedding": (renamed(f"{EMBEDDING}_A"), f"{EMBEDDING}_B: is missing"),
    "an embedding that is a linear layer": (
        changed(f"{Q_PROJ}.lora_embedding_B", numbers("F32", 2, 2)), "lora_embedding_A: is missing",
    ),
    "an embedding with DoRA": (
        weights(
            {f"{EMBEDDING}_A": numbers("F32", 2, 8), f"{EMBEDDING}_B": numbers("F32", 8, 2)}
            | {EMBEDDING.replace("_embedding", "_magnitude_vector"): numbers("F32", 8)},
            use_dora=True,
        ),
        "DoRA of embeddings is not supported",
    ),
    "a copy of the embedding": (
        renamed("base_model.model.model.embed_tokens.base_layer.weight"),
        "a copy of the base model's weight; save with save_embedding_layers=False",
    ),
    "experts of another rank": (
        weights(pair(EXPERTS, rank=3), target_parameters=["experts.down_proj"]),
        r"means \[2, inputs\]",
    ),
    "no experts": (
        weights(pair(EXPERTS, rank=1), target_parameters=["experts.down_proj"]),
        r"means \[2, inputs\]",
    ),
    "experts twice": (
        weights(
            pair(EXPERTS) | pair(f"{EXPERTS}.down_proj"), target_parameters=["experts.down_proj"]
        ),
        "experts.down_proj.lora_A.weight: adapts .* does",
    ),
    "patterns for many layers": (
        lambda folder: write_adapter(
            folder,
            {name: one for layer in range(600) for name, one in tiny_pair(layer).items()},
            rank_pattern={f"q{i}": 2 for i in range(10_000)},
            alpha_pattern={f"q{i}": 2 for i in range(10_000)},
        ),
        "20000 patterns for 600 layers are too many",
    ),
    "another prefix": (renamed("model.q_proj.lora_A.weight"), "is no LoRA tensor"),
    "a whole weight": (renamed(f"{Q_PROJ}.weight"), "is no LoRA tensor"),
    "a bias tensor": (renamed(f"{Q_PROJ}.lora_B.bias"), "is no LoRA tensor"),
    "no module": (renamed("base_model.model..lora_A.weight"), "is no LoRA tensor"),
    "a long name": (renamed("x" * 100_000), "is no LoRA tensor"),
    "a name that is a path": (renamed("../../etc/passwd"), "is no LoRA tensor"),
    "NaN": (with_number("F32", NAN), f"{A}: a number is NaN or infinite"),
    "infinity": (with_number("F32", INFINITE), f"{A}: a number is NaN or infinite"),
    "NaN in bfloat16": (with_number("BF16", NAN[2:]), f"{A}: a number is NaN or infinite"),
    "NaN in float16": (with_number("F16", b"\x00\x7e"), f"{A}: a number is NaN or infinite"),
}  # fmt: skip


def test_there_are_many_hostile_files() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    write, expected = HOSTILE[name]
    folder = tmp_path / "adapter"
    write(folder)
    for read in (read_adapter, adapter_digest):
        with pytest.raises(AdapterError, match=expected) as caught:
            read(folder)
        line = str(caught.value)
        assert line.startswith("adapter: ")
        assert str(folder) in line
        assert "\n" not in line
        assert len(line) < 700
        assert status_name(caught.value) == "INVALID_ARGUMENT"


def test_patterns_match_as_in_peft_in_a_single_place() -> None:
    names = ["q", "l.q", "xq", "l.0.q", "l.10.q", "l.1.q", "a.l.1.q", "", ".q", "l..q", "q.l.1.q"]
    for pattern in (
        "q",
        "^q",
        "^l.0.q",
        r"l\.\d.q",
        "l.1.q",
        ".q",
        "1.q",
        "..",
        "...",
        "x",
        r"\.q",
    ):
        for name in names:
            expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
            assert AdapterConfig(rank=1, alpha=1, rank_pattern={pattern: 2}).rank_of(name) == (
                2 if expected else 1
            ), (pattern, name)


# ------------------------------------------------------------------ where files may lie


def test_an_adapter_is_found_below_its_root_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside", pair())
    inside = write_adapter(root / "team" / "one", pair())
    assert find_adapter(root, "team/one") == inside
    (root / "by_link").symlink_to(inside)  # within the root: as a hub's cache has it
    assert open_adapter(find_adapter(root, "by_link")).modules
    (root / "leads_out").symlink_to(outside)
    mixed = write_adapter(root / "mixed", pair())
    (mixed / WEIGHTS).unlink()
    (mixed / WEIGHTS).symlink_to(outside / WEIGHTS)
    (root / "circle").symlink_to(root / "circle")
    settings = write_adapter(root / "settings", pair())
    (settings / CONFIG).unlink()
    (settings / CONFIG).symlink_to(root / "mixed" / "hop")
    (root / "mixed" / "hop").symlink_to(outside / CONFIG)  # a link to a link
    (root / "parent").symlink_to("..")
    for source in (
        *("", "..", "../outside", "team/../../outside", str(outside), "leads_out", "mixed"),
        *("settings", "parent", "parent/outside", "team/one\n", "team\x00"),
    ):
        with pytest.raises(AdapterError, match=r"must be a path below|leads out of") as caught:
            find_adapter(root, source)
        assert "\n" not in str(caught.value)
    with pytest.raises(AdapterError):
        open_adapter(find_adapter(root, "circle"))
