"""Experts that a checkpoint keeps fused, as the tensors of one expert each that others keep.

    mlp.experts.gate_up_proj [experts, 2 * size, hidden]  ──  mlp.experts.0.gate_proj.weight, ...
    mlp.experts.down_proj    [experts, hidden, size]      ──  mlp.experts.0.down_proj.weight, ...

Refuses to know: modules, how tensors are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from baton.api.errors import ModelLoadError
from models.loading.stored_weights import StoredTensor

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def split_fused_experts(
    tensors: Mapping[str, StoredTensor], num_experts: int, rename: Callable[[str], str]
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors, by name, those that are fused as parts that are read alone.

    Where experts are fused, names are those of the modules of ``transformers``, not of checkpoints.

    Args:
        tensors: by name.
        num_experts: of each layer that has some.
        rename: makes a checkpoint's name of a module's.
    """
    if not any(name.endswith((_GATE_UP, _DOWN)) for name in tensors):
        return dict(tensors)
    parts = (part for stored in tensors.values() for part in _parts(stored, num_experts))
    return {rename(part.name): part for part in parts}


def _parts(stored: StoredTensor, num_experts: int) -> Iterator[StoredTensor]:
    name, kind = stored.name, stored.name[stored.name.rfind(".experts.") :]
    if kind not in (_GATE_UP, _DOWN):
        yield stored
        return
    prefix = name.rpartition(".")[0]
    halves = {"down_proj": None} if kind == _DOWN else {"gate_proj": 0, "up_proj": 1}
    for expert in range(num_experts):
        for part, half in halves.items():
            read = functools.partial(_read, stored, num_experts, expert, half)
            yield StoredTensor(
                stored.path, f"{prefix}.{expert}.{part}.weight", read, stored.is_mapped
            )


def _read(stored: StoredTensor, num_experts: int, expert: int, half: int | None) -> Tensor:
    tensor = stored.read()
    if tensor.dim() != 3 or len(tensor) != num_experts or (half is not None and len(tensor[0]) % 2):
        problem = f"shape {list(tensor.shape)}, but config.json means {num_experts} experts"
        raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")
    rows = tensor[expert]
    return rows if half is None else rows.chunk(2)[half]
