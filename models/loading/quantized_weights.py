"""Reads a checkpoint's quantized weights as floating-point numbers, one layer at a time.

    layer.weight_packed  ┐
    layer.weight_scale   ├─ the storage with exactly these parts ── layer.weight [out, in]
    layer.weight_shape   ┘

A layer's tensors tell how it is stored; layers without such parts are read unchanged. Numbers are
computed in the scales' dtype, and so equal those of the formats' own tools bit for bit. Refuses to
know: modules, their dtype.
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
# Order of eight adjacent numbers in a word of AWQ's GEMM layout.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

Parts = Mapping[str, Tensor]
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Storage:
    """One way to store a layer's weight.

    Attributes:
        parts: required tensors, by suffix of their names.
        may_have: optional tensors, by suffix.
        restore: makes ``weight`` from the parts, ``[out, in]``; raises ValueError for bad shapes.
        keep: returns the parts as grouped integers; None if kernels do not support them.
        keep_float8: returns the parts as float8; None if they are not float8.
    """

    parts: frozenset[str]
    may_have: frozenset[str]
    restore: Callable[[Parts, QuantizationConfig], Tensor]
    keep: Callable[[Parts, QuantizationConfig], GroupedIntegers | None] = lambda *_: None
    keep_float8: Callable[[Parts, QuantizationConfig], Float8Rows | None] = lambda *_: None


# Errors that parts with wrong shapes cause, because a file may contain anything.
_DO_NOT_FIT = (ValueError, RuntimeError, LookupError, ArithmeticError)


def read_quantized(
    tensors: Mapping[str, StoredTensor], quantization: QuantizationConfig
) -> Iterator[StoredTensor]:
    """Yield every weight; quantized ones are read as floating-point numbers.

    Reading raises ModelLoadError if the storage is unknown, or parts do not fit together.
    """
    storages = STORAGES.get(quantization.method, ())  # None for experts: see `fused_experts.py`
    suffixes = frozenset().union(*(one.parts | one.may_have for one in storages))
    layers: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for name, stored in tensors.items():
        layer, _, suffix = name.rpartition(".")
        layers[layer if suffix in suffixes else name].append(stored)
    for layer, parts in layers.items():
        if parts[0].name == layer:  # not quantized
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


# ---------------------------------------------------------------- numbers packed into words


def _unpack(words: Tensor, num_bits: int, num_columns: int) -> Tensor:
    """Unpack dense numbers of ``num_bits`` bits each, low bits first.

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
    # a number may end exactly at the last word's end
    padded = torch.nn.functional.pad(wide, (0, 1))
    both = padded[:, first] | padded[:, first + 1] << 32
    return ((both >> offset) & mask).to(torch.int32)


def _num_bits(num_words: int, num_columns: int) -> int:
    """Return the bits per number of ``num_columns`` numbers in ``num_words`` words."""
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
        scale: one number; or one per row, per row and group of columns, or per block.
        zero_point: shaped like ``scale``; None: 0.
        columns: each column's group; None: groups of adjacent columns.
        block_shape: rows and columns of a block; None: no blocks.
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


# ---------------------------------------------------------------- one format each


