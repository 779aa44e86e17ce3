"""A mixture of experts in place of a layer's MLP: a router, routed experts and shared experts.

Refuses to know: how kernels sort tokens by expert, the names in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

import baton_kernels as ops
from models.layers.computing import Computing
from models.layers.linear import (
    ExactLinear,
    ExpertsLinear,
    PackedLinear,
    keep_inputs,
    keep_outputs,
)
from models.layers.mlp import GatedMLP, SquaredReluMLP
from models.layers.norm import RMSNorm
from models.parallel.experts import expert_share
from models.parallel.group import SINGLE_RANK, Collective
from models.parallel.shards import Rank
from models.recipe import RELU2, ExpertsSpec, MlpAndExpertsSpec, NormWeight


class AdaptedMix(Protocol):
    """The computation of a layer's experts when tokens of the step use adapters of the experts."""

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared experts' result.

        Args:
            x: ``[num_tokens, width]``.
            ids: ``[num_tokens, top_k]``, each token's experts.
            weights: ``[num_tokens, top_k]``, the experts' weights.
            shared: the shared experts' result, shaped like ``x``; None: there is none to add.
            gate: ``[num_tokens, 1]``, logits whose sigmoid scales ``shared``; None: not scaled.
        """
        ...


class SparseMoe(Computing):
    """A mixture of experts: each token uses a few of many MLPs (Shazeer et al., arXiv:1701.06538).

    All experts' weights are one parameter, so that one kernel call can compute all experts.

    Args:
        spec: shape and options of the experts.
        hidden_size: size of input and output.

    Attributes:
        invariant: whether a token's result must have equal bits in every batch, also on a GPU.
        adapted: computes instead of `mix` in a step with adapters; None: use `mix`.
        width: size of the experts' input and output.
        inner_size: intermediate size of an expert.
        num_halves: projections in an expert's first layer: 2 (gate and up), or 1 (up alone).
        activation: the experts' activation, as ``ops.experts`` names it.
        num_experts: number of routed experts, on all ranks together.
        share: the experts that this rank has.
        loads: ``[2]``, int64, on the CPU, if ranks divide the experts: rows of the busiest rank,
            and rows of all ranks, summed over all steps on a CPU; see ``ops.experts``. Steps on a
            GPU are not counted, because reading the count would wait for the GPU.
    """

    float32_parameters: ClassVar = frozenset({"e_score_correction_bias", "expert_scales"})

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self._routing = ops.Routing(
            spec.top_k,
            ops.Scoring(spec.scoring),
            spec.normalize,
            spec.scale,
            spec.num_groups,
            spec.top_groups,
            spec.group_best,
        )
        hidden, inner = hidden_size, spec.inner_size
        self.num_experts, self.share = spec.num_experts, ops.ALL_EXPERTS
        self.loads: Tensor | None = None
        self.invariant = False
        self.adapted: AdaptedMix | None = None
        self.gate: nn.Module = ExactLinear(hidden, spec.num_experts, bias=spec.has_biases)
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(spec.num_experts))
        self.expert_scales: nn.Parameter | None = None
        if spec.has_scales:
            self.expert_scales = nn.Parameter(torch.empty(spec.num_experts))
        # The experts read and write the residual stream's size, or a smaller size (latents).
        width = hidden if spec.latent_size is None else spec.latent_size
        self.fc1_latent_proj: nn.Module | None = None
        self.fc2_latent_proj: nn.Module | None = None
        if spec.latent_size is not None:
            self.fc1_latent_proj = nn.Linear(hidden, width, bias=False)
            self.fc2_latent_proj = nn.Linear(width, hidden, bias=False)
        self.width, self.inner_size, self.activation = width, inner, spec.activation
        self.num_halves = 1 if spec.activation == RELU2 else 2
        self._has_biases = spec.has_biases
        self.gate_up: nn.Module
        self.down: nn.Module
        self._make_experts(range(spec.num_experts))
        self.shared_expert: GatedMLP | SquaredReluMLP | None = None
        self.shared_expert_gate: nn.Module | None = None
        if spec.shared_size and self.num_halves == 1:
            self.shared_expert = SquaredReluMLP(hidden, spec.shared_size, bias=spec.shared_bias)
        elif spec.shared_size:
            self.shared_expert = GatedMLP(
                hidden, spec.shared_size, bias=False, stored_joined=spec.stored_as_linears
            )
        if spec.has_shared_gate:
            self.shared_expert_gate = ExactLinear(hidden, 1, bias=False)

    def _make_experts(self, experts: range) -> None:
        """Make the two layers of these experts, without weights."""
        names = ("gate_proj", "up_proj")[-self.num_halves :]
        halves = [f"experts.{expert}.{half}" for expert in experts for half in names]
        downs = [f"experts.{expert}.down_proj" for expert in experts]
        width, inner, bias = self.width, self.inner_size, self._has_biases
        self.gate_up = ExpertsLinear(width, dict.fromkeys(halves, inner), bias=bias)
        self.down = ExpertsLinear(inner, dict.fromkeys(downs, width), bias=bias)

    can_share = True

    def shard(self, rank: Rank) -> None:
        """Keep this rank's experts, or its part of every expert; call before weights are loaded.

        Every rank has the whole router. Shared experts are always divided by their inner size.

        Raises:
            ConfigError: there are too few experts for all ranks, or experts are too small.
        """
        if self.shared_expert is not None:
            self.shared_expert.shard(rank)
        share = expert_share(rank, self.num_experts, self.inner_size)
        if share is not None:
            self.share = share
            self.loads = torch.zeros(2, dtype=torch.int64, device="cpu")
            self._make_experts(share.experts(self.num_experts))
            return
        assert isinstance(self.gate_up, ExpertsLinear)
        assert isinstance(self.down, ExpertsLinear)
        first, end = span = rank.wide_span(self.inner_size)
        keep_outputs(self.gate_up, *(span for _ in self.gate_up.part_sizes))
        keep_inputs(self.down, span, adds_bias=rank.rank == 0)
        self.inner_size = end - first

    def forward(self, x: Tensor, for_router: Tensor | None = None) -> Tensor:
        """Route each token to its experts, and return the mixture's results, shaped like ``x``.

        Args:
            x: ``[num_tokens, hidden_size]``.
            for_router: the router's input, shaped like ``x``; None: ``x``.
        """
        logits = self.gate(x if for_router is None else for_router)
        ids, weights = self.ops.route(
            logits, self._routing, self.e_score_correction_bias, self.expert_scales
        )
        shared = None if self.shared_expert is None else self.shared_expert(x)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        mix = self.mix if self.adapted is None else self.adapted.mix
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return mix(x, ids, weights, shared, gate)
        mixed = mix(self.fc1_latent_proj(x), ids, weights, None, None)
        expanded: Tensor = self.fc2_latent_proj(mixed)
        return expanded if shared is None else self.ops.scaled_add(expanded, shared)

    def mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
        *,
        is_counted: bool = True,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared experts' result.

        Args:
            x: ``[num_tokens, width]``.
            ids: ``[num_tokens, top_k]``, each token's experts.
            weights: ``[num_tokens, top_k]``, the experts' weights.
            shared: the shared experts' result, shaped like ``x``; None: there is none to add.
            gate: ``[num_tokens, 1]``, logits whose sigmoid scales ``shared``; None: not scaled.
            is_counted: whether to add these tokens to ``loads``.
        """
        loads = self.loads if is_counted else None
        if isinstance(self.gate_up, PackedLinear) and isinstance(self.down, PackedLinear):
            packed = (self.gate_up.packed, self.down.packed)
            return self.ops.packed_experts(
                *(x, ids, weights, *packed, shared, gate),
                activation=self.activation,
                share=self.share,
                loads=loads,
            )
        assert isinstance(self.gate_up, nn.Linear)
        assert isinstance(self.down, nn.Linear)
        first_size = self.inner_size * self.num_halves
        gate_up = self.gate_up.weight.view(-1, first_size, self.width)
        down = self.down.weight.view(-1, self.width, self.inner_size)
        biases = None
        if self.gate_up.bias is not None and self.down.bias is not None:
            biases = (
                self.gate_up.bias.view(-1, first_size),
                self.down.bias.view(-1, self.width),
            )
        return self.ops.experts(
            *(x, ids, weights, gate_up, down, shared, gate),
            biases=biases,
            activation=self.activation,
            invariant=self.invariant,
            share=self.share,
            loads=loads if x.device.type == "cpu" else None,
        )


class MlpAndExperts(Computing):
    """An MLP and a mixture of experts side by side; their normalized results are summed (Gemma 4).

    Ranks sum the results of each of the two before the norms.

    Args:
        spec: sizes and options of both.
        hidden_size: size of input and output.
        norms: makes a norm of the residual stream.

    Attributes:
        group: ranks that divide MLP and experts.
    """

    can_share = True

    def __init__(
        self, spec: MlpAndExpertsSpec, hidden_size: int, norms: Callable[[], RMSNorm]
    ) -> None:
        super().__init__()
        self.dense = GatedMLP(
            hidden_size, spec.mlp.inner_size, bias=spec.mlp.bias, activation=spec.mlp.activation
        )
        self.moe = SparseMoe(spec.experts, hidden_size)
        self.before_moe, self.after_dense, self.after_moe = norms(), norms(), norms()
        self.router_norm = RouterNorm(hidden_size, self.before_moe.eps)
        self.group: Collective = SINGLE_RANK

    def shard(self, rank: Rank) -> None:
        """Keep this rank's part of MLP and experts; call before weights are loaded."""
        self.dense.shard(rank)
        self.moe.shard(rank)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """Return the sum of both results, shaped like ``x``.

        Args:
            x: ``[num_tokens, hidden_size]``, the normalized stream, which the MLP reads.
            stream: ``[num_tokens, hidden_size]``, the residual stream.
        """
        dense: Tensor = self.after_dense(self.group.all_reduce(self.dense(x)))
        mixed = self.moe(self.before_moe(stream), self.router_norm(stream))
        return self.ops.scaled_add(self.after_moe(self.group.all_reduce(mixed)), dense)


class RouterNorm(RMSNorm):
    """The norm before Gemma 4's router, with results divided by the square root of the size."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, NormWeight.WIDE)

    def keep_loaded(self, weight: Tensor) -> Tensor:
        """Divide a checkpoint's weight, ``[size]``, by the square root of its size."""
        return super().keep_loaded(weight) / math.sqrt(len(weight))


def loads_of(model: object) -> list[Tensor]:
    """Return the counts of rows (`SparseMoe.loads`) of all layers whose experts ranks divide."""
    assert isinstance(model, nn.Module)
    layers = [one for one in model.modules() if isinstance(one, SparseMoe)]
    return [one.loads for one in layers if one.loads is not None]
