"""Splits tensors that hold all experts of a layer into one tensor per expert and projection.

    mlp.experts.gate_up_proj [experts, 2 * size, hidden]  ──  mlp.experts.0.gate_proj.weight, ...
    mlp.experts.down_proj    [experts, hidden, size]      ──  mlp.experts.0.down_proj.weight, ...

In gpt-oss, the axis of inputs comes before the axis of outputs, rows of gates and ups alternate,
and there are biases. In MXFP4, blocks and scales take the place of the weight:

    mlp.experts.gate_up_proj        [experts, hidden, 2 * size]
    mlp.experts.gate_up_proj_blocks [experts, 2 * size, hidden / 32, 16 bytes]
    mlp.experts.gate_up_proj_scales [experts, 2 * size, hidden / 32]
    mlp.experts.gate_up_proj_bias   [experts, 2 * size]

Published files of Qwen3-VL have the inputs before the outputs, and gates before ups. Files that
transformers 5 saves are as in the first table:

    mlp.experts.gate_up_proj [experts, hidden, 2 * size]
    mlp.experts.down_proj    [experts, size, hidden]

In Granite 4, fused experts are stored as in the first table, under other names:

    block_sparse_moe.input_linear.weight, block_sparse_moe.output_linear.weight

Refuses to know: modules, how tensors are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton_kernels import GroupedIntegers
from models.loading.fp4 import mxfp4, mxfp4_integers
from models.loading.stored_weights import StoredTensor, release_pages

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
# Fused tensor -> one expert's projections, and the half of the outputs that each has; None: all.
_PARTS: Mapping[str, Mapping[str, int | None]] = {
    _GATE_UP: {"gate_proj": 0, "up_proj": 1},
    _DOWN: {"down_proj": None},
}
_LINEARS = {
    ".block_sparse_moe.input_linear.weight": _GATE_UP,
    ".block_sparse_moe.output_linear.weight": _DOWN,
}
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


def split_fused_experts(
    tensors: Mapping[str, StoredTensor],
    num_experts: int,
    rename: Callable[[str], str],
    *,
    by_turns: bool = False,
    as_linears: bool = False,
    sizes: tuple[int, int] | None = None,
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by name; split fused tensors into one per expert.

    Fused tensors have the names of modules in ``transformers``; the other tensors may have a
    checkpoint's own names.

    Args:
        tensors: tensors by name.
        num_experts: number of experts in each layer with experts.
        rename: turns a parameter's name in Baton's model into the checkpoint's name.
        by_turns: whether fused experts are stored as in gpt-oss.
        as_linears: whether fused experts are stored as in Granite 4.
        sizes: the experts' input and intermediate size, if fused experts may be stored in both
            ways of Qwen3-VL.
    """
    # The text part of a model that reads images has other names in the file.
    tensors = {name: replace(one, name=name) for name, one in tensors.items()}
    if as_linears:
        tensors = {one.name: one for one in map(_renamed, tensors.values())}
    if by_turns:
        parts = (part for one in tensors.values() for part in _by_turns(one, tensors, num_experts))
    elif any(name.endswith((_GATE_UP, _DOWN)) for name in tensors):
        read_part = _read_turned if sizes and _have_inputs_first(tensors, *sizes) else _read
        parts = (part for one in tensors.values() for part in _parts(one, num_experts, read_part))
    else:
        return dict(tensors)
    return {rename(part.name): part for part in parts}


def _renamed(stored: StoredTensor) -> StoredTensor:
    for theirs, ours in _LINEARS.items():
        if stored.name.endswith(theirs):
            return replace(stored, name=stored.name.removesuffix(theirs) + ".mlp" + ours)
    return stored


def _have_inputs_first(tensors: Mapping[str, StoredTensor], hidden: int, inner: int) -> bool:
    """Return whether inputs precede outputs in fused tensors; square ones do not tell."""
    shapes = {_GATE_UP: (hidden, 2 * inner), _DOWN: (inner, hidden)}
    for name, stored in tensors.items():
        inputs, outputs = shapes.get(name[name.rfind(".experts.") :], (0, 0))
        if inputs != outputs:
            return tuple(stored.read().shape[1:]) == (inputs, outputs)
    return False


def _parts(
    stored: StoredTensor, num_experts: int, read_part: Callable[..., Tensor]
) -> Iterator[StoredTensor]:
    name, kind = stored.name, stored.name[stored.name.rfind(".experts.") :]
    if kind not in _PARTS:
        yield stored
        return
    prefix = name.rpartition(".")[0]
    for expert in range(num_experts):
        for part, half in _PARTS[kind].items():
            read = functools.partial(read_part, stored, num_experts, expert, half)
            is_mapped = stored.is_mapped and read_part is _read
            yield StoredTensor(stored.path, f"{prefix}.{expert}.{part}.weight", read, is_mapped)


def _read(stored: StoredTensor, num_experts: int, expert: int, half: int | None) -> Tensor:
    rows = _expert(stored, num_experts, expert, num_dims=2)
    if half is None:
        return rows
    _check_halves(stored, len(rows))
    return rows.chunk(2)[half]


