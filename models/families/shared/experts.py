"""Reads specs of experts and MLPs from config.json fields that several families share."""

from __future__ import annotations

from models.fields import MAX_PARTS, Fields
from models.model_fields import ModelFields
from models.recipe import ExpertsSpec, LayerSpec, MixerSpec, MlpSpec

# Baton's names -> names in the checkpoints of models that `routed_experts` reads.
ROUTED_NAMES = {
    ".mlp.shared_expert.": ".mlp.shared_experts.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}


def checked(fields: Fields, experts: ExpertsSpec) -> ExpertsSpec:
    """Return ``experts``; raises ModelLoadError if numbers of experts and groups do not fit."""
    if experts.top_k > experts.num_experts:
        problem = f"{experts.top_k}, but there are {experts.num_experts} experts"
        raise fields.wrong("num_experts_per_tok", problem)
    num_groups, top_groups = experts.num_groups, experts.top_groups
    if experts.num_experts % num_groups:
        raise fields.wrong("n_group", f"{num_groups} does not divide {experts.num_experts}")
    chosen = experts.num_experts // num_groups * top_groups
    if top_groups > num_groups or experts.top_k > chosen:
        raise fields.wrong("topk_group", f"{top_groups} is wrong for {num_groups} groups")
    return experts


def expect(fields: Fields, name: str, supported: str) -> None:
    """Raise ModelLoadError unless the field is absent or has the value ``supported``."""
    found = fields.text(name, supported)
    if found != supported:
        raise fields.wrong(name, f"{found!r} is not supported; supported: {supported}")


def routed_experts(fields: Fields, *, scoring: str, group_best: int) -> ExpertsSpec:
    """Read experts in groups, and shared experts (DeepSeek-AI, arXiv:2405.04434).

    Args:
        fields: fields of config.json.
        scoring: function of the router's logits; for ``sigmoid``, checkpoints also have a bias.
        group_best: a group's score is the sum of the scores of this many best experts in it.
    """
    inner_size = fields.integer("moe_intermediate_size")
    return ExpertsSpec(
        num_experts=fields.integer("n_routed_experts", maximum=MAX_PARTS),
        inner_size=inner_size,
        top_k=fields.integer("num_experts_per_tok"),
        scoring=scoring,
        normalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_best=group_best,
        has_bias=scoring == "sigmoid",
        shared_size=fields.integer("n_shared_experts", minimum=0) * inner_size,
    )


def without_auxiliary_loss(fields: Fields) -> ExpertsSpec:
    """Read experts that were balanced by a bias, not by a loss (DeepSeek-AI, arXiv:2412.19437)."""
    expect(fields, "scoring_func", "sigmoid")
    expect(fields, "topk_method", "noaux_tc")
    return checked(fields, routed_experts(fields, scoring="sigmoid", group_best=2))


def layers_behind_dense_ones(
    model: ModelFields, mixer: MixerSpec, experts: ExpertsSpec
) -> tuple[LayerSpec, ...]:
    """Return the layers: the first ``first_k_dense_replace`` have MLPs, the others experts."""
    fields = model.fields
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.wrong("moe_layer_freq", "only 1 is supported")
    num_dense = fields.integer("first_k_dense_replace", minimum=0, maximum=MAX_PARTS)
    dense, sparse = LayerSpec(mixer, dense_mlp(model)), LayerSpec(mixer, experts)
    return tuple(dense if index < num_dense else sparse for index in range(model.num_layers))


def dense_mlp(model: ModelFields) -> MlpSpec:
    """Return the spec of the MLP in layers without experts."""
    return MlpSpec(inner_size=model.intermediate_size, bias=model.mlp_bias)
