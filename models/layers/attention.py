"""Self-attention of a decoder layer: projections, rotation, storing in the paged cache, attention.

Refuses to know: how the backend attends, which requests there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton_kernels.attention.base import AttentionOptions
from models.base import ForwardContext, Rotations
from models.layers.computing import Computing
from models.layers.linear import (
    HeadsInPairs,
    HeadsWithGates,
    JoinedLinear,
    KeysAsValues,
    keep_elements,
    keep_inputs,
    keep_outputs,
)
from models.layers.norm import RMSNorm
from models.parallel.shards import Rank, scaled
from models.recipe import AttentionSpec


class Attention(Computing):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    Args:
        spec: shape and options of the attention.
        hidden_size: size of input and output.
        eps: epsilon of the norms of queries and keys.
        layer_index: index of this layer in the KV cache.

    Attributes:
        k_scale: scale of keys in a float8 cache; 1 if the checkpoint has no scale.
        v_scale: scale of values in a float8 cache; 1 if the checkpoint has no scale.
        value_weight: ``[head_dim]``, all ones, because the norm of values has no weight;
            None: values are not normalized.
    """

    value_weight: Tensor | None

    def __init__(self, spec: AttentionSpec, hidden_size: int, eps: float, layer_index: int) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        self.can_share = not spec.qk_norm_of_all_heads  # this norm needs all ranks' heads
        self._eps = eps
        self._scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._soft_cap = spec.soft_cap
        self._rotation = spec.rotation
        self._sliding_window = spec.window
        self._num_kv_heads, self._has_own_kv = spec.num_kv_heads, spec.kv_distance is None
        # If this layer has no keys and values of its own: the layer whose keys and values it reads.
        # The layer is in a tuple, because torch would register a module in an attribute.
        self._source: tuple[Attention, ...] = ()
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._has_gate = spec.output_gate
        self.qkv_proj = make_joined_projection(spec, hidden_size)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=spec.output_bias)
        self.k_scale = self.v_scale = 1.0
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm or spec.qk_norm_of_all_heads:
            sizes = (query_size, kv_size) if spec.qk_norm_of_all_heads else (spec.head_dim,) * 2
            self.q_norm, self.k_norm = (RMSNorm(size, eps, spec.norm_weight) for size in sizes)
        ones = torch.ones(spec.head_dim, device="cpu") if spec.value_norm else None
        if not self._has_own_kv:
            self.k_norm = ones = None
        self.register_buffer("value_weight", ones, persistent=False)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.sinks else None

    def shard(self, rank: Rank) -> None:
        """Keep this rank's heads; call before weights are loaded."""
        heads, kv_heads = rank.heads(self._num_heads, self._num_kv_heads)
        query, kv = scaled(heads, self._head_dim), scaled(kv_heads, self._head_dim)
        own = (kv, kv) if self._has_own_kv else ()
        keep_outputs(self.qkv_proj, query, *own, *((query,) if self._has_gate else ()))
        keep_inputs(self.o_proj, query, adds_bias=rank.rank == 0)
        if self.sinks is not None:
            keep_elements(self, "sinks", heads)
        self._num_heads = heads[1] - heads[0]

    def read_kv_of(self, source: Attention) -> None:
        """Read the keys and values, and their scales, of an earlier layer."""
        self._source = (source,)

    def keep_loaded(self, sinks: Tensor) -> Tensor:
        """Convert a checkpoint's sinks, ``[num_heads]``, to the dtype that the layer keeps."""
        return sinks.float()

    def forward(self, hidden: Tensor, rotations: Rotations, context: ForwardContext) -> Tensor:
        """Attend for all tokens of the step.

        Args:
            hidden: ``[num_tokens, hidden_size]``, normalized.
            rotations: cosines and sines of the step for each RoPE; ``spec.rotation`` chooses one.
            context: the step's forward context.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        cos, sin = rotations[self._rotation]
        # kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]
        attention, backend, kv_cache = context.layer(self._layer_index)
        [owner] = self._source or (self,)
        k_scale, v_scale = owner.k_scale, owner.v_scale
        if kv_cache.dtype != ops.FP8:
            k_scale = v_scale = 1.0
        projected = self.qkv_proj(hidden)  # [num_tokens, heads, and gates if any]
        query = self.ops.norm_rotary_store(
            projected,
            self._num_heads,
            cos,
            sin,
            kv_cache,
            attention.slot_mapping if self._has_own_kv else None,
            query_weight=None if self.q_norm is None else self.q_norm.weight,
            key_weight=None if self.k_norm is None else self.k_norm.weight,
            value_weight=self.value_weight,
            eps=self._eps,
            key_scale=k_scale,
            value_scale=v_scale,
        )  # [num_tokens, num_heads, head_dim]
        options = AttentionOptions(
            self._scale * k_scale, self._sliding_window, self._soft_cap, sinks=self.sinks
        )
        # [num_tokens, num_heads, head_dim]
        attended = backend.run(query, kv_cache, attention, options)
        if v_scale != 1.0:
            attended = attended * v_scale
        mixed = attended.flatten(1)  # [num_tokens, num_heads * head_dim]
        if self._has_gate:
            mixed = self.ops.gate_mul(projected[:, -mixed.shape[1] :], mixed, "sigmoid")
        out: Tensor = self.o_proj(mixed)
        return out


def make_joined_projection(spec: AttentionSpec, num_inputs: int) -> JoinedLinear:
    """Make the fused projection of queries, keys, values and, if the layer has gates, gates."""
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts, bias = {"q_proj": query_size}, spec.qkv_bias
    if spec.kv_distance is None:
        parts |= {"k_proj": kv_size, "v_proj": kv_size}
    if spec.output_gate:
        return HeadsWithGates(num_inputs, parts, spec.head_dim, bias=bias)
    if spec.pair_dims is not None:
        head = (spec.head_dim, spec.pair_dims)
        return HeadsInPairs(num_inputs, parts, ("q_proj", "k_proj"), *head, bias=bias)
    if spec.values_from_keys:
        return KeysAsValues(num_inputs, parts, bias=bias)
    return JoinedLinear(num_inputs, parts, bias=bias, stored_joined=spec.stored_joined)
