"""Reads a checkpoint's quantized weights as floating-point numbers, one layer at a time.

    layer.weight_packed  ┐
    layer.weight_scale   ├─ the `Storage` that has exactly these parts ── layer.weight [out, in]
    layer.weight_shape   ┘

The names of a layer's tensors tell how its weight is stored. A layer that is not quantized is read
unchanged. Weights are computed in the dtype of the scales, and so equal the results of each
format's own tools bit for bit. Refuses to know: modules, their dtype.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton_kernels import Float8Rows, GroupedIntegers, Groups
from baton_kernels.packed import FLOAT8, FLOAT8_GROUP
from models.loading.fp4 import fp4, mxfp4, mxfp4_integers, nvfp4_integers
from models.loading.stored_weights import StoredTensor
from models.quantization import QuantizationConfig

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# In AWQ's GEMM layout: for each of eight adjacent numbers, its place in the packed word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

Parts = Mapping[str, Tensor]
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Storage:
    """One way in which checkpoints store a layer's weight.

    Attributes:
        parts: last part of the names of the required tensors.
        may_have: last part of the names of optional tensors.
        restore: makes the weight, ``[out, in]``, from the parts; raises ValueError for bad shapes.
        keep: returns the weight as grouped integers; None if kernels do not support this form.
        keep_float8: returns the weight as float8; None if the weight is not float8.
    """

    parts: frozenset[str]
    may_have: frozenset[str]
    restore: Callable[[Parts, QuantizationConfig], Tensor]
    keep: Callable[[Parts, QuantizationConfig], GroupedIntegers | None] = lambda *_: None
    keep_float8: Callable[[Parts, QuantizationConfig], Float8Rows | None] = lambda *_: None


# Exceptions that parts with wrong shapes or values may cause in the functions of a `Storage`.
_DO_NOT_FIT = (ValueError, RuntimeError, LookupError, ArithmeticError)


def read_quantized(
    tensors: Mapping[str, StoredTensor], quantization: QuantizationConfig
) -> Iterator[StoredTensor]:
    """Yield every weight of a quantized checkpoint.

    A quantized weight can be read as floating-point numbers, or as integers or float8 if kernels
    support them. Reading raises ModelLoadError if no `Storage` fits, or the parts do not fit
    together.
    """
    storages = STORAGES.get(quantization.method, ())  # none for mxfp4, whose experts are fused
    suffixes = frozenset().union(*(one.parts | one.may_have for one in storages))
    layers: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for name, stored in tensors.items():
        layer, _, suffix = name.rpartition(".")
        layers[layer if suffix in suffixes else name].append(stored)
    for layer, parts in layers.items():
        if parts[0].name == layer:  # not a part of a quantized layer
            yield parts[0]
        else:
            yield StoredTensor(
                parts[0].path,
                f"{layer}.weight",
                functools.partial(_restored, layer, parts, quantization),
                read_integers=functools.partial(_kept, layer, parts, quantization),
                read_float8=functools.partial(_kept_float8, layer, parts, quantization),
            )


def _restored(
    layer: str, stored: Sequence[StoredTensor], quantization: QuantizationConfig
) -> Tensor:
    path, parts = stored[0].path, _read_parts(layer, stored)
    if _is_plain(parts):
        return parts["weight"]
    storage = _storage_of(parts, quantization)
    if storage is None:
        raise ModelLoadError(
            f"{path}: {layer}: {quantization.method} weights of {', '.join(sorted(parts))} "
            "are not supported"
        )
    try:
        return storage.restore(parts, quantization)
    except _DO_NOT_FIT as error:
        raise ModelLoadError(f"{path}: {layer}: its parts do not fit: {error}") from error


def _kept(
    layer: str, stored: Sequence[StoredTensor], quantization: QuantizationConfig
) -> GroupedIntegers | None:
    return _as_stored(layer, stored, quantization, lambda storage: storage.keep)


def _kept_float8(
    layer: str, stored: Sequence[StoredTensor], quantization: QuantizationConfig
) -> Float8Rows | None:
    return _as_stored(layer, stored, quantization, lambda storage: storage.keep_float8)


def _as_stored(
    layer: str,
    stored: Sequence[StoredTensor],
    quantization: QuantizationConfig,
    way: Callable[[Storage], Callable[[Parts, QuantizationConfig], _Kept | None]],
) -> _Kept | None:
    parts = _read_parts(layer, stored)
    storage = None if _is_plain(parts) else _storage_of(parts, quantization)
    if storage is None:
        return None
    try:
        return way(storage)(parts, quantization)
    except _DO_NOT_FIT as error:
        raise ModelLoadError(f"{stored[0].path}: {layer}: its parts do not fit: {error}") from error


def _read_parts(layer: str, stored: Sequence[StoredTensor]) -> dict[str, Tensor]:
    return {one.name[len(layer) + 1 :]: one.read() for one in stored}


def _is_plain(parts: Parts) -> bool:
    return set(parts) <= {"weight"} and parts["weight"].dtype not in _FLOAT8


def _storage_of(parts: Parts, quantization: QuantizationConfig) -> Storage | None:
    for storage in STORAGES[quantization.method]:
        if storage.parts <= set(parts) <= storage.parts | storage.may_have:
            return storage
    return None


# ---------------------------------------------------------------- integers packed into words


def _unpack(words: Tensor, num_bits: int, num_columns: int) -> Tensor:
    """Unpack integers of ``num_bits`` bits each, without gaps between, low bits first.

    Args:
        words: ``[rows, words]`` int32.

    Returns:
        ``[rows, num_columns]`` int32, at least 0.
    """
    if words.dtype != torch.int32 or words.shape[1] != -(-num_columns * num_bits // 32):
        raise ValueError(
            f"{num_columns} numbers of {num_bits} bits do not fit {words.shape[1]} words "
            f"of {words.dtype}"
        )
    mask = (1 << num_bits) - 1
    if 32 % num_bits == 0:
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
        found = (words[:, :, None] >> shifts) & mask
        return found.flatten(1)[:, :num_columns]
    starts = torch.arange(num_columns) * num_bits
    first, offset = starts // 32, starts % 32
    wide = words.to(torch.int64) & 0xFFFFFFFF
    # a number may end exactly at the end of the last word
    padded = torch.nn.functional.pad(wide, (0, 1))
    both = padded[:, first] | padded[:, first + 1] << 32
    return ((both >> offset) & mask).to(torch.int32)


def _num_bits(num_words: int, num_columns: int) -> int:
    """Return how many bits each number has if ``num_words`` words hold ``num_columns`` numbers."""
    for num_bits in range(1, 9):
        if -(-num_columns * num_bits // 32) == num_words:
            return num_bits
    raise ValueError(f"{num_columns} numbers do not fill {num_words} words")


def _scaled(
    numbers: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    columns: Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
) -> Tensor:
    """Return ``(numbers - zero_point) * scale`` in the scale's dtype.

    Args:
        numbers: ``[out, in]``.
        scale: one number for the weight, one per row, one per row and group of columns, or one per
            block.
        zero_point: shaped like ``scale``; None: 0.
        columns: the group of each column, ``[in]``; None: groups are adjacent columns.
        block_shape: rows and columns of a block; None: there are no blocks.
    """
    shape = (numbers.shape[0], numbers.shape[1])

    def spread(one: Tensor) -> Tensor:
        if one.numel() == 1:
            return one.reshape(1, 1)
        if one.dim() == 1:
            one = one[:, None]
        if one.shape[0] != shape[0]:
            return _spread_blocks(one, shape, block_shape)
        if columns is not None:
            return one[:, columns.long()]
        if shape[1] % one.shape[1]:
            raise ValueError(f"{one.shape[1]} groups do not divide {shape[1]} columns")
        return one.repeat_interleave(shape[1] // one.shape[1], dim=1)

    values = numbers.to(scale.dtype)
    if zero_point is not None:
        values = values - spread(zero_point).to(scale.dtype)
    return values * spread(scale)


def _spread_blocks(
    one: Tensor, shape: tuple[int, int], block_shape: tuple[int, int] | None
) -> Tensor:
    if block_shape is None or tuple(one.shape) != tuple(
        -(-size // block) for size, block in zip(shape, block_shape, strict=True)
    ):
        raise ValueError(f"scales of shape {list(one.shape)} do not fit {list(shape)}")
    for dim, block in enumerate(block_shape):
        one = one.repeat_interleave(block, dim=dim)
    return one[: shape[0], : shape[1]]


# ---------------------------------------------------------------- formats of weights


def _plain(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize a weight that is stored as int8 or float8."""
    weight = parts["weight"]
    if weight.dtype not in (torch.int8, *_FLOAT8):
        raise ValueError(f"weight: dtype {weight.dtype} is not supported beside scales")
    scale = _factors(parts)
    zero_point = parts.get("weight_zero_point")
    return _scaled(weight, scale, zero_point, parts.get("weight_g_idx"), quantization.block_shape)


