"""Factors: an adapter's two matrices for one layer, with rows in the checkpoint's order.

Refuses to know: layers of Baton's models, how products are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.adapters.modules import AdaptedModule, Adapter, AdapterTensor, Layout
from baton.checkpoint.gguf.architecture import Change
from models.config import ModelConfig
from models.loading.gguf_changes import changed, needed

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The product ``b @ a`` that is added to a layer's weight.

    Attributes:
        module: the adapter's module that holds the two matrices.
        a: ``[rank, inputs]``, of any floating dtype; float32 if there is a magnitude.
        b: ``[outputs, rank]``, of any floating dtype, already multiplied by the adapter's scale.
        magnitude: ``[outputs]`` float32, norms of the adapted weight's rows; None: no DoRA.
    """

    module: AdaptedModule
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None


def read_factors(adapter: Adapter, module: AdaptedModule, config: ModelConfig) -> list[Factors]:
    """Read the factors of one layer; for stacked experts, the factors of each expert.

    Args:
        config: the base model's configuration, which tells how to undo the row order of GGUF files.
    """
    a, b = _stored(adapter, module.a), _stored(adapter, module.b)
    if module.scale != 1.0:
        b = b.float() * module.scale
    if module.magnitude is not None:
        magnitude = _stored(adapter, module.magnitude)
        return [Factors(module, a.float(), b.float(), magnitude.float())]
    experts = module.num_experts or 1
    if module.layout is Layout.TURNED:
        a = a.t()
    elif module.layout is Layout.EXPERTS_IN_ROWS:
        a = a.view(experts, module.rank, -1)
        b = b.view(-1, module.rank, experts).permute(2, 0, 1)
    if a.dim() == 2:
        a, b = a.unsqueeze(0), b.unsqueeze(0)
    changes = needed(module.changes, config)
    of_a = [change for change in changes if change is Change.VALUE_COLUMNS]
    of_b = [change for change in changes if change is not Change.VALUE_COLUMNS]
    return [
        Factors(module, changed(one, of_a, config), changed(other, of_b, config))
        for one, other in zip(a, b, strict=True)
    ]


def _stored(adapter: Adapter, tensor: AdapterTensor) -> Tensor:
    """Return one of an adapter's tensors in torch, without a copy."""
    numbers = torch.frombuffer(adapter.data[tensor.name], dtype=_DTYPES[tensor.dtype])
    return numbers.view(tensor.shape)
