"""Unit tests of GGUF files with adapters: reading, digests, and one-line refusals."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.adapters.digest import AdapterError
from baton.adapters.files import adapter_digest, find_adapter, open_adapter, read_adapter
from baton.adapters.modules import Layout
from baton.api.errors import status_name
from baton.checkpoint.gguf.architecture import Change
from tests.fakes.adapter_files import numbers, pair, write_adapter

Tensors = Mapping[str, tuple[int, tuple[int, ...], bytes]]  # type, shape rows first, content
FIELDS: dict[str, Any] = {
    "general.type": "adapter",
    "general.architecture": "llama",
    "adapter.type": "lora",
    "adapter.lora.alpha": 4.0,
}
Q = "blk.0.attn_q.weight"
A, B = f"{Q}.lora_a", f"{Q}.lora_b"
F32, F16, Q8_0, BF16 = 0, 1, 8, 30


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, bytes):  # the type and the value, as they are
        return text(key) + value
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    return text(key) + struct.pack("<If", 6, value)


def tensor(*shape: int, kind: int = F32, seed: int = 0) -> tuple[int, tuple[int, ...], bytes]:
    names = {F32: "F32", F16: "F16", BF16: "BF16"}
    return kind, shape, numbers(names[kind], *shape, seed=seed)[2]


def both(rank: int = 2, kind: int = F32, name: str = Q) -> Tensors:
    return {
        f"{name}.lora_a": tensor(rank, 32, kind=kind, seed=1),
        f"{name}.lora_b": tensor(32, rank, kind=kind, seed=2),
    }


def gguf(
    tensors: Tensors,
    fields: Mapping[str, Any] = FIELDS,
    *,
    num_tensors: int | None = None,
    offset: Callable[[int, int], int] = lambda place, offset: offset,
) -> bytes:
    """Return a file; ``offset`` may lie about where the tensor of a place begins."""
    found, content = b"", b""
    for place, (name, (kind, shape, data)) in enumerate(tensors.items()):
        found += text(name) + struct.pack("<I", len(shape))
        found += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        found += struct.pack("<IQ", kind, offset(place, len(content)))
        content += data + bytes(-len(data) % 32)
    count = len(tensors) if num_tensors is None else num_tensors
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(fields))
    head += b"".join(field(key, value) for key, value in fields.items()) + found
    return head + bytes(-len(head) % 32) + content


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_names_scales_and_orders_are_read(tmp_path: Path) -> None:
    tensors = {
        **both(),
        **both(rank=8, name="blk.1.ffn_down.weight"),
        "token_embd.weight.lora_a": tensor(50, 2),
        "token_embd.weight.lora_b": tensor(32, 2),
        "blk.0.ffn_up_exps.weight.lora_a": tensor(3, 2, 32),
        "blk.0.ffn_up_exps.weight.lora_b": tensor(3, 16, 2),
    }
    modules = open_adapter(write(tmp_path / "one.gguf", gguf(tensors))).modules
    query = modules["model.layers.0.self_attn.q_proj"]
    assert (query.scale, query.rank, query.changes) == (2.0, 2, (Change.QUERY_HALVES,))
    down = modules["model.layers.1.mlp.down_proj"]
    assert (down.scale, down.rank, down.changes) == (0.5, 8, ())
    embedding = modules["model.embed_tokens"]
    assert (embedding.layout, embedding.num_inputs, embedding.num_outputs) == (
        Layout.TURNED,
        50,
        32,
    )
    ups = modules["model.layers.0.mlp.experts.*.up_proj"]
    assert (ups.num_experts, ups.num_inputs, ups.num_outputs, ups.rank) == (3, 32, 16, 2)


def test_without_alpha_all_scales_are_1(tmp_path: Path) -> None:
    fields = {key: value for key, value in FIELDS.items() if key != "adapter.lora.alpha"}
    [module] = open_adapter(write(tmp_path / "a.gguf", gguf(both(), fields))).modules.values()
    assert module.scale == 1.0


def test_the_digest_is_of_the_content_and_of_its_meaning(tmp_path: Path) -> None:
    plain = adapter_digest(write(tmp_path / "a.gguf", gguf(both())))
    turned = dict(reversed(list(both().items())))
    named = FIELDS | {"general.name": "other"}
    assert adapter_digest(write(tmp_path / "b.gguf", gguf(turned, named))) == plain
    others = {
        adapter_digest(write(tmp_path / f"{number}.gguf", content))
        for number, content in enumerate(
            (
                gguf(both(), FIELDS | {"general.architecture": "qwen2"}),  # rows in another order
                gguf(both(), FIELDS | {"adapter.lora.alpha": 3.0}),
                gguf(both(kind=F16)),
                gguf(both(rank=4)),
                gguf(both(name="blk.1.attn_q.weight")),
            )
        )
    }
    assert len(others - {plain}) == 5
    adapter = read_adapter(tmp_path / "a.gguf")
    assert adapter.digest == plain
    assert adapter.data[A] == both()[A][2]


def test_a_file_is_found_by_its_folder_and_below_a_root_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "one").mkdir(parents=True)
    path = write(root / "one" / "it.gguf", gguf(both()))
    assert open_adapter(find_adapter(root, "one")).path == path
    assert open_adapter(find_adapter(root, "one/it.gguf")).path == path
    (root / "one" / "it.gguf").rename(tmp_path / "it.gguf")
    (root / "one" / "it.gguf").symlink_to(tmp_path / "it.gguf")
    for source in ("one", "one/it.gguf"):
        with pytest.raises(AdapterError, match="leads out of the adapters' folder"):
            find_adapter(root, source)
    write_adapter(root / "two", pair())  # settings decide
    write(root / "two" / "it.gguf", b"")
    assert open_adapter(find_adapter(root, "two")).path.suffix == ".safetensors"


def changed(key: str, value: Any) -> bytes:
    return gguf(both(), FIELDS | {key: value})


def with_tensors(tensors: Tensors) -> bytes:
    return gguf({**both(), **tensors})


def instead(name: str, one: tuple[int, tuple[int, ...], bytes]) -> bytes:
    return gguf({**both(), name: one})


MANY = struct.pack("<II", 9, 0)  # an array of bytes
NAN = struct.pack("<f", float("nan"))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "another file": (b"PK\x03\x04" + bytes(64), "does not begin with GGUF"),
    "7 bytes": (b"GGUF\x03\x00\x00", "truncated"),
    "of the future": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian is not supported"),
    "2**60 tensors": (gguf(both(), num_tensors=2**60), "truncated|UTF-8|dimensions|printable"),
    "no tensors": (gguf({}), "must have 1 to 200000 tensors, got 0"),
    "a model": (changed("general.type", "model"), "general.type: must be adapter .* got 'model'"),
    "no type": (gguf(both(), {}), "general.type: must be adapter in an adapter, got None"),
    "another adapter": (changed("adapter.type", "ia3"), "adapter.type: must be lora"),
    "an activated adapter": (
        changed("adapter.alora.invocation_tokens", MANY + struct.pack("<QB", 1, 1)),
        "adapter.alora.invocation_tokens: is not supported",
    ),
    "another architecture": (changed("general.architecture", "mpt"), "'mpt' is not supported"),
    "an architecture that is a number": (changed("general.architecture", 3.0), "3.0 is not supp"),
    "alpha is NaN": (changed("adapter.lora.alpha", float("nan")), "alpha: must be a number up to"),
    "alpha is huge": (changed("adapter.lora.alpha", 1e30), "alpha: must be a number up to 1e.06"),
    "alpha is a text": (changed("adapter.lora.alpha", "4"), "alpha: must be a number up to"),
    "alpha is true": (changed("adapter.lora.alpha", True), "alpha: must be a number up to"),
    "a bomb of metadata": (
        changed("x", MANY + struct.pack("<Q", 2**62)), "truncated: needs .* bytes, the file has",
    ),
    "metadata of 20 MiB": (
        changed("x", MANY + struct.pack("<Q", 20 * 2**20) + bytes(20 * 2**20)),
        "header: must have at most 16777216 bytes",
    ),
    "texts of 2**40": (changed("x", struct.pack("<IIQ", 9, 8, 2**40)), "truncated"),
    "an array of arrays": (changed("x", struct.pack("<IIQ", 9, 9, 1)), "an array of type 9"),
    "an unknown type of metadata": (changed("x", struct.pack("<I", 77)), "unknown type 77"),
    "an alignment of 0": (
        changed("general.alignment", struct.pack("<II", 4, 0)), "general.alignment: must be",
    ),
    "a name that is not printable": (with_tensors({"a\nb": tensor(2, 2)}), "not printable"),
    "a name of no text": (
        gguf(both()).replace(A.encode(), b"\xff" * len(A)), "is not UTF-8",
    ),
    "a bomb": (instead(A, (F32, (2**40, 2**20), bytes(16))), f"truncated: {A} ends at byte"),
    "no dimensions": (instead(A, (F32, (), b"")), "0 dimensions are not supported"),
    "five dimensions": (instead(A, (F32, (1, 1, 1, 1, 2), bytes(8))), "5 dimensions are not"),
    "a size of 0": (instead(A, (F32, (2, 0), b"")), "a tensor without values"),
    "an unknown storage": (instead(A, (99, (2, 32), bytes(256))), "99. is not supported"),
    "overlapping": (gguf(both(), offset=lambda place, offset: 0), "overlaps"),
    "behind the end": (gguf(both(), offset=lambda place, offset: 2**50), "truncated"),
    "twice": (
        gguf(both()).replace(B.encode(), A.encode()), f"{A}: is there twice",
    ),
    "quantized": (instead(A, (Q8_0, (2, 32), bytes(68))), f"{A}: dtype must be one of F32"),
    "one dimension": (instead(A, tensor(64)), "have 2 dimensions"),
    "three dimensions": (instead(A, tensor(2, 4, 8)), "have 2 dimensions"),
    "another rank": (instead(B, tensor(32, 3)), f"{A}: shapes .* mean no rank of 1 to 256"),
    "a rank of 257": (gguf(both(rank=257)), "mean no rank of 1 to 256"),
    "no A": (gguf({B: both()[B]}), f"{A}: is missing"),
    "no B": (gguf({A: both()[A]}), f"{B}: is missing"),
    "a whole weight": (with_tensors({Q: tensor(2, 2)}), f"{Q}: is no LoRA tensor"),
    "a bias": (gguf(both(name="blk.0.attn_q.bias")), "is no name of a weight"),
    "a path": (gguf(both(name="../../etc/passwd")), "is no name of a weight"),
    "a long name": (gguf(both(name="x" * 100_000)), "is no name of a weight"),
    "an unknown part": (gguf(both(name="blk.0.attn_magic.weight")), "has no such weight"),
    "an unknown layer": (gguf(both(name="blk.999999.attn_q.weight")), "is no name of a weight"),
    "a norm that converters change": (
        gguf(both(name="blk.0.attn_norm.weight"), FIELDS | {"general.architecture": "gemma2"}),
        "weights that a converter changes",
    ),
    "a part of a joined weight": (
        gguf(both(name="blk.0.attn_gate.weight"), FIELDS | {"general.architecture": "qwen3next"}),
        "is a part of model.layers.0.linear_attn.in_proj_qkvz",
    ),
    "experts of two numbers": (
        gguf(
            {
                "blk.0.ffn_up_exps.weight.lora_a": tensor(3, 2, 8),
                "blk.0.ffn_up_exps.weight.lora_b": tensor(4, 8, 2),
            }
        ),
        "3 experts, but lora_b has 4",
    ),
    "NaN": (gguf(both()).replace(both()[A][2][:4], NAN), f"{A}: a number is NaN or infinite"),
    "infinity in B": (
        gguf(both()).replace(both()[B][2][:4], struct.pack("<f", float("inf"))),
        f"{B}: a number is NaN or infinite",
    ),
    "NaN in float16": (
        gguf(both(kind=F16)).replace(both(kind=F16)[A][2][:2], b"\x00\x7e"),
        f"{A}: a number is NaN or infinite",
    ),
    "an architecture twice": (
        gguf(both(), FIELDS | {"general.architecturf": "gemma2"}).replace(
            b"general.architecturf", b"general.architecture"
        ),
        "general.architecture: is there twice",
    ),
    "cut": (gguf(both())[:-64], "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    path = write(tmp_path / "it.gguf", content)
    for read in (read_adapter, adapter_digest):
        with pytest.raises(AdapterError, match=expected) as caught:
            read(path)
        line = str(caught.value)
        assert line.startswith("adapter: ")
        assert str(path) in line
        assert "\n" not in line
        assert len(line) < 1000
        assert status_name(caught.value) == "INVALID_ARGUMENT"


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "device.gguf").symlink_to("/dev/zero")
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    for name, expected in (
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("circle", "Too many levels of symbolic links"),
        ("missing", "No such file"),
    ):
        with pytest.raises(AdapterError, match=expected):
            open_adapter(tmp_path / f"{name}.gguf")
    with pytest.raises(AdapterError, match=r"has 3 .gguf files; name one"):
        open_adapter(tmp_path)