def _read_turned(stored: StoredTensor, num_experts: int, expert: int, half: int | None) -> Tensor:
    """Copy one expert's projection out of a fused weight, ``[experts, in, out]``."""
    found = _expert(stored, num_experts, expert, num_dims=2)
    outputs = found.movedim(-1, 0)
    if half is not None:
        _check_halves(stored, len(outputs))
        outputs = outputs.chunk(2)[half]
    return _copied(stored, found, outputs)


def _by_turns(
    stored: StoredTensor, tensors: Mapping[str, StoredTensor], num_experts: int
) -> Iterator[StoredTensor]:
    """Split one tensor of gpt-oss; yield nothing for scales, which are read with their blocks."""
    name = stored.name
    kind = name[name.rfind(".experts.") :]
    base = next((one for one in _PARTS if kind.startswith(one)), None)
    form = "" if base is None else kind.removeprefix(base)
    scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES) if form == _BLOCKS else None
    if form == _SCALES and name.removesuffix(_SCALES) + _BLOCKS in tensors:
        return
    if base is None or form not in ("", _BIAS, _BLOCKS) or (form == _BLOCKS and scales is None):
        yield stored
        return
    prefix, kind = name.rpartition(".")[0], "bias" if form == _BIAS else "weight"
    for expert in range(num_experts):
        for part, half in _PARTS[base].items():
            place = (num_experts, expert, half)
            part_name = f"{prefix}.{expert}.{part}.{kind}"
            if scales is None:
                read = functools.partial(_read_by_turns, stored, *place)
                yield StoredTensor(stored.path, part_name, read)
            else:
                read = functools.partial(_read_mxfp4, stored, scales, *place)
                keep = functools.partial(_keep_mxfp4, stored, scales, *place)
                yield StoredTensor(stored.path, part_name, read, read_integers=keep)


def _read_by_turns(stored: StoredTensor, num_experts: int, expert: int, half: int | None) -> Tensor:
    """Copy one expert's projection out of a fused bias or weight, ``[experts, in, out]``."""
    num_dims = 1 if stored.name.endswith(_BIAS) else 2
    found = _expert(stored, num_experts, expert, num_dims=num_dims)
    return _copied(stored, found, _every_second(stored, found.movedim(-1, 0), half))


def _read_mxfp4(
    blocks: StoredTensor, scales: StoredTensor, num_experts: int, expert: int, half: int | None
) -> Tensor:
    try:
        return mxfp4(*_mxfp4_parts(blocks, scales, num_experts, expert, half))
    except ValueError as error:
        raise ModelLoadError(f"{blocks.path}: {blocks.name}: {error}") from error


def _keep_mxfp4(
    blocks: StoredTensor, scales: StoredTensor, num_experts: int, expert: int, half: int | None
) -> GroupedIntegers | None:
    try:
        return mxfp4_integers(*_mxfp4_parts(blocks, scales, num_experts, expert, half))
    except ValueError as error:
        raise ModelLoadError(f"{blocks.path}: {blocks.name}: {error}") from error


def _mxfp4_parts(
    blocks: StoredTensor, scales: StoredTensor, num_experts: int, expert: int, half: int | None
) -> tuple[Tensor, Tensor]:
    """Copy one expert's projection out of fused MXFP4 blocks and scales.

    Returns the bytes, ``[out, in / 2]``, and the scales' exponents, ``[out, in / 32]``.
    """
    packed = _expert(blocks, num_experts, expert, num_dims=3)
    exponents = _expert(scales, num_experts, expert, num_dims=2)
    packed = _copied(blocks, packed, _every_second(blocks, packed, half)).flatten(1)
    return packed, _copied(scales, exponents, _every_second(scales, exponents, half))


def _expert(stored: StoredTensor, num_experts: int, expert: int, *, num_dims: int) -> Tensor:
    """Read one expert's slice of a fused tensor."""
    tensor = stored.read()
    if tensor.dim() != num_dims + 1 or len(tensor) != num_experts:
        problem = f"shape {list(tensor.shape)}, but config.json means {num_experts} experts"
        raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")
    return tensor[expert]


def _every_second(stored: StoredTensor, outputs: Tensor, half: int | None) -> Tensor:
    """Return the gates' (0), the ups' (1) or all (None) outputs of an expert, ``[out, ...]``."""
    if half is None:
        return outputs
    _check_halves(stored, len(outputs))
    return outputs[half::2]


def _copied(stored: StoredTensor, found: Tensor, outputs: Tensor) -> Tensor:
    """Copy outputs of an expert; release the file's pages.

    Args:
        stored: the fused tensor.
        found: the expert's slice of the fused tensor.
        outputs: a view of ``found`` in which outputs come first, ``[out, ...]``.
    """
    copy = outputs.clone(memory_format=torch.contiguous_format)
    if stored.is_mapped:
        release_pages(found)
    return copy


def _check_halves(stored: StoredTensor, num_outputs: int) -> None:
    if num_outputs % 2:
        problem = f"{num_outputs} outputs, which are no gates and as many ups"
        raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")
