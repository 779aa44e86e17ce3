"""A mixture of experts as config.json describes it, in the dialect of each architecture; no torch.

Refuses to know: tensors, how experts are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.fields import MAX_PARTS, Fields

# Where the size of experts is put, where a file says it by the name of a MLP's.
EXPERT_SIZE = "expert_intermediate_size"
# The activation of experts, and MLPs, without gates.
RELU2 = "relu2"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of one model.

    Attributes:
        num_experts: experts of each layer that has experts.
        inner_size: size of each expert's gated middle.
        top_k: experts per token.
        scoring: what makes scores of a router's logits, see ``baton_kernels.routing.Scoring``.
        normalize: whether the weights of a token's experts are divided by their sum.
        scale: factor on them.
        num_groups: of experts; with more than one, groups are chosen first.
        top_groups: that a token's experts are of.
        group_best: experts whose scores, added, are a group's.
        has_bias: whether a checkpoint has a number per expert that is added where they are chosen.
        shared_size: size of the gated middle of the shared experts; 0: there are none.
        has_shared_gate: whether a logit per token scales the shared experts' result.
        dense_layers: layers that have an MLP in place of experts.
        activation: the experts' activation, see ``baton_kernels.experts``.
        has_biases: whether router and experts add one to each product.
        latent_size: size of the experts' input and output, if not the stream's; None: the stream's.
        stored_by_turns: whether checkpoints interleave gates and ups in fused experts.
        stored_as_linears: whether checkpoints have fused and shared experts as two layers each.
    """

    num_experts: int
    inner_size: int
    top_k: int
    scoring: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    has_bias: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    activation: str = "silu"
    has_biases: bool = False
    latent_size: int | None = None
    stored_by_turns: bool = False
    stored_as_linears: bool = False


def parse_moe(fields: Fields, architecture: str) -> MoeConfig | None:
    """Read the experts from the fields of config.json; None: the architecture has none.

    Raises:
        ModelLoadError: a field that is missing, out of range, or not supported.
    """
    parse = _DIALECTS.get(architecture)
    if parse is None:
        return None
    moe = parse(fields)
    if moe is not None:
        check_moe(fields, moe)
    return moe


def check_moe(fields: Fields, moe: MoeConfig) -> None:
    """Raise ModelLoadError if its numbers do not go together."""
    if moe.top_k > moe.num_experts:
        problem = f"{moe.top_k}, but there are {moe.num_experts} experts"
        raise fields.wrong("num_experts_per_tok", problem)
    if moe.num_experts % moe.num_groups:
        raise fields.wrong("n_group", f"{moe.num_groups} does not divide {moe.num_experts}")
    chosen = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.top_groups > moe.num_groups or moe.top_k > chosen:
        raise fields.wrong("topk_group", f"{moe.top_groups} groups of {moe.num_groups}")


def _mixtral(fields: Fields) -> MoeConfig:
    """Jiang et al., arXiv:2401.04088."""
    return MoeConfig(
        num_experts=fields.integer("num_local_experts", maximum=MAX_PARTS),
        inner_size=fields.integer("intermediate_size"),
        top_k=fields.integer("num_experts_per_tok"),
        normalize=True,
    )


def _qwen3(fields: Fields) -> MoeConfig:
    """Yang et al., arXiv:2505.09388."""
    # transformers writes either name; as there, the second wins when a file has both.
    count = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    return _of_qwen(fields, count)


def _of_qwen(fields: Fields, count: str = "num_experts") -> MoeConfig:
    return MoeConfig(
        num_experts=fields.integer(count, maximum=MAX_PARTS),
        inner_size=fields.integer("moe_intermediate_size"),
        top_k=fields.integer("num_experts_per_tok"),
        normalize=fields.boolean("norm_topk_prob", False),
        dense_layers=_dense_layers_of_steps(fields),
    )


def _qwen2(fields: Fields) -> MoeConfig:
    """Yang et al., arXiv:2407.10671."""
    shared_size = fields.integer("shared_expert_intermediate_size")
    return replace(_of_qwen(fields), shared_size=shared_size, has_shared_gate=True)


