"""A mixture of experts in place of a decoder layer's MLP: a router, experts, and what all share.

Refuses to know: how tokens are sorted, which checkpoint layout names what.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

import baton_kernels as ops
from models.config import ModelConfig
from models.layers.linear import (
    ExactLinear,
    JoinedLinear,
    PackedLinear,
    keep_inputs,
    keep_outputs,
)
from models.layers.mlp import GatedMLP
from models.parallel.shards import Rank


class SparseMoe(nn.Module):
    """Each token goes through few of many gated MLPs (Shazeer et al., arXiv:1701.06538).

    The weights of all experts are one parameter, so that they are packed and multiplied together.

    Args:
        config: of a model with experts.
    """

    float32_parameters: ClassVar = frozenset({"e_score_correction_bias"})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a model with experts"
        self._routing = ops.Routing(
            moe.top_k,
            ops.Scoring(moe.scoring),
            moe.normalize,
            moe.scale,
            moe.num_groups,
            moe.top_groups,
            moe.group_best,
        )
        hidden, inner, experts = config.hidden_size, moe.inner_size, range(moe.num_experts)
        self._hidden_size, self._inner_size = hidden, inner
        self.gate: nn.Module = ExactLinear(hidden, moe.num_experts, bias=moe.has_biases)
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.num_experts))
        halves = [f"experts.{expert}.{half}_proj" for expert in experts for half in ("gate", "up")]
        downs = [f"experts.{expert}.down_proj" for expert in experts]
        bias, self._activation = moe.has_biases, moe.activation
        self.gate_up: nn.Module = JoinedLinear(hidden, dict.fromkeys(halves, inner), bias=bias)
        self.down: nn.Module = JoinedLinear(inner, dict.fromkeys(downs, hidden), bias=bias)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: nn.Module | None = None
        if moe.shared_size:
            self.shared_expert = GatedMLP(hidden, moe.shared_size, bias=False)
        if moe.has_shared_gate:
            self.shared_expert_gate = ExactLinear(hidden, 1, bias=False)

    can_share = True

    def shard(self, rank: Rank) -> None:
        """See ``Shareable``: each rank keeps some of each expert's middle; all route alike."""
        assert isinstance(self.gate_up, JoinedLinear)
        assert isinstance(self.down, JoinedLinear)
        first, end = span = rank.wide_span(self._inner_size)
        keep_outputs(self.gate_up, *(span for _ in self.gate_up.part_sizes))
        keep_inputs(self.down, span, adds_bias=rank.rank == 0)
        self._inner_size = end - first
        if self.shared_expert is not None:
            self.shared_expert.shard(rank)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[num_tokens, hidden_size]`` -> ``[num_tokens, hidden_size]``."""
        ids, weights = ops.route(self.gate(x), self._routing, self.e_score_correction_bias)
        shared = None if self.shared_expert is None else self.shared_expert(x)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        if isinstance(self.gate_up, PackedLinear) and isinstance(self.down, PackedLinear):
            packed = (self.gate_up.packed, self.down.packed)
            return ops.packed_experts(
                x, ids, weights, *packed, shared, gate, activation=self._activation
            )
        assert isinstance(self.gate_up, nn.Linear)
        assert isinstance(self.down, nn.Linear)
        gate_up = self.gate_up.weight.view(-1, 2 * self._inner_size, self._hidden_size)
        down = self.down.weight.view(-1, self._hidden_size, self._inner_size)
        biases = None
        if self.gate_up.bias is not None and self.down.bias is not None:
            biases = (
                self.gate_up.bias.view(-1, 2 * self._inner_size),
                self.down.bias.view(-1, self._hidden_size),
            )
        return ops.experts(
            *(x, ids, weights, gate_up, down, shared, gate),
            biases=biases,
            activation=self._activation,
        )


def feed_forward(config: ModelConfig, layer_index: int) -> nn.Module:
    """Make a layer's experts, or its MLP where it has none; a ``LayerPart``."""
    moe = config.moe
    assert moe is not None, "a model with experts"
    if layer_index in moe.dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return SparseMoe(config)
