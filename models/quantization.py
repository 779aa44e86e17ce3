"""QuantizationConfig: how a checkpoint says that its weights are quantized.

Schemes that are not supported are refused. Refuses to know: tensors. The lists of layers that are
not quantized are not read, because each layer's tensors show how it is stored
(`models/loading/quantized_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.fields import Fields

_GPTQ_BITS, _AWQ_BITS = (2, 3, 4, 8), (4,)
_SPARSE_FORMATS = ("dense",)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Facts that are needed, besides a layer's tensors, to read quantized weights.

    Attributes:
        method: value of `quant_method`.
        block_shape: rows and columns of a block whose weights share a scale; None: no blocks.
        group_size: number of adjacent weights of a row that share a scale; the last group may be
            smaller. 0: the layer's tensors tell each column's group, or all groups have equal
            sizes.
        zero_point_offset: number to add to the stored zero points.
        rounds_inputs: whether the inputs of layers are rounded to the weights' dtype, too.
    """

    method: str
    block_shape: tuple[int, int] | None = None
    group_size: int = 0
    zero_point_offset: int = 0
    rounds_inputs: bool = False


def parse_quantization(fields: Fields, beside: Fields | None = None) -> QuantizationConfig | None:
    """Read a checkpoint's quantization; return None if its weights are not quantized.

    Args:
        fields: fields of config.json.
        beside: fields of the file `MODELOPT_FILE`; None: the folder has no such file.

    Raises:
        ModelLoadError: the scheme is not supported; the error names the field.
    """
    for name in ("quantization_config", "compression_config"):
        if not fields.has(name):
            continue
        quantization = fields.child(name)
        if _is_of_kv_cache_only(quantization):
            return None
        method = quantization.text("quant_method", "")
        if method not in _PARSERS:
            known = ", ".join(_PARSERS)
            raise quantization.wrong(
                "quant_method", f"{method!r} is not supported; supported: {known}"
            )
        for turned in ("rotation_config", "spinquant_config"):
            # Such weights were rotated, so inputs would have to be rotated, which is not supported.
            if quantization.has(turned):
                raise quantization.wrong(turned, "not supported")
        return _PARSERS[method](quantization)
    return None if beside is None else _modelopt(beside.child("quantization"))


def _is_of_kv_cache_only(quantization: Fields) -> bool:
    """Return whether the checkpoint only has scales for a float8 KV cache, and plain weights.

    compressed-tensors writes such files. The loader finds the scales, one per layer, among the
    weights.
    """
    if not quantization.has("kv_cache_scheme") or _groups(quantization):
        return False
    # ModelOpt's configuration never has groups, even if weights are quantized
    if _PARSERS.get(quantization.text("quant_method", "")) is _modelopt:
        return False
    _check_kv_cache(quantization)
    return True


