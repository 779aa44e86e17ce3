"""Self-attention of one decoder layer: project, rotate, store in the paged cache, attend, project.

Refuses to know: how the backend attends, which requests there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import baton_kernels as ops
from models.base import ForwardContext, Rotations
from models.config import ModelConfig
from models.layers.linear import (
    HeadsInPairs,
    HeadsWithGates,
    JoinedLinear,
    keep_elements,
    keep_inputs,
    keep_outputs,
)
from models.layers.norm import NormWeight, RMSNorm
from models.parallel.shards import Rank, scaled


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The differences between the architectures' attention layers."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head, before the rotation
    qk_norm_of_all_heads: bool = False  # that norm is over all heads of a token together
    norm_weight: NormWeight = NormWeight.OWN
    scale: float | None = None  # of dot products; None: head_dim ** -0.5
    soft_cap: float | None = None  # see AttentionBackend.run
    sinks: bool = False  # a learned sink for each head
    output_gate: bool = False  # a sigmoid on each result's number, of the query's projection
    stored_joined: bool = False  # checkpoints have query, key and value joined
    stored_in_pairs: bool = False  # their heads turn by neighbours; not joined


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    Args:
        config: the model's shape.
        options: the architecture's variant.
        layer_index: which layer of the cache is this one's.
        sliding_window: see ``AttentionBackend.run``.
        rotation: which of the step's rotations is this layer's.

    Attributes:
        k_scale: scale of keys in a float8 cache, from the checkpoint if it has one.
        v_scale: scale of values in a float8 cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: AttentionOptions,
        layer_index: int,
        sliding_window: int | None,
        rotation: int = 0,
    ) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self.can_share = not options.qk_norm_of_all_heads  # which would need all ranks' heads
        self._eps = config.rms_norm_eps
        self._scale = config.head_dim**-0.5 if options.scale is None else options.scale
        self._soft_cap = options.soft_cap
        self._rotation = rotation
        self._sliding_window = sliding_window
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj: JoinedLinear
        self._has_gate = options.output_gate
        if options.output_gate:
            self.qkv_proj = HeadsWithGates(
                config.hidden_size, parts, config.head_dim, bias=options.qkv_bias
            )
        elif options.stored_in_pairs:
            head = (config.head_dim, config.rope.rotary_dim(config.head_dim))
            self.qkv_proj = HeadsInPairs(
                config.hidden_size, parts, ("q_proj", "k_proj"), *head, bias=options.qkv_bias
            )
        else:
            joined, bias = options.stored_joined, options.qkv_bias
            self.qkv_proj = JoinedLinear(config.hidden_size, parts, bias=bias, stored_joined=joined)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=options.output_bias)
        self.k_scale = self.v_scale = 1.0
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm or options.qk_norm_of_all_heads:
            sizes = (
                (query_size, kv_size) if options.qk_norm_of_all_heads else (config.head_dim,) * 2
            )
            self.q_norm, self.k_norm = (
                RMSNorm(size, config.rms_norm_eps, options.norm_weight) for size in sizes
            )
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if options.sinks else None

    def shard(self, rank: Rank) -> None:
        """See ``Shareable``: each rank keeps some heads."""
        kv_size = self.qkv_proj.part_sizes[1]
        heads, kv_heads = rank.heads(self._num_heads, kv_size // self._head_dim)
        query, kv = scaled(heads, self._head_dim), scaled(kv_heads, self._head_dim)
        keep_outputs(self.qkv_proj, query, kv, kv, *((query,) if self._has_gate else ()))
        keep_inputs(self.o_proj, query, adds_bias=rank.rank == 0)
        if self.sinks is not None:
            keep_elements(self, "sinks", heads)
        self._num_heads = heads[1] - heads[0]

    def keep_loaded(self, sinks: Tensor) -> Tensor:
        """Return what is kept of a checkpoint's sinks ``[num_heads]``."""
        return sinks.float()

    def forward(self, hidden: Tensor, rotations: Rotations, context: ForwardContext) -> Tensor:
        """Attend for all tokens of the step.

        Args:
            hidden: ``[num_tokens, hidden_size]``, normalized.
            rotations: the step's rotations; the layer picks its own.
            context: the step.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        cos, sin = rotations[self._rotation]
        # kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]
        attention, backend, kv_cache = context.layer(self._layer_index)
        k_scale, v_scale = self.k_scale, self.v_scale
        if kv_cache.dtype != ops.FP8:
            k_scale = v_scale = 1.0
        projected = self.qkv_proj(hidden)  # [num_tokens, heads and, perhaps, gates]
        query = ops.norm_rotary_store(
            projected,
            self._num_heads,
            cos,
            sin,
            kv_cache,
            attention.slot_mapping,
            query_weight=None if self.q_norm is None else self.q_norm.weight,
            key_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self._eps,
            key_scale=k_scale,
            value_scale=v_scale,
        )  # [num_tokens, num_heads, head_dim]
        attended = backend.run(
            query,
            kv_cache,
            attention,
            scale=self._scale * k_scale,
            sliding_window=self._sliding_window,
            soft_cap=self._soft_cap,
            sinks=self.sinks,
        )  # [num_tokens, num_heads, head_dim]
        if v_scale != 1.0:
            attended = attended * v_scale
        mixed = attended.flatten(1)  # [num_tokens, num_heads * head_dim]
        if self._has_gate:
            mixed = ops.gate_mul(projected[:, -mixed.shape[1] :], mixed, "sigmoid")
        out: Tensor = self.o_proj(mixed)
        return out
