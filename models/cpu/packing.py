"""After loading, on a CPU: every linear layer's weight into the form that its kernels stream.

Refuses to know: architectures, files, how a packed product is computed.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton_kernels import WeightFormat
from baton_kernels.dispatch import native_ops
from models.architectures.decoder import DecoderForCausalLM
from models.base import CausalLM
from models.cpu.decode_tapes import DecodeTapes
from models.layers.linear import GatedLinear, PackedLinear

logger = logging.getLogger(__name__)

_MIB = 2**20
_ROWS = 1024  # of a weight, that are looked at together


def pack_for_cpu(model: CausalLM, weights: str) -> None:
    """Replace the linear layers of a loaded model by packed ones, one at a time.

    The original of each is freed before the next is packed. An embedding that is the head too
    (tied) stays, and the head gets a packed copy of its own; the log says what it costs. Where
    there are no native kernels and no other format is asked for, nothing is done.

    Args:
        model: on the CPU.
        weights: ``auto`` (as the checkpoint has them, if that is exact, else as loaded), or a
            ``WeightFormat``. With ``int4`` the head has 8 bits: of all layers it loses most.
    """
    assert isinstance(model, DecoderForCausalLM)
    embedding = model.model.embed_tokens.weight
    native = native_ops()
    asked = None if weights == "auto" else WeightFormat(weights)
    if asked is None and (native is None or WeightFormat.of(embedding.dtype) is None):
        return
    width = 16 if native is None else native.panel_width
    formats = Counter[WeightFormat]()

    def packed(linear: nn.Linear | nn.Embedding, wanted: WeightFormat | None) -> PackedLinear:
        bias = linear.bias if isinstance(linear, nn.Linear) else None
        prepare = [] if native is None else [native.prefer_huge_pages]
        format_ = wanted or _exact_format(linear.weight)
        formats[format_] += 1
        weight = ops.PackedWeight.pack(linear.weight, bias, format_, width, *prepare)
        return PackedLinear(weight, gated=isinstance(linear, GatedLinear))

    head = WeightFormat.INT8 if asked == WeightFormat.INT4 else asked
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, packed(child, head if child is model.lm_head else asked))
    if model.lm_head is None:
        model.lm_head = packed(model.model.embed_tokens, head)
        size = sum(tensor.numel() * tensor.itemsize for tensor in model.lm_head.parameters())
        logger.info("the tied output head has a packed copy of its own: %.0f MiB", size / _MIB)
    if native is not None:
        model.model.tapes = DecodeTapes(native)
    kinds = ", ".join(f"{count} x {format_.value}" for format_, count in formats.items())
    logger.info("linear layers packed for this CPU: %s", kinds)


def _exact_format(weight: Tensor) -> WeightFormat:
    """Return the smallest format that keeps every number: products of it are the same, to the bit.

    A checkpoint in bfloat16 that is computed with in float32 takes half of the memory so.
    """
    found = WeightFormat.of(weight.dtype)
    assert found is not None
    if found == WeightFormat.FP32 and all(
        torch.equal(rows.bfloat16().float(), rows) for rows in torch.split(weight, _ROWS)
    ):
        return WeightFormat.BF16
    return found
