"""Computes, from a model's configuration, the memory that weights and KV cache take on a CPU.

Refuses to know: tensors (this module does not import torch), how much memory a machine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile
from baton.checkpoint.gguf.folder import WEIGHTS as GGUF_WEIGHTS
from baton.checkpoint.gguf.folder import read_folder
from baton.engine_config import WEIGHTS
from models.config import ModelConfig
from models.recipe import Matrix, Part

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Per format: bytes per weight, bytes of scales and minima per group, and inputs per group (0: all
# inputs of an output are one group), as `PackedWeight` keeps them.
_FORMATS = {
    "fp32": (4.0, 0.0, 1),
    "bf16": (2.0, 0.0, 1),
    "fp16": (2.0, 0.0, 1),
    "int8-weight-only": (1.0, 4.0, 0),
    "int8": (1.0, 2.0, 128),
    "int4": (0.5, 2.5, 32),
    "fp8": (1.0, 4.0, 0),
    "mxfp4": (0.5, 2.0, 32),  # only if the checkpoint's experts are MXFP4
}
# Format of the other layers -> format of the output head, where they differ.
_HEADS_FORMATS = {"int4": "int8", "fp8": "int8"}
_OF_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# GGUF type -> bytes per weight in memory, with the groups' scales; integers have 4, 6 or 8 bits.
_KEPT_BYTES = {
    **{"F16": 2.0, "BF16": 2.0, "Q8_0": 1.0625, "Q4_0": 0.5625, "Q4_1": 0.625, "Q5_0": 0.8125},
    **{"Q5_1": 0.875, "Q2_K": 0.640625, "Q3_K": 0.5703125, "Q4_K": 0.578125},
    **{"Q5_K": 0.828125, "Q6_K": 0.8203125, "IQ4_NL": 1.0625, "IQ4_XS": 1.0390625},
    "MXFP4": 0.5625,
}
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model takes on a CPU, without biases (less than a thousandth of all bytes).

    Attributes:
        weights: bytes of the weights for each value of ``--weights``.
        kv_token_bytes: bytes of one token's keys and values, over all layers.
        kv_value_bytes: bytes of one number of a key or a value.
        block_size: tokens per KV block.
    """

    weights: dict[str, int]
    kv_token_bytes: int
    kv_value_bytes: int
    block_size: int

    @property
    def kv_block_bytes(self) -> int:
        """Return the bytes of a block of ``block_size`` tokens, over all layers with attention."""
        return self.kv_token_bytes * self.block_size


def memory_needs(
    config: ModelConfig,
    *,
    dtype: str = "float32",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    folder: Path | None = None,
    native_kernels: bool = True,
) -> MemoryNeeds:
    """Compute the memory that a model takes on a CPU.

    For ``--weights auto``, a quantized checkpoint is counted with the size of its files: grouped
    integers and float8 keep their size. Formats that must be dequantized take more. A GGUF file is
    counted tensor by tensor.

    Args:
        config: the model's configuration.
        dtype: dtype of the computation, and of weights that are not packed.
        kv_cache_dtype: ``auto`` (equal to ``dtype``) or ``fp8``.
        block_size: tokens per KV block.
        folder: the model's folder; None: a quantized checkpoint is counted as if not quantized.
        native_kernels: whether native kernels are used; without them, ``--weights auto`` keeps all
            weights in ``dtype``.
    """
    value_bytes = 1 if kv_cache_dtype == "fp8" else _DTYPE_BYTES[dtype]
    kv_token_bytes = sum(layer.mixer.kv.token_values for layer in config.layers) * value_bytes
    weights = {
        name: _weight_bytes(config, _format(config, name, dtype, native_kernels), dtype)
        for name in WEIGHTS
    }
    if folder is not None and native_kernels:
        stored = _stored_bytes(config, folder, dtype)
        weights["auto"] = weights["auto"] if stored is None else stored
    return MemoryNeeds(weights, kv_token_bytes, value_bytes, block_size)


def memory_needs_of_folder(folder: Path) -> MemoryNeeds:
    """Compute the memory that a folder's model takes on a CPU; raises ModelLoadError."""
    return memory_needs(ModelConfig.from_folder(folder), folder=folder)


def _stored_bytes(config: ModelConfig, folder: Path, dtype: str) -> int | None:
    """Return the bytes that a quantized checkpoint's weights take; None: it is not quantized."""
    if (folder / GGUF_WEIGHTS).exists():
        return _gguf_bytes(config, read_folder(folder), dtype)
    if config.quantization is None:
        return None
    if config.quantization.method == "mxfp4":  # only experts are quantized
        return _weight_bytes(config, _format(config, "auto", dtype), dtype, experts="mxfp4")
    files = sorted(folder.glob("*.safetensors"))
    return sum(path.stat().st_size + _widened_bytes(path) for path in files) or None


