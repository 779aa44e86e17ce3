"""Nemotron-H's config.json, whose layers are one part each, read as layers of two parts.

    in the file    M  -  M  *  -  M  E        of Mamba 2, a MLP, attention, experts
    here           M  -| M |*  -| M  E        a mixer, and what follows it, if anything does

Refuses to know: tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.fields import MAX_PARTS, Fields
from models.moe_config import RELU2, MoeConfig, check_moe
from models.recurrent_config import Mamba2Config, refuse_time_step_limit

_MAMBA, _ATTENTION, _MLP, _MOE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _MOE}
_NAMES = {name: name for name in _LETTERS.values()} | {"mamba": _MAMBA, "attention": _ATTENTION}
_PATTERN = "hybrid_override_pattern"
_TIME_STEP_MIN = 0.001
# Field names in older files -> in newer files; the older name wins when a file has both.
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_min": "time_step_min",
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where a layer's parts are among those of the file.

    Attributes:
        mixer: shape of its attention, or of its Mamba 2.
        feed_forward: the part behind the mixer; None: there is none.
    """

    mixer: int
    feed_forward: int | None


@dataclass(frozen=True, slots=True)
class NemotronConfig:
    """What parts the layers are.

    Attributes:
        places: parts of each layer.
        with_experts: the layers that have experts.
        mamba2: shape of the mixers that carry states.
        moe: shape of the experts; None: no layer has experts.
    """

    places: tuple[Places, ...]
    with_experts: frozenset[int]
    mamba2: Mamba2Config
    moe: MoeConfig | None


def common_fields(fields: Fields) -> Fields:
    """Return the fields by the names that other families have for them.

    Raises:
        ModelLoadError: a field that is not computed with, or of the wrong type.
    """
    fields = _in_newer_words(fields)
    for name, only in (("mlp_hidden_act", RELU2), ("mamba_hidden_act", "silu")):
        found = fields.text(name, only)
        if found != only:
            raise fields.wrong(name, f"{found!r} is not supported; supported: {only}")
    if fields.boolean("residual_in_fp32", False):
        raise fields.wrong("residual_in_fp32", "only false is supported")
    refuse_time_step_limit(fields)
    _refuse_time_step_min(fields)
    places, _ = _fold(fields)
    head_dim = "head_dim" if fields.has("head_dim") else "attention_head_dim"
    return fields.with_values(
        {
            "num_hidden_layers": len(places),
            "layer_types": None,
            "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
            "head_dim": fields.integer(head_dim, 128),
            "hidden_act": "silu",  # of Mamba 2
        }
    )


def _in_newer_words(fields: Fields) -> Fields:
    found = {new: old for old, new in _OLDER_NAMES.items() if old in fields.names()}
    return fields.with_values({new: fields.get(old) for new, old in found.items()})


def _refuse_time_step_min(fields: Fields) -> None:
    """Refuse a minimum time step other than 0 and the 0.001 of all published checkpoints.

    Training and NVIDIA's own code use this field for initial weights alone, and Baton computes as
    they do. transformers 5 raises the time steps of a prompt's tokens to the minimum, but not those
    of later tokens.
    """
    name = "time_step_min"
    if fields.get(name) not in (None, 0.0, _TIME_STEP_MIN):
        problem = f"{fields.get(name)!r} is not supported; supported: 0.0, {_TIME_STEP_MIN}"
        raise fields.wrong(name, problem)


def parse_nemotron(fields: Fields) -> NemotronConfig:
    """Read what the layers are, the mixers that carry states, and the experts, if there are some.

    Raises:
        ModelLoadError: a field that is missing, out of range, or not supported.
    """
    fields = _in_newer_words(fields)
    places, kinds = _fold(fields)
    with_experts = frozenset(
        layer
        for layer, place in enumerate(places)
        if place.feed_forward is not None and kinds[place.feed_forward] == _MOE
    )
    recurrent_layers = tuple(kinds[place.mixer] == _MAMBA for place in places)
    mamba2 = Mamba2Config(
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        num_groups=fields.integer("n_groups", 8),
        state_dim=fields.integer("ssm_state_size", 128),
        kernel_size=fields.integer("conv_kernel", 4, minimum=2),
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=fields.boolean("use_bias", False),
        recurrent_layers=recurrent_layers,
    )
    if mamba2.num_heads % mamba2.num_groups:
        problem = f"{mamba2.num_groups} does not divide {mamba2.num_heads} heads"
        raise fields.wrong("n_groups", problem)
    moe = _moe(fields, len(places), with_experts) if with_experts else None
    if moe is not None:
        check_moe(fields, moe)
    return NemotronConfig(tuple(places), with_experts, mamba2, moe)


def _moe(fields: Fields, num_layers: int, with_experts: frozenset[int]) -> MoeConfig:
    """Read experts as DeepSeek V3's, but without gates."""
    latent_size = fields.optional_integer("moe_latent_size")
    if latent_size is not None and fields.boolean("mlp_bias", False):
        raise fields.wrong("mlp_bias", "true is not supported with moe_latent_size")
    return MoeConfig(
        num_experts=fields.integer("n_routed_experts", 8, maximum=MAX_PARTS),
        inner_size=fields.integer("moe_intermediate_size", 7688),
        top_k=fields.integer("num_experts_per_tok", 2),
        scoring="sigmoid",
        normalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_best=2,
        has_bias=True,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        dense_layers=frozenset(range(num_layers)) - with_experts,
        activation=RELU2,
        latent_size=latent_size,
    )


def _fold(fields: Fields) -> tuple[list[Places], list[str]]:
    """Return each layer's parts, and the kinds of all parts."""
    # As in transformers, layer_types wins when a file has both.
    name = next((n for n in ("layer_types", "layers_block_type") if fields.has(n)), _PATTERN)
    known = _LETTERS if name == _PATTERN else _NAMES
    found = list(fields.text(name)) if name == _PATTERN else fields.texts(name)
    places: list[Places] = []
    kinds: list[str] = []
    for index, kind in enumerate(found):
        if kind not in known:
            raise fields.wrong(name, f"{kind!r} is not supported; supported: {', '.join(known)}")
        kinds.append(known[kind])
        if kinds[-1] in (_MAMBA, _ATTENTION):
            places.append(Places(index, None))
        elif not places or places[-1].feed_forward is not None:
            raise fields.wrong(name, f"{kind!r} at {index} does not follow a mixer of tokens")
        else:
            places[-1] = Places(places[-1].mixer, index)
    if _ATTENTION not in kinds:
        raise fields.wrong(name, "some of the layers have to attend")
    return places, kinds