def _qwen3_next(fields: Fields) -> MoeConfig:
    """Qwen2's, whose weights sum to 1 unless the file says otherwise."""
    return replace(_qwen2(fields), normalize=fields.boolean("norm_topk_prob", True))


def _qwen3_5(fields: Fields) -> MoeConfig:
    """Qwen3-Next's in every layer, whose weights always sum to 1."""
    if fields.get("norm_topk_prob") not in (None, True):
        raise fields.wrong("norm_topk_prob", "only true is supported for this architecture")
    return replace(_qwen2(fields), normalize=True, dense_layers=frozenset())


def _deepseek_v2(fields: Fields) -> MoeConfig:
    """DeepSeek-AI, arXiv:2405.04434."""
    _expect(fields, "scoring_func", "softmax")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        known = "greedy, group_limited_greedy"
        raise fields.wrong("topk_method", f"{method!r} is not supported; supported: {known}")
    if fields.boolean("norm_topk_prob", False):
        raise fields.wrong("norm_topk_prob", "true is not supported for this architecture")
    if fields.boolean("mlp_bias", False):
        raise fields.wrong("mlp_bias", "true is not supported for this architecture")
    moe = _deepseek(fields, scoring="softmax", group_best=1)
    if method == "greedy":
        moe = replace(moe, num_groups=1, top_groups=1)
    return replace(moe, normalize=False)


def _deepseek_v3(fields: Fields) -> MoeConfig:
    """DeepSeek-AI, arXiv:2412.19437; without a loss that balances experts (``noaux_tc``)."""
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    return _deepseek(fields, scoring="sigmoid", group_best=2)


def _gpt_oss(fields: Fields) -> MoeConfig:
    """OpenAI, arXiv:2508.10925."""
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(name, only) != only:
            raise fields.wrong(name, f"{fields.get(name)} is not supported; supported: {only}")
    return MoeConfig(
        num_experts=fields.integer("num_local_experts", maximum=MAX_PARTS),
        inner_size=fields.integer("intermediate_size"),
        top_k=fields.integer("num_experts_per_tok"),
        scoring="softmax of the chosen",
        activation="clamped_swiglu",
        has_biases=True,
        stored_by_turns=True,
    )


def _granite(fields: Fields) -> MoeConfig | None:
    """Granite 4's, beside a MLP that all tokens go through; some sizes have that alone."""
    if fields.integer("num_local_experts", 8, minimum=0) == 0:
        return None
    return MoeConfig(
        num_experts=fields.integer("num_local_experts", 8, maximum=MAX_PARTS),
        inner_size=fields.integer(EXPERT_SIZE),
        top_k=fields.integer("num_experts_per_tok", 2),
        scoring="softmax of the chosen",
        shared_size=fields.integer("intermediate_size"),
        stored_as_linears=True,
    )


def _expect(fields: Fields, name: str, supported: str) -> None:
    found = fields.text(name, supported)
    if found != supported:
        raise fields.wrong(name, f"{found!r} is not supported; supported: {supported}")


def _deepseek(fields: Fields, *, scoring: str, group_best: int) -> MoeConfig:
    """Read what DeepSeek's models and those after them have.

    Args:
        fields: fields of config.json.
        scoring: the architecture's scoring; sigmoid scores come with a bias.
        group_best: experts whose scores are a group's.
    """
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.wrong("moe_layer_freq", "only 1 is supported")
    dense = fields.integer("first_k_dense_replace", minimum=0, maximum=MAX_PARTS)
    inner_size = fields.integer("moe_intermediate_size")
    return MoeConfig(
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
        dense_layers=frozenset(range(dense)),
    )


def _dense_layers_of_steps(fields: Fields) -> frozenset[int]:
    """Return the layers without experts of Qwen's models."""
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.token_ids("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers", maximum=MAX_PARTS))
    return frozenset(layer for layer in layers if layer in named or (layer + 1) % step)


_DIALECTS: dict[str, Callable[[Fields], MoeConfig | None]] = {
    "GraniteMoeHybridForCausalLM": _granite,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2,
    "Qwen3MoeForCausalLM": _qwen3,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5MoeForCausalLM": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GptOssForCausalLM": _gpt_oss,
    "Glm4MoeForCausalLM": _deepseek_v3,  # GLM-4.5, arXiv:2508.06471
}
