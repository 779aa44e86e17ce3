"""Self-attention of one decoder layer: project, rotate, store in the paged cache, attend, project.

Refuses to know: how the backend attends, which requests there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import baton_kernels as ops
from models.base import ForwardContext
from models.config import ModelConfig
from models.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Where the architectures' attention layers differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head, before the rotation


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    Args:
        config: the model's shape.
        options: the architecture's variant.
        layer_index: which layer of the cache is this one's.
        sliding_window: see ``AttentionBackend.run``.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: AttentionOptions,
        layer_index: int,
        sliding_window: int | None,
    ) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._sliding_window = sliding_window
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=options.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=options.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=options.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=options.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """Attend for all tokens of the step.

        Args:
            hidden: ``[num_tokens, hidden_size]``, normalized.
            cos: ``[num_tokens, rotary_dim]``.
            sin: ``[num_tokens, rotary_dim]``.
            context: the step.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        by_head = (len(hidden), -1, self._head_dim)
        query = self.q_proj(hidden).view(by_head)  # [num_tokens, num_heads, head_dim]
        key = self.k_proj(hidden).view(by_head)  # [num_tokens, num_kv_heads, head_dim]
        value = self.v_proj(hidden).view(by_head)  # [num_tokens, num_kv_heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = ops.rotary(query, key, cos, sin)
        # kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]
        attention, backend, kv_cache = context.layer(self._layer_index)
        ops.store_kv(key, value, kv_cache, attention.slot_mapping)
        attended = backend.run(
            query,
            kv_cache,
            attention,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )  # [num_tokens, num_heads, head_dim]
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