def _plain(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Restore int8 or float8 weights, one number per element."""
    weight = parts["weight"]
    if weight.dtype not in (torch.int8, *_FLOAT8):
        raise ValueError(f"weight: dtype {weight.dtype} is not supported beside scales")
    scale = _factors(parts)
    zero_point = parts.get("weight_zero_point")
    return _scaled(weight, scale, zero_point, parts.get("weight_g_idx"), quantization.block_shape)


def _factors(parts: Parts) -> Tensor:
    """Return the scales; for float8, they may be stored as exponents of two (MXFP8)."""
    scale = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
    if scale.is_floating_point():
        return scale
    if scale.dtype != torch.uint8 or parts["weight"].dtype not in _FLOAT8:
        raise ValueError(f"scales: dtype {scale.dtype} is not supported")
    return torch.exp2(scale.float() - 127)


def _keep_plain(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return int8 as grouped integers, if scales are per weight, row, or group of a row."""
    weight = parts["weight"]
    if weight.dtype != torch.int8 or "weight_g_idx" in parts:
        return None
    return _integers_in_groups(8, weight, parts["weight_scale"], parts.get("weight_zero_point"))


def _keep_float8(parts: Parts, quantization: QuantizationConfig) -> Float8Rows | None:
    """Return e4m3 numbers unchanged, if scales are per weight, row, group of a row, or block."""
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
            return None  # `_plain` will report the mismatch
        scale = scale.repeat_interleave(high, dim=0)[:rows]
    else:
        return None
    fits = size % FLOAT8_GROUP == 0 and scale.shape == (rows, -(-columns // size))
    return Float8Rows(weight, scale, size) if fits else None


def _integers_in_groups(
    num_bits: int, numbers: Tensor, scale: Tensor, zero_point: Tensor | None = None
) -> GroupedIntegers | None:
    """Return grouped integers with a scale per row, or per group of adjacent numbers.

    Args:
        num_bits: bits of one number.
        numbers: ``[out, in]``, at least ``-2 ** (num_bits - 1)``.
        scale: one number, ``[out]``, or ``[out, groups]``.
        zero_point: shaped like ``scale``, in units of the numbers; None: 0.
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
    """Reshape one number, or one per row, to ``[rows, 1]``; return other shapes unchanged."""
    if one.numel() == 1:
        return one.reshape(1, 1).expand(num_rows, 1)
    return one[:, None] if one.dim() == 1 else one


def _dense_integers(parts: Parts) -> tuple[int, Tensor]:
    """Return the bits per number, and the integers by row, from ``-2 ** (bits - 1)`` up."""
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
    num_rows = int(parts["weight_shape"][0])  # zero points are packed in columns
    return _unpack(zero_point.T.contiguous(), num_bits, num_rows).T - (1 << (num_bits - 1))


def _packed_integers(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Restore densely packed integers, with zero points if any."""
    num_bits, numbers = _dense_integers(parts)
    zero_point, columns = _dense_zero_point(parts, num_bits), parts.get("weight_g_idx")
    scale = parts["weight_scale"]
    return _scaled(numbers, scale, zero_point, columns, quantization.block_shape)


def _nvfp4(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize e2m1 in groups of 16, with e4m3 scales and one scale of the whole weight."""
    numbers = fp4(parts["weight_packed"])
    scale = parts["weight_scale"].to(numbers.dtype) / parts["weight_global_scale"]
    return _scaled(numbers, scale).to(numbers.dtype)


def _mxfp4(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Dequantize e2m1 in groups of 32, with powers of two as scales (OCP MX, 1.0)."""
    scale = parts["weight_scale"]
    if scale.dtype != torch.uint8:
        raise ValueError(f"weight_scale: dtype {scale.dtype} is not supported for mxfp4")
    return mxfp4(parts["weight_packed"], scale)


def _bits_by_zeros(parts: Parts) -> int:
    """Return the bits per number, from the packed zero points' shape."""
    num_words, num_outputs = parts["qzeros"].shape[1], parts["scales"].shape[1]
    num_bits, rest = divmod(32 * num_words, num_outputs)
    if rest or not 1 <= num_bits <= 8:
        raise ValueError(f"{num_outputs} zero points do not fill {num_words} words")
    return num_bits


def _gptq_integers(parts: Parts, quantization: QuantizationConfig) -> tuple[Tensor, Tensor]:
    """Return numbers, ``[out, in]``, and zero points, ``[groups, out]``, both unpacked."""
    qweight, scales, num_bits = parts["qweight"], parts["scales"], _bits_by_zeros(parts)
    num_columns = qweight.shape[0] * 32 // num_bits
    numbers = _unpack(qweight.T.contiguous(), num_bits, num_columns)
    zero_points = _unpack(parts["qzeros"], num_bits, scales.shape[1])
    return numbers, zero_points + quantization.zero_point_offset


def _gptq(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Unpack transposed integers with zero points."""
    numbers, zero_points = _gptq_integers(parts, quantization)
    columns = parts.get("g_idx")
    if columns is None:
        columns = _groups_of(numbers.shape[1], len(parts["scales"]), quantization)
    return _scaled(numbers, parts["scales"].T, zero_points.T, columns)


def _groups_of(size: int, num_groups: int, quantization: QuantizationConfig) -> Tensor:
    """Compute each column's group, ``[size]``, for layers without a tensor of groups.

    If a layer's group size differs from the configured one, all its groups have equal sizes.
    """
    wanted = quantization.group_size or size
    if -(-size // wanted) != num_groups:
        wanted, rest = divmod(size, num_groups)
        if rest or (num_groups > 1 and wanted & (wanted - 1)):
            raise ValueError(f"{num_groups} groups of {size} columns: the group size is unknown")
    return torch.arange(size) // wanted


def _keep_gptq(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return the integers if each group is a run of adjacent columns, else None."""
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
    """Unpack a weight's integers, ``[in, out]``, and its zero points, ``[groups, out]``.

    The checkpoint packs both along the output dimension: a word has eight adjacent integers, in
    AWQ's order.
    """

    def in_order(words: Tensor) -> Tensor:
        numbers = _unpack(words, _bits_by_zeros(parts), parts["scales"].shape[1])
        return numbers.view(len(words), -1, 8)[:, :, _AWQ_PLACES].flatten(1)

    return in_order(parts["qweight"]), in_order(parts["qzeros"])


def _awq(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Unpack AWQ's transposed integers with zero points."""
    numbers, zero_points = _awq_integers(parts, quantization)
    columns = _groups_of(len(numbers), len(parts["scales"]), quantization)
    return _scaled(numbers.T, parts["scales"].T, zero_points.T, columns)


def _keep_awq(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    numbers, zero_points = _awq_integers(parts, quantization)
    num_bits, scales = _bits_by_zeros(parts), parts["scales"].T
    middle = 1 << (num_bits - 1)
    return _integers_in_groups(num_bits, numbers.T - middle, scales, zero_points.T - middle)


def _modelopt(parts: Parts, quantization: QuantizationConfig) -> Tensor:
    """Return the numbers of a weight in one of ModelOpt's formats, which differ in their dtypes.

    If inputs have to be scaled before the product (``pre_quant_scale``), the weight's columns are
    scaled instead.
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
    """Reshape ``[rows, 1, columns, 1]`` to ``[rows, columns]``; return other shapes unchanged."""
    return scale[:, 0, :, 0] if scale.dim() == 4 and scale.shape[1::2] == (1, 1) else scale


def _pairs_of_rows(packed: Tensor) -> Tensor:
    """Unpack bytes of two 4-bit integers of adjacent outputs, low half first."""
    signed = torch.stack([packed << 4, packed], dim=1).view(torch.int8) >> 4
    return signed.flatten(0, 1)


def _keep_modelopt(parts: Parts, quantization: QuantizationConfig) -> GroupedIntegers | None:
    """Return ModelOpt's int8 per row, MXFP4, or grouped 4-bit integers, as grouped integers."""
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
    """Dequantize e2m1 in groups of 16, with e4m3 scales times one float32 scale."""
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

# To add a format, add one line here, and the functions that it names.
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
