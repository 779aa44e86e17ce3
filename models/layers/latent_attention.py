"""Latent attention of one decoder layer: the cache keeps one vector per token for all heads.

Keys and values are never computed from latents. Instead, the query is multiplied by the key matrix,
and the weighted sum of latents by the value matrix (DeepSeek-AI, arXiv:2405.04434, section 2.1.2).
Refuses to know: how the backend attends, which requests there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton_kernels.attention.base import AttentionOptions, as_keys_and_values
from models.base import ForwardContext, Rotations
from models.layers.computing import Computing
from models.layers.linear import keep_inputs, keep_outputs
from models.layers.norm import RMSNorm
from models.parallel.shards import Rank, Span, scaled
from models.recipe import LatentSpec

# Epsilon of the norms between low-rank projections. As in transformers, `rms_norm_eps` of
# config.json does not apply to these norms.
_EPS = 1e-6


class LatentProjection(nn.Linear):
    """The projection of latents to keys and values: ``kv_b_proj`` of a checkpoint.

    Args:
        num_heads: number of heads; each has rows for its key, then rows for its value.
        rank: size of a latent.
        key_dim: size of a head's key without the rotated part, which latents do not contain.
        value_dim: size of a head's value.
    """

    def __init__(self, num_heads: int, rank: int, key_dim: int, value_dim: int) -> None:
        super().__init__(rank, num_heads * (key_dim + value_dim), bias=False)
        self._sizes = (num_heads, key_dim, value_dim, rank)

    def keep_heads(self, heads: Span) -> None:
        """Keep only the heads of one rank; call before weights are loaded."""
        _, key_dim, value_dim, rank = self._sizes
        keep_outputs(self, scaled(heads, key_dim + value_dim))
        self._sizes = (heads[1] - heads[0], key_dim, value_dim, rank)

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Split a weight ``[out_features, rank]`` into matrices of keys and of values.

        Each is ``[num_heads, dim, rank]``.
        """
        num_heads, key_dim, value_dim, rank = self._sizes
        heads = weight.view(num_heads, key_dim + value_dim, rank)
        return heads[:, :key_dim], heads[:, key_dim:]

    def absorb(self, query: Tensor, out: Tensor) -> None:
        """Multiply ``[num_tokens, num_heads, key_dim]`` by the key matrices; write to ``out``."""
        out.copy_(torch.einsum("thk,hkr->thr", query, self.parts(self.weight)[0]))

    def expand(self, attended: Tensor, out: Tensor) -> None:
        """Multiply ``[num_tokens, num_heads, rank]`` by the value matrices; write to ``out``."""
        out.copy_(torch.einsum("thr,hvr->thv", attended, self.parts(self.weight)[1]))


class PackedLatentProjection(Computing):
    """A ``LatentProjection`` on a CPU, with both matrices packed.

    Args:
        keys: the transposed key matrices: ``num_heads * rank`` outputs, ``key_dim`` inputs.
        values: the value matrices: ``num_heads * value_dim`` outputs, ``rank`` inputs.
    """

    def __init__(self, keys: ops.PackedWeight, values: ops.PackedWeight) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        # parameters, so that counts of a model's memory include the panels
        self.keys = nn.Parameter(keys.panels, requires_grad=False)
        self.values = nn.Parameter(values.panels, requires_grad=False)

    @property
    def packed(self) -> tuple[ops.PackedWeight, ops.PackedWeight]:
        """Return the packed matrices of keys and of values."""
        return self._keys, self._values

    def absorb(self, query: Tensor, out: Tensor) -> None:
        """Multiply ``[num_tokens, num_heads, key_dim]`` by the key matrices; write to ``out``."""
        self.ops.grouped_packed_linear(query, self._keys, out)

    def expand(self, attended: Tensor, out: Tensor) -> None:
        """Multiply ``[num_tokens, num_heads, rank]`` by the value matrices; write to ``out``."""
        self.ops.grouped_packed_linear(attended, self._values, out)


class LatentAttention(Computing):
    """Multi-head latent attention (MLA) of one decoder layer.

    Args:
        spec: shape of the layer.
        hidden_size: size of input and output.
        layer_index: index of this layer in the KV cache.
    """

    def __init__(self, spec: LatentSpec, hidden_size: int, layer_index: int) -> None:
        super().__init__()
        self._spec, self._layer_index, self._num_heads = spec, layer_index, spec.num_heads
        hidden, bias, rank = hidden_size, spec.bias, spec.kv_lora_rank
        query_size = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        if spec.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, spec.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, _EPS)
            self.q_b_proj = nn.Linear(spec.q_lora_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, spec.width, bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, _EPS)
        self.kv_b_proj: LatentProjection | PackedLatentProjection = LatentProjection(
            spec.num_heads, rank, spec.qk_nope_head_dim, spec.v_head_dim
        )
        self.o_proj = nn.Linear(spec.num_heads * spec.v_head_dim, hidden, bias=bias)

    can_share = True

    def shard(self, rank: Rank) -> None:
        """Keep this rank's heads; call before weights are loaded.

        Every rank computes and stores all latents, because all heads read the same latents.
        """
        spec = self._spec
        heads = rank.span(self._num_heads)
        query = scaled(heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        keep_outputs(self.q_proj if spec.q_lora_rank is None else self.q_b_proj, query)
        assert isinstance(self.kv_b_proj, LatentProjection)
        self.kv_b_proj.keep_heads(heads)
        keep_inputs(self.o_proj, scaled(heads, spec.v_head_dim), adds_bias=rank.rank == 0)
        self._num_heads = heads[1] - heads[0]

    def forward(self, hidden: Tensor, rotations: Rotations, context: ForwardContext) -> Tensor:
        """Attend for all tokens of the step.

        Args:
            hidden: ``[num_tokens, hidden_size]``, normalized.
            rotations: cosines and sines of the step for each RoPE; the first is used.
            context: the step; this layer's cache is ``[num_blocks, block_size, width]``.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        spec, (cos, sin) = self._spec, rotations[0]
        rank, nope = spec.kv_lora_rank, spec.qk_nope_head_dim
        attention, backend, cache = context.layer(self._layer_index)
        heads = self._queries(hidden)  # [num_tokens, num_heads, nope + rope]
        shape = heads.shape[:2]
        query = heads.new_empty(*shape, spec.width)
        self.kv_b_proj.absorb(heads[..., :nope], query[..., :rank])
        self.ops.norm_rotary_store_latent(
            *(heads[..., nope:], self.kv_a_proj_with_mqa(hidden), cos, sin),
            *(cache, attention.slot_mapping),
            weight=self.kv_a_layernorm.weight,
            eps=_EPS,
            interleaved=spec.rope_interleave,
            out=query[..., rank:],
        )
        options = AttentionOptions(spec.scale, value_dim=rank)
        # [num_tokens, num_heads, rank]
        attended = backend.run(query, as_keys_and_values(cache), attention, options)
        values = heads.new_empty(*shape, spec.v_head_dim)
        self.kv_b_proj.expand(attended, values)
        out: Tensor = self.o_proj(values.flatten(1))
        return out

    def _queries(self, hidden: Tensor) -> Tensor:
        if self._spec.q_lora_rank is None:
            queries: Tensor = self.q_proj(hidden)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return queries.view(len(hidden), self._num_heads, -1)
