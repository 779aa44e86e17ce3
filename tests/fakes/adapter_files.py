"""Folders of LoRA adapters, written without PEFT, so that they may be wrong in any way.

Refuses to know: what is asserted about them.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "somewhere",
}
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
_FORMATS = {"F32": ("f", 4), "F16": ("e", 2), "BF16": ("H", 2), "I32": ("i", 4), "F64": ("d", 8)}

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, numbers


def numbers(dtype: str, *shape: int, seed: int = 0, scale: float = 0.5) -> Tensor:
    """Draw a tensor."""
    draw, count = random.Random(seed), 1
    for size in shape:
        count *= size
    code, _ = _FORMATS[dtype]
    values: list[Any] = [draw.uniform(-scale, scale) for _ in range(count)]
    if dtype == "BF16":  # the upper half of float32
        values = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    if dtype == "I32":
        values = [int(8 * value) for value in values]
    return dtype, shape, struct.pack(f"<{count}{code}", *values)


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file of these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with this header, and maybe another length of it."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def pair(
    module: str = Q_PROJ,
    *,
    rank: int = 2,
    inputs: int = 32,
    outputs: int = 32,
    dtype: str = "F32",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return both tensors of one layer."""
    return {
        f"{module}.lora_A.weight": numbers(dtype, rank, inputs, seed=seed),
        f"{module}.lora_B.weight": numbers(dtype, outputs, rank, seed=seed + 1),
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor] | bytes, **config: Any) -> Path:
    """Write an adapter's folder; fields of ``config`` that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (CONFIG | config).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    content = tensors if isinstance(tensors, bytes) else safetensors(tensors)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def install(site: Path, name: str, files: Sequence[str]) -> None:
    """Make a package as pip leaves it behind."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def cache(root: Path, repository: str) -> Path:
    """Make a repository in the hub library's cache; return the folder for the files."""
    folder = root / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot
