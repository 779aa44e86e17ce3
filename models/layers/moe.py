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
    ExpertsLinear,
    PackedLinear,
    keep_inputs,
    keep_outputs,
)
from models.layers.mlp import GatedMLP, SquaredReluMLP
from models.moe_config import RELU2
from models.parallel.shards import Rank


class SparseMoe(nn.Module):
    """Each token goes through few of many gated MLPs (Shazeer et al., arXiv:1701.06538).

    The weights of all experts are one parameter, so that they are packed and multiplied together.

    Args:
        config: configuration of a model with experts.

    Attributes:
        invariant: whether a token's results may not depend on others, on a GPU, too.
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
        self.invariant = False
        self.gate: nn.Module = ExactLinear(hidden, moe.num_experts, bias=moe.has_biases)
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.num_experts))
        # What experts read and make: the stream, or a projection of it.
        width = hidden if moe.latent_size is None else moe.latent_size
        self.fc1_latent_proj: nn.Module | None = None
        self.fc2_latent_proj: nn.Module | None = None
        if moe.latent_size is not None:
            self.fc1_latent_proj = nn.Linear(hidden, width, bias=False)
            self.fc2_latent_proj = nn.Linear(width, hidden, bias=False)
        self._width, self._inner_size, self._is_gated = width, inner, moe.activation != RELU2
        first = ("gate", "up") if self._is_gated else ("up",)
        halves = [f"experts.{expert}.{half}_proj" for expert in experts for half in first]
        downs = [f"experts.{expert}.down_proj" for expert in experts]
        bias, self._activation = moe.has_biases, moe.activation
        self.gate_up: nn.Module = ExpertsLinear(width, dict.fromkeys(halves, inner), bias=bias)
        self.down: nn.Module = ExpertsLinear(inner, dict.fromkeys(downs, width), bias=bias)
        self.shared_expert: GatedMLP | SquaredReluMLP | None = None
        self.shared_expert_gate: nn.Module | None = None
        if moe.shared_size and not self._is_gated:
            self.shared_expert = SquaredReluMLP(hidden, moe.shared_size, bias=config.mlp_bias)
        elif moe.shared_size:
            self.shared_expert = GatedMLP(
                hidden, moe.shared_size, bias=False, stored_joined=moe.stored_as_linears
            )
        if moe.has_shared_gate:
            self.shared_expert_gate = ExactLinear(hidden, 1, bias=False)

    can_share = True

    def shard(self, rank: Rank) -> None:
        """See ``Shareable``: each rank keeps some of each expert's middle; all route alike."""
        assert isinstance(self.gate_up, ExpertsLinear)
        assert isinstance(self.down, ExpertsLinear)
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
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return self._mix(x, ids, weights, shared, gate)
        mixed = self._mix(self.fc1_latent_proj(x), ids, weights, None, None)
        expanded: Tensor = self.fc2_latent_proj(mixed)
        return expanded if shared is None else ops.scaled_add(expanded, shared)

    def _mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """Send ``[num_tokens, width]`` through its experts, and add what is shared."""
        if isinstance(self.gate_up, PackedLinear) and isinstance(self.down, PackedLinear):
            packed = (self.gate_up.packed, self.down.packed)
            return ops.packed_experts(
                x, ids, weights, *packed, shared, gate, activation=self._activation
            )
        assert isinstance(self.gate_up, nn.Linear)
        assert isinstance(self.down, nn.Linear)
        first_size = self._inner_size * (2 if self._is_gated else 1)
        gate_up = self.gate_up.weight.view(-1, first_size, self._width)
        down = self.down.weight.view(-1, self._width, self._inner_size)
        biases = None
        if self.gate_up.bias is not None and self.down.bias is not None:
            biases = (
                self.gate_up.bias.view(-1, first_size),
                self.down.bias.view(-1, self._width),
            )
        return ops.experts(
            *(x, ids, weights, gate_up, down, shared, gate),
            biases=biases,
            activation=self._activation,
            invariant=self.invariant,
        )


def feed_forward(config: ModelConfig, layer_index: int) -> nn.Module:
    """Make a layer's experts, or its MLP where it has none; a ``LayerPart``."""
    moe = config.moe
    assert moe is not None, "a model with experts"
    if layer_index in moe.dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return SparseMoe(config)