def _check_kv_cache(quantization: Fields) -> None:
    if not quantization.has("kv_cache_scheme"):
        return
    scheme = quantization.child("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    alike = all(scheme.get(name) == value for name, value in wanted.items())
    if not alike or scheme.get("dynamic"):
        raise quantization.wrong(
            "kv_cache_scheme", "not supported, but for scales of an fp8 KV cache, one per layer"
        )


def _groups(quantization: Fields) -> list[Fields]:
    """Return the members of ``config_groups`` that quantize weights, inputs or outputs."""
    if not quantization.has("config_groups"):
        return []
    groups = quantization.child("config_groups")
    parts = ("weights", "input_activations", "output_activations")
    found = (groups.child(name) for name in groups.names())
    return [group for group in found if any(group.has(part) for part in parts)]


def _compressed_tensors(quantization: Fields) -> QuantizationConfig:
    """Read the scheme of compressed-tensors: weights of 1 to 8 bits.

    Static scales of inputs are ignored, because kernels compute a scale per token.
    """
    _check_kv_cache(quantization)
    for name in ("sparsity_config", "transform_config"):
        if quantization.has(name):
            child = quantization.child(name)
            if child.names() and child.get("format") not in _SPARSE_FORMATS:
                raise quantization.wrong(name, "not supported")
    blocks, groups = set[tuple[int, int]](), _groups(quantization)
    # Inputs are rounded only if all groups round inputs, because the layers of each group are not
    # read.
    rounds_inputs = bool(groups) and all(group.has("input_activations") for group in groups)
    for group in groups:
        weights = group.child("weights")
        kind = weights.text("type", "int")
        if kind not in ("int", "float"):
            raise weights.wrong("type", f"{kind!r} is not supported; supported: int, float")
        num_bits = weights.integer("num_bits")
        if num_bits not in ((4, 8) if kind == "float" else range(1, 9)):
            raise weights.wrong("num_bits", f"{num_bits} is not supported for type {kind}")
        if group.has("output_activations"):
            raise group.wrong("output_activations", "not supported")
        if weights.has("block_structure"):
            rows, columns = weights.numbers("block_structure", 2)
            blocks.add((int(rows), int(columns)))
    if len(blocks) > 1:
        raise quantization.wrong("config_groups", "blocks of more than one shape")
    block_shape = next(iter(blocks), None)
    return QuantizationConfig(
        "compressed-tensors", block_shape=block_shape, rounds_inputs=rounds_inputs
    )


def _fp8(quantization: Fields) -> QuantizationConfig:
    """Read the scheme ``fp8``: e4m3 weights with a scale per block (DeepSeek-AI,
    arXiv:2412.19437) or per weight.
    """
    if not quantization.has("weight_block_size"):
        return QuantizationConfig("fp8", rounds_inputs=True)
    rows, columns = quantization.numbers("weight_block_size", 2)
    if min(rows, columns) < 1 or rows % 1 or columns % 1:
        raise quantization.wrong("weight_block_size", f"{rows:g} x {columns:g} is no block")
    return QuantizationConfig("fp8", block_shape=(int(rows), int(columns)), rounds_inputs=True)


def _check_bits(quantization: Fields, supported: tuple[int, ...]) -> None:
    """Raise ModelLoadError if the default number of bits is not supported.

    If a layer has another number of bits, its tensors show the number.
    """
    num_bits = quantization.integer("bits")
    if num_bits not in supported:
        known = ", ".join(map(str, supported))
        raise quantization.wrong("bits", f"{num_bits} is not supported; supported: {known}")


def _gptq(quantization: Fields) -> QuantizationConfig:
    """Read the scheme GPTQ: integers with zero points (Frantar et al., arXiv:2210.17323)."""
    layout = quantization.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise quantization.wrong(
            "checkpoint_format", f"{layout!r} is not supported; supported: gptq, gptq_v2"
        )
    _check_bits(quantization, _GPTQ_BITS)
    offset = 1 if layout == "gptq" else 0  # the first version stores zero points minus 1
    return QuantizationConfig(
        "gptq", group_size=_group_size(quantization), zero_point_offset=offset
    )


def _group_size(quantization: Fields) -> int:
    """Return the group size; 0: a group is a whole row, or the file does not give the size."""
    return max(0, quantization.integer("group_size", 0, minimum=-1))


def _awq(quantization: Fields) -> QuantizationConfig:
    """Read the scheme AWQ: integers of 4 bits in groups (Lin et al., arXiv:2306.00978)."""
    layout = quantization.text("version", "gemm")
    if layout.lower() != "gemm":
        raise quantization.wrong("version", f"{layout!r} is not supported; supported: gemm")
    _check_bits(quantization, _AWQ_BITS)
    return QuantizationConfig("awq", group_size=_group_size(quantization))


def _mxfp4(quantization: Fields) -> QuantizationConfig:
    """Read the scheme MXFP4 of gpt-oss: only experts are quantized, to 4 bits."""
    return QuantizationConfig("mxfp4")


def _auto_round(quantization: Fields) -> QuantizationConfig:
    """Read the scheme AutoRound, which stores weights in another scheme's layout.

    Source: arXiv:2309.05516.
    """
    data_type = quantization.text("data_type", "int")
    _check_other_layers(quantization, data_type)
    if data_type == "fp":
        _check_bits(quantization, (_FLOAT8_BITS,))
        rounds_inputs = quantization.integer("act_bits", 16) <= _FLOAT8_BITS
        return replace(_fp8(quantization), rounds_inputs=rounds_inputs)
    name = "packing_format" if quantization.has("packing_format") else "backend"
    layout = quantization.text(name, "auto")
    if data_type in ("mx_fp", "nv_fp") and layout in ("auto", "auto_round:llm_compressor"):
        return QuantizationConfig("compressed-tensors")
    if data_type != "int":
        raise quantization.wrong("data_type", f"{data_type!r} is not supported as {layout!r}")
    if layout in _AUTO_ROUND_AWQ:
        return _awq(quantization)
    if layout not in _AUTO_ROUND_GPTQ:
        known = ", ".join((*_AUTO_ROUND_GPTQ, *_AUTO_ROUND_AWQ))
        raise quantization.wrong(name, f"{layout!r} is not supported; supported: {known}")
    _check_bits(quantization, _GPTQ_BITS)
    offset, group_size = _AUTO_ROUND_GPTQ[layout], _group_size(quantization)
    return QuantizationConfig("gptq", group_size=group_size, zero_point_offset=offset)


def _check_other_layers(quantization: Fields, data_type: str) -> None:
    """Raise ModelLoadError if a quantized layer has another data type than the default.

    The tensors of such a layer do not show the data type.
    """
    if not quantization.has("extra_config"):
        return
    others = quantization.child("extra_config")
    for layer in others.names():
        other = others.child(layer)
        if other.integer("bits", _FLOAT8_BITS) > _FLOAT8_BITS:  # this layer is not quantized
            continue
        found = other.text("data_type", data_type)
        if found != data_type:
            raise others.wrong(layer, f"data_type {found!r} beside {data_type!r} is not supported")


_FLOAT8_BITS = 8
# AutoRound's names of GPTQ layouts -> number to add to the stored zero points.
_AUTO_ROUND_GPTQ = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto", "auto_round:gptq", "auto_gptq"), 1),
    **dict.fromkeys(("auto_round:gptq:exllamav2", "gptq:exllamav2", "gptq"), 1),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "gptqmodel"), 0),
    **dict.fromkeys(("auto_round:exllamav2", "autoround:exllamav2"), 0),
}
_AUTO_ROUND_AWQ = ("auto_round:auto_awq", "auto_round:awq:gemm", "auto_round:awq", "auto_awq")


