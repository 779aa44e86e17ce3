"""After loading, on a CPU: every linear layer's weight into the form that its kernels stream.

Refuses to know: architectures, files, how a packed product is computed.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

import baton_kernels as ops
from baton_kernels.dispatch import native_ops
from models.architectures.decoder import DecoderForCausalLM
from models.base import CausalLM
from models.cpu.decode_tapes import DecodeTapes
from models.layers.linear import GatedLinear, PackedLinear

logger = logging.getLogger(__name__)

STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_MIB = 2**20


def pack_for_cpu(model: CausalLM, weights: str) -> None:
    """Replace the linear layers of a loaded model by packed ones, one at a time.

    The original of each is freed before the next is packed. An embedding that is the head too
    (tied) stays, and the head gets a packed copy of its own; the log says what it costs. Where
    there are no native kernels and no other storage is asked for, nothing is done.

    Args:
        model: on the CPU.
        weights: ``auto`` (as loaded), or a key of ``STORAGE``.
    """
    assert isinstance(model, DecoderForCausalLM)
    embedding = model.model.embed_tokens.weight
    native = native_ops()
    storage = embedding.dtype if weights == "auto" else STORAGE[weights]
    if (native is None and storage == embedding.dtype) or storage not in STORAGE.values():
        return
    width = 16 if native is None else native.panel_width

    def packed(linear: nn.Linear | nn.Embedding) -> PackedLinear:
        bias = linear.bias if isinstance(linear, nn.Linear) else None
        prepare = [] if native is None else [native.prefer_huge_pages]
        weight = ops.PackedWeight.pack(linear.weight, bias, storage, width, *prepare)
        return PackedLinear(weight, gated=isinstance(linear, GatedLinear))

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, packed(child))
    if model.lm_head is None:
        model.lm_head = packed(model.model.embed_tokens)
        size = sum(tensor.numel() * tensor.itemsize for tensor in model.lm_head.parameters())
        logger.info("the tied output head has a packed copy of its own: %.0f MiB", size / _MIB)
    if native is not None:
        model.model.tapes = DecodeTapes(native)
    kind = str(storage).removeprefix("torch.")
    logger.info("linear layers packed for this CPU, weights in %s", kind)
