"""Medusa heads: Cai et al., arXiv 2401.10774.

Head i (from 0) reads the target model's state of a token, and drafts the token i + 2 positions
later:

    logits_i = W_i (h + silu(A_i h + b_i))       one or more residual blocks in sequence

Reads checkpoints in the authors' layout (``0.0.linear.weight``, ``0.1.weight``) and in vLLM's
(``blocks.0.layers.0.weight``, ``lm_heads.0.weight``). Heads without a matrix ``W`` use the target
model's output head.
"""

from __future__ import annotations

import re
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional

from baton.api.errors import ModelLoadError
from models.base import CausalLM
from models.drafters.loading import DrafterSource, check_shape

_BLOCK = re.compile(
    r"(?:medusa_head\.)?(?:(\d{1,4})\.(\d{1,4})\.linear|blocks\.(\d{1,4})\.layers\.(\d{1,4}))\.(weight|bias)"
)
_HEAD = re.compile(r"(?:medusa_head\.)?(?:(\d{1,4})\.(\d{1,4})|lm_heads\.(\d{1,4}))\.weight")


class MedusaHeads:
    """Medusa's heads; a ``HeadsDrafter``.

    Args:
        model: the target model, whose states the heads read.
        weights: residual blocks: ``[num_blocks, num_heads, hidden_size, hidden_size]``.
        biases: ``[num_blocks, num_heads, hidden_size]``.
        heads: the matrices W, ``[num_heads, vocab_size, hidden_size]``; None: the target model's
            output head is used.
    """

    def __init__(
        self, model: CausalLM, weights: Tensor, biases: Tensor, heads: Tensor | None
    ) -> None:
        self.num_heads = weights.shape[1]
        self._model, self._biases, self._heads = model, biases, heads
        self._weights = weights

    def draft(self, states: Tensor, num_drafts: int) -> Tensor:
        """Turn states into logits of drafts, ``[n, num_drafts, vocab_size]``."""
        num_rows, width = states.shape
        # All heads' first blocks have the same input, so one product computes them.
        joined, biases = self._weights[0, :num_drafts], self._biases[0, :num_drafts]
        products = functional.linear(states, joined.reshape(-1, width), biases.reshape(-1))
        hidden = states.unsqueeze(1) + functional.silu(products).view(num_rows, num_drafts, width)
        hidden = hidden.transpose(0, 1)  # [num_drafts, n, hidden_size]
        for weight, bias in zip(self._weights[1:], self._biases[1:], strict=True):
            products = torch.baddbmm(
                bias[:num_drafts, None], hidden, weight[:num_drafts].transpose(1, 2)
            )
            hidden = hidden + functional.silu(products)
        hidden = hidden.transpose(0, 1)  # [n, num_drafts, hidden_size]
        if self._heads is None:
            logits = self._model.compute_logits(hidden.reshape(-1, width))
            return logits.view(num_rows, num_drafts, -1)
        return torch.einsum("ndh,dvh->ndv", hidden, self._heads[:num_drafts])


def load_medusa(source: DrafterSource) -> MedusaHeads:
    """Load the drafter for ``--speculative-method medusa``."""
    blocks: dict[tuple[int, int, str], Tensor] = {}
    heads: dict[int, Tensor] = {}
    with ExitStack() as files:
        for name, stored in source.open(files).items():
            if (found := _BLOCK.fullmatch(name)) is not None:
                head, block = (int(found[i] or found[i + 2] or 0) for i in (1, 2))
                blocks[head, block, found[5]] = stored.read().to(
                    source.device, source.dtype, copy=True
                )
            elif (found := _HEAD.fullmatch(name)) is not None:
                head = int(found[1] or found[3] or 0)
                heads[head] = stored.read().to(source.device, source.dtype, copy=True)
            else:
                raise ModelLoadError(f"{source.where}: weights unknown to medusa: {name}")
    num_heads = 1 + max((head for head, _, _ in blocks), default=-1)
    num_blocks = 1 + max((block for _, block, _ in blocks), default=-1)
    hidden_size = source.model.config.hidden_size
    if not num_heads:
        raise ModelLoadError(f"{source.where}: no Medusa head is there")

    def stacked(kind: str, shape: tuple[int, ...]) -> Tensor:
        parts = []
        for block in range(num_blocks):
            for head in range(num_heads):
                part = blocks.get((head, block, kind))
                if part is None:
                    if kind == "weight":
                        raise ModelLoadError(f"{source.where}: head {head} lacks block {block}")
                    part = torch.zeros(shape, dtype=source.dtype, device=source.device)
                check_shape(source.where, f"{kind} of head {head}", part, shape)
                parts.append(part)
        return torch.stack(parts).view(num_blocks, num_heads, *shape)

    if heads and (len(heads) < num_heads or sorted(heads) != list(range(num_heads))):
        raise ModelLoadError(f"{source.where}: {num_heads} heads, and {len(heads)} output matrices")
    for matrix in heads.values():
        shape = source.model.config.vocab_size, hidden_size
        check_shape(source.where, "output matrix of a head", matrix, shape)
    return MedusaHeads(
        source.model,
        stacked("weight", (hidden_size, hidden_size)).contiguous(),
        stacked("bias", (hidden_size,)),
        torch.stack([heads[head] for head in range(num_heads)]) if heads else None,
    )