def _modelopt(quantization: Fields) -> QuantizationConfig | None:
    """Read the scheme of NVIDIA ModelOpt; return None if only the KV cache has scales."""
    _check_kv_of_modelopt(quantization)
    if not quantization.has("quant_algo"):
        return None
    algorithm = quantization.text("quant_algo").upper()
    if algorithm not in _MODELOPT:
        known = ", ".join(_MODELOPT)
        raise quantization.wrong(
            "quant_algo", f"{algorithm!r} is not supported; supported: {known}"
        )
    return QuantizationConfig(
        "modelopt", block_shape=_MODELOPT_BLOCK, rounds_inputs=_MODELOPT[algorithm]
    )


def _check_kv_of_modelopt(quantization: Fields) -> None:
    """Raise ModelLoadError if ModelOpt's format of the KV cache is not float8."""
    name = "kv_cache_quant_algo"
    if quantization.has(name) and quantization.text(name).upper() != "FP8":
        raise quantization.wrong(
            name, f"{quantization.text(name)!r} is not supported; supported: FP8"
        )
    if quantization.has("kv_cache_scheme"):
        scheme = quantization.child("kv_cache_scheme")
        if scheme.get("num_bits") != 8 or scheme.get("type") != "float" or scheme.get("dynamic"):
            raise quantization.wrong(
                "kv_cache_scheme", "not supported, but for scales of an fp8 KV cache"
            )


# ModelOpt's algorithm -> whether inputs are rounded to the weights' dtype, in which kernels then
# multiply.
_MODELOPT = {
    "FP8": True,
    "FP8_PER_CHANNEL_PER_TOKEN": True,
    "FP8_PB_WO": False,
    "NVFP4": False,
    "NVFP4_AWQ": False,
    "W4A16_NVFP4": False,
    "MXFP4": False,
    "MXFP8": False,
    "W4A16_AWQ": False,
    "W8A16": False,
    "W8A8_SQ_PER_CHANNEL": True,
    "MIXED_PRECISION": False,
}
_MODELOPT_BLOCK = (128, 128)


def _fbgemm(quantization: Fields) -> QuantizationConfig:
    """Read the scheme of Meta's FBGEMM: e4m3 weights with a scale per row."""
    return QuantizationConfig("fbgemm_fp8", rounds_inputs=True)


_PARSERS: dict[str, Callable[[Fields], QuantizationConfig | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