def _factors(parts: Parts) -> Tensor:
    """Return a weight's scales as floating-point numbers; MXFP8 stores them as exponents of two."""
    scale = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
    if scale.is_floating_point():
        return scale
    if scale.dtype != torch.uint8 or parts["weight"].dtype not in _FLOAT8:
        raise ValueError(f"scales: dtype {scale.dtype} is not supported")
    return torch.exp2(scale.float() - 127)


def _keep_plain(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return an int8 weight as grouped integers.

    Returns None for other dtypes, and if scales are not per weight, row, or group of a row.
    """
    weight = parts["weight"]
    if weight.dtype != torch.int8 or "weight_g_idx" in parts:
        return None
    return _integers_in_groups(8, weight, parts["weight_scale"], parts.get("weight_zero_point"))


def _keep_float8(parts: Parts, quantization: QuantizationConfig) -> Float8Rows | None:
    """Return an e4m3 weight without change.

    Returns None for other dtypes, and if scales are not per weight, row, group of a row, or block.
    """
    weight = parts["weight"]
    if weight.dtype != FLOAT8 or "weight_g_idx" in parts or "weight_zero_point" in parts:
        return None
    rows, columns = weight.shape
    scale = _in_rows(_factors(parts).float(), rows)
    if scale.dim() != 2:
        return None
    if scale.shape[1] == 1 and len(scale) == rows:
        return Float8Rows(weight, scale, columns)
    if len(scale) == rows:
        size = -(-columns // scale.shape[1])
    elif quantization.block_shape is not None:
        high, size = quantization.block_shape
        if len(scale) != -(-rows // high):
            return None  # `_plain` will raise an error about the shape
        scale = scale.repeat_interleave(high, dim=0)[:rows]
    else:
        return None
    fits = size % FLOAT8_GROUP == 0 and scale.shape == (rows, -(-columns // size))
    return Float8Rows(weight, scale, size) if fits else None


def _integers_in_groups(
    num_bits: int, numbers: Tensor, scale: Tensor, zero_point: Tensor | None = None
) -> GroupedIntegers | None:
    """Return grouped integers; None if a group is not a run of adjacent numbers of a row.

    Args:
        num_bits: bits of one number.
        numbers: ``[out, in]``, at least ``-2 ** (num_bits - 1)``.
        scale: one number for the weight, ``[out]``, or ``[out, groups]``.
        zero_point: the number that stands for 0, shaped like ``scale``; None: 0.
    """
    rows, size = numbers.shape
    found = [_in_rows(one, rows) for one in (scale, zero_point) if one is not None]
    if any(one.dim() != 2 or one.shape != found[0].shape or len(one) != rows for one in found):
        return None
    if size % found[0].shape[1] or not 1 <= num_bits <= 8:
        return None
    bits, group_size = 4 if num_bits <= 4 else 8, size // found[0].shape[1]
    if zero_point is None or not bool(zero_point.any()):
        return GroupedIntegers.of(bits, numbers, found[0], group_size)
    middle = 1 << (num_bits - 1)
    zeros = found[1].to(torch.int32) + middle
    minima = (
        -zeros.float() * found[0].float() if int(zeros.max()) > 128 else (-zeros).to(torch.int8)
    )
    groups = Groups(found[0], minima)
    return GroupedIntegers.of(bits, numbers.to(torch.int32) + middle, groups, group_size)


def _in_rows(one: Tensor, num_rows: int) -> Tensor:
    """Reshape a single number, or ``[rows]``, to ``[rows, 1]``; return other shapes unchanged."""
    if one.numel() == 1:
        return one.reshape(1, 1).expand(num_rows, 1)
    return one[:, None] if one.dim() == 1 else one


def _dense_integers(parts: Parts) -> tuple[int, Tensor]:
    """Unpack a weight's integers.

    Returns the bits per integer, and the integers, ``[out, in]``, at least ``-2 ** (bits - 1)``.
    """
    num_columns = int(parts["weight_shape"][1])
    packed = parts["weight_packed"]
    num_bits = _num_bits(packed.shape[1], num_columns)
    return num_bits, _unpack(packed, num_bits, num_columns) - (1 << (num_bits - 1))


def _keep_packed_integers(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    if "weight_g_idx" in parts:
        return None
    num_bits, numbers = _dense_integers(parts)
    zero_point = _dense_zero_point(parts, num_bits)
    return _integers_in_groups(num_bits, numbers, parts["weight_scale"], zero_point)


def _dense_zero_point(parts: Parts, num_bits: int) -> Tensor | None:
    zero_point = parts.get("weight_zero_point")
    if zero_point is None or zero_point.dtype != torch.int32:
        return zero_point
    num_rows = int(parts["weight_shape"][0])  # a word packs zero points of adjacent rows
    return _unpack(zero_point.T.contiguous(), num_bits, num_rows).T - (1 << (num_bits - 1))


def _packed_integers(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize integers that compressed-tensors packed into words."""
    num_bits, numbers = _dense_integers(parts)
    zero_point, columns = _dense_zero_point(parts, num_bits), parts.get("weight_g_idx")
    scale = parts["weight_scale"]
    return _scaled(numbers, scale, zero_point, columns, quantization.block_shape)


def _nvfp4(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize NVFP4: e2m1 in groups of 16 with e4m3 scales, divided by one scale per weight."""
    numbers = fp4(parts["weight_packed"])
    scale = parts["weight_scale"].to(numbers.dtype) / parts["weight_global_scale"]
    return _scaled(numbers, scale).to(numbers.dtype)


def _mxfp4(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize MXFP4: e2m1 in groups of 32, with powers of two as scales (OCP MX, 1.0)."""
    scale = parts["weight_scale"]
    if scale.dtype != torch.uint8:
        raise ValueError(f"weight_scale: dtype {scale.dtype} is not supported for mxfp4")
    return mxfp4(parts["weight_packed"], scale)


def _bits_by_zeros(parts: Parts) -> int:
    """Return the bits per integer, computed from the shape of the packed zero points."""
    num_words, num_outputs = parts["qzeros"].shape[1], parts["scales"].shape[1]
    num_bits, rest = divmod(32 * num_words, num_outputs)
    if rest or not 1 <= num_bits <= 8:
        raise ValueError(f"{num_outputs} zero points do not fill {num_words} words")
    return num_bits


def _gptq_integers(parts: Parts, quantization: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Unpack a GPTQ weight's integers, ``[out, in]``, and its zero points, ``[groups, out]``."""
    qweight, scales, num_bits = parts["qweight"], parts["scales"], _bits_by_zeros(parts)
    num_columns = qweight.shape[0] * 32 // num_bits
    numbers = _unpack(qweight.T.contiguous(), num_bits, num_columns)
    zero_points = _unpack(parts["qzeros"], num_bits, scales.shape[1])
    return numbers, zero_points + quantization.zero_point_offset


def _gptq(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize GPTQ: integers with zero points, stored transposed."""
    numbers, zero_points = _gptq_integers(parts, quantization)
    columns = parts.get("g_idx")
    if columns is None:
        columns = _groups_of(numbers.shape[1], len(parts["scales"]), quantization)
    return _scaled(numbers, parts["scales"].T, zero_points.T, columns)


def _groups_of(size: int, num_groups: int, quantization: QuantizationConfig) -> Tensor:
    """Compute each column's group, ``[size]``, for a layer that does not store the groups.

    If the configured group size does not give ``num_groups`` groups, all groups have equal sizes.

    Raises:
        ValueError: the columns cannot be divided into groups of an equal power of two.
    """
    wanted = quantization.group_size or size
    if -(-size // wanted) != num_groups:
        wanted, rest = divmod(size, num_groups)
        if rest or (num_groups > 1 and wanted & (wanted - 1)):
            raise ValueError(f"{num_groups} groups of {size} columns: the group size is unknown")
    return torch.arange(size) // wanted


def _keep_gptq(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return a GPTQ weight as grouped integers; None if a group's columns are not adjacent."""
    numbers, zero_points = _gptq_integers(parts, quantization)
    scales, columns, num_bits = parts["scales"].T, parts.get("g_idx"), _bits_by_zeros(parts)
    if columns is None:
        columns = _groups_of(numbers.shape[1], scales.shape[1], quantization)
    group_size = -(-numbers.shape[1] // scales.shape[1])
    if not torch.equal(columns.long(), torch.arange(numbers.shape[1]) // group_size):
        return None
    middle = 1 << (num_bits - 1)
    return _integers_in_groups(num_bits, numbers - middle, scales, zero_points.T - middle)


def _awq_integers(parts: Parts, quantization: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Unpack an AWQ weight's integers, ``[in, out]``, and its zero points, ``[groups, out]``.

    The checkpoint packs both along the output dimension: a word has eight adjacent integers, in
    AWQ's order.
    """

    def in_order(words: Tensor) -> Tensor:
        numbers = _unpack(words, _bits_by_zeros(parts), parts["scales"].shape[1])
        return numbers.view(len(words), -1, 8)[:, :, _AWQ_PLACES].flatten(1)

    return in_order(parts["qweight"]), in_order(parts["qzeros"])


def _awq(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize AWQ: integers with zero points, stored transposed."""
    numbers, zero_points = _awq_integers(parts, quantization)
    columns = _groups_of(len(numbers), len(parts["scales"]), quantization)
    return _scaled(numbers.T, parts["scales"].T, zero_points.T, columns)


def _keep_awq(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    numbers, zero_points = _awq_integers(parts, quantization)
    num_bits, scales = _bits_by_zeros(parts), parts["scales"].T
    middle = 1 << (num_bits - 1)
    return _integers_in_groups(num_bits, numbers.T - middle, scales, zero_points.T - middle)


def _modelopt(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize a ModelOpt weight, whose dtypes tell the format: MXFP4, int4, int8 or float8.

    If the checkpoint asks to scale the layer's inputs (``pre_quant_scale``), the weight's columns
    are scaled instead.
    """
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.dtype == torch.uint8 and scale.dtype == torch.uint8:
        numbers = mxfp4(weight, scale).float()
    elif weight.dtype == torch.uint8:
        numbers = _scaled(_pairs_of_rows(weight), scale)
    else:
        numbers = _plain({**parts, "weight_scale": _by_blocks(scale)}, quantization)
    smoothed = parts.get("pre_quant_scale")
    return numbers if smoothed is None else numbers.float() * smoothed.float()


def _by_blocks(scale: Tensor) -> Tensor:
    """Reshape scales ``[rows, 1, columns, 1]`` to ``[rows, columns]``; leave other shapes."""
    return scale[:, 0, :, 0] if scale.dim() == 4 and scale.shape[1::2] == (1, 1) else scale


def _pairs_of_rows(packed: Tensor) -> Tensor:
    """Unpack bytes that hold 4-bit integers of two adjacent outputs, low half first."""
    signed = torch.stack([packed << 4, packed], dim=1).view(torch.int8) >> 4
    return signed.flatten(0, 1)


def _keep_modelopt(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return a ModelOpt weight of int8, MXFP4 or int4 as grouped integers; None for others."""
    weight, scale = parts["weight"], parts["weight_scale"]
    if "pre_quant_scale" in parts:
        return None
    if weight.dtype == torch.int8:
        return _keep_plain(parts, quantization)
    if weight.dtype != torch.uint8:
        return None
    if scale.dtype == torch.uint8:
        return mxfp4_integers(weight, scale)
    return _integers_in_groups(4, _pairs_of_rows(weight), scale)


def _keep_modelopt_float8(parts: Parts, quantization: QuantizationConfig) -> Float8Rows | None:
    if "pre_quant_scale" in parts:
        return None
    scale = _by_blocks(parts["weight_scale"])
    return _keep_float8({**parts, "weight_scale": scale}, quantization)


def _modelopt_nvfp4(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize ModelOpt's NVFP4: e2m1 in groups of 16 with e4m3 scales, times one scale."""
    scale = parts["weight_scale"].float() * parts["weight_scale_2"].float()
    numbers = _scaled(fp4(parts["weight"]).float(), scale)
    smoothed = parts.get("pre_quant_scale")
    return numbers if smoothed is None else numbers * smoothed.float()


def _keep_modelopt_nvfp4(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    if "pre_quant_scale" in parts:
        return None
    scale = parts["weight_scale"].float() * parts["weight_scale_2"].float()
    return nvfp4_integers(parts["weight"], scale)


_ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_FIRST_SCALE = frozenset({"weight", "weight_scale"})
_SMOOTHED = frozenset({"input_scale", "pre_quant_scale"})

# Quantization method -> its storages. To add a format, add a line here, and its functions above.
STORAGES: dict[str, tuple[Storage, ...]] = {
    "compressed-tensors": (
        Storage(
            _FIRST_SCALE,
            _ACTIVATIONS | {"weight_zero_point", "weight_g_idx"},
            _plain,
            _keep_plain,
            _keep_float8,
        ),
        Storage(
            frozenset({"weight_packed", "weight_scale", "weight_shape"}),
            _ACTIVATIONS | {"weight_zero_point", "weight_g_idx"},
            _packed_integers,
            _keep_packed_integers,
        ),
        Storage(
            frozenset({"weight_packed", "weight_scale", "weight_global_scale"}),
            _ACTIVATIONS,
            _nvfp4,
        ),
        Storage(frozenset({"weight_packed", "weight_scale"}), _ACTIVATIONS, _mxfp4),
    ),
    "fp8": (
        Storage(
            frozenset({"weight", "weight_scale_inv"}),
            _ACTIVATIONS,
            _plain,
            keep_float8=_keep_float8,
        ),
        Storage(_FIRST_SCALE, _ACTIVATIONS, _plain, keep_float8=_keep_float8),
    ),
    "gptq": (
        Storage(
            frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"}), _gptq, _keep_gptq
        ),
    ),
    "awq": (Storage(frozenset({"qweight", "qzeros", "scales"}), frozenset(), _awq, _keep_awq),),
    "modelopt": (
        Storage(_FIRST_SCALE, _SMOOTHED, _modelopt, _keep_modelopt, _keep_modelopt_float8),
        Storage(
            _FIRST_SCALE | {"weight_scale_2"}, _SMOOTHED, _modelopt_nvfp4, _keep_modelopt_nvfp4
        ),
    ),
    "fbgemm_fp8": (
        Storage(_FIRST_SCALE, frozenset({"input_scale_ub"}), _plain, keep_float8=_keep_float8),
    ),
}