def _widened_bytes(path: Path) -> int:
    """Return by how many bytes NVFP4's e4m3 scales grow when they become float32 in memory."""
    from safetensors import safe_open  # imported here, because routers may lack this package

    with safe_open(path, "pt") as file:
        scales = [file.get_slice(name) for name in file.keys() if name.endswith("_scale")]  # noqa: SIM118
        narrow = [prod(one.get_shape()) for one in scales if one.get_dtype() == "F8_E4M3"]
    return 3 * int(sum(narrow))


def _gguf_bytes(config: ModelConfig, file: GgufFile, dtype: str) -> int:
    total = 0
    for name, tensor in file.tensors.items():
        kind, size = TENSOR_TYPES[tensor.type_id].name, _DTYPE_BYTES[dtype]
        if name == _EMBEDDING and not config.tie_word_embeddings:
            weight = 2.0 if kind == "BF16" else size
        else:
            weight = _KEPT_BYTES.get(kind, size)
        total += int(prod(tensor.shape) * weight)
    return total


def _weight_bytes(
    config: ModelConfig, format_: str, dtype: str, *, experts: str | None = None
) -> int:
    """Return the bytes of all weights.

    Args:
        config: the model's configuration.
        format_: format of linear layers; if this is a dtype, they are not packed.
        dtype: dtype of weights that are not packed.
        experts: format of the experts; None: ``format_``.
    """
    head: Matrix = (config.vocab_size, config.hidden_size)
    norms = config.hidden_size * (2 * config.num_layers + 1) * _DTYPE_BYTES[dtype]
    # Routers and projections of latents are never quantized.
    exact = dtype if format_ in _DTYPE_BYTES else _format(config, "auto", dtype)
    layers = sum(
        number * _matrix_bytes(one, kept, dtype)
        for matrices, kept in (
            (layer_matrices(config), format_),
            (expert_matrices(config), experts or format_),
            (exact_matrices(config), exact),
        )
        for one, number in matrices.items()
    )
    head_format = _HEADS_FORMATS.get(format_, format_)
    total = norms + layers + _matrix_bytes(head, head_format, dtype)
    embedded = 0 if config.tie_word_embeddings else config.hidden_size  # numbers of each token
    if config.recipe.per_layer_embedding is not None:
        embedded += config.num_layers * config.recipe.per_layer_embedding.size
    is_narrow = format_ in _FORMATS and _is_narrow(config)
    return total + config.vocab_size * embedded * (2 if is_narrow else _DTYPE_BYTES[dtype])


def _is_narrow(config: ModelConfig) -> bool:
    """Return whether the embedding stays bfloat16 in memory, even for computing in float32."""
    is_plain = config.quantization is None or config.quantization.method == "mxfp4"
    return config.dtype == "bfloat16" and is_plain


def _format(config: ModelConfig, weights: str, dtype: str, native_kernels: bool = True) -> str:
    """Return the format of linear layers for a value of ``--weights``; a dtype: not packed."""
    if weights != "auto":
        return weights
    if not native_kernels:
        return dtype
    return _OF_DTYPES[config.dtype if dtype == "float32" else dtype]


def layer_matrices(config: ModelConfig) -> Counter[Matrix]:
    """Count matrices by shape, without routed experts and matrices that are never quantized."""
    return _count(config, lambda part: part.matrices(config.hidden_size))


def exact_matrices(config: ModelConfig) -> Counter[Matrix]:
    """Count the matrices that are never quantized, by shape."""
    return _count(config, lambda part: part.exact_matrices(config.hidden_size))


def expert_matrices(config: ModelConfig) -> Counter[Matrix]:
    """Count the matrices of routed experts, by shape."""
    return _count(config, lambda part: part.expert_matrices(config.hidden_size))


def _count(config: ModelConfig, matrices: Callable[[Part], list[Matrix]]) -> Counter[Matrix]:
    found = Counter(
        one for layer in config.layers for part in layer.parts for one in matrices(part)
    )
    per_layer = config.recipe.per_layer_embedding
    if per_layer is not None:
        found.update(matrices(per_layer) * config.num_layers)
    return found


def _matrix_bytes(matrix: Matrix, format_: str, dtype: str) -> int:
    out_features, in_features = matrix
    weight, group_bytes, group = _FORMATS.get(format_, (_DTYPE_BYTES[dtype], 0.0, 1))
    num_groups = -(-in_features // group) if group else 1
    return int(out_features * (in_features * weight + num_groups * group_bytes))
