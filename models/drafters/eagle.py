"""EAGLE (Li et al., arXiv 2401.15077, with EAGLE-2 and HASS) and EAGLE-3 (arXiv 2503.01840).

Reads checkpoints in two layouts: the authors' (tensors ``fc``, ``layers.0`` or ``midlayer``), and
the layout of the library ``speculators`` (``fusion_fc``, ``transformer``; for EAGLE-3 ``layers.0``,
as in the authors' layout). The tensors' names tell the layout, because a checkpoint's config.json
does not always name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from models.config import ModelConfig
from models.drafters.loading import DrafterSource, check_width
from models.drafters.state_decoder import StateDrafter, StateLayout
from models.fields import MAX_PARTS, Fields
from models.loading.loader import on_meta_device
from models.loading.stored_weights import StoredTensor
from models.recipe import AttentionSpec, LayerNorms, LayerSpec, MlpSpec, Recipe

_NESTED = ("transformer_layer_config", "eagle_config")
# Prefixes of Baton's parameter names -> prefixes in the checkpoint. All prefixes that match are
# replaced, one after the other.
_EAGLE = {"model.": ""}
_EAGLE_3 = {"model.": "", "layers.0.": "midlayer."}
_SPECULATORS = {
    "model.": "",
    "fc.": "fusion_fc.",
    "embedding_norm.": "embedding_layernorm.",
    "layers.0.": "transformer.",
}
_PRE_HEAD = "pre_lm_head_layernorm.weight"
_PICKED, _IS_PICKED = "d2t", "t2d"


def load_eagle(source: DrafterSource) -> StateDrafter:
    """Load the drafter for ``--speculative-method eagle``."""
    with ExitStack() as files:
        stored = source.open(files)
        names = _names(stored)
        config = _config(source, stored, names)
        layout = _layout(source, stored, names, config)
        config = replace(config, recipe=_recipe(stored, names, config))
        with on_meta_device():
            drafter = StateDrafter(config, layout)
        source.fill(drafter, stored)
        picked = _picked(source, stored, layout.head_size) if layout.picks else None
    drafter.share(source.model, picked)
    source.model.model.state_layers = layout.state_layers
    return drafter


def _names(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    if "fusion_fc.weight" in stored:
        names = dict(_SPECULATORS)
        return {**names, "norm.": "pre_lm_head_layernorm."} if _PRE_HEAD in stored else names
    return _EAGLE_3 if "midlayer.self_attn.o_proj.weight" in stored else _EAGLE


def _layer_name(names: Mapping[str, str], name: str) -> str:
    return names.get("layers.0.", "layers.0.") + name


def _config(
    source: DrafterSource, stored: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> ModelConfig:
    """Read the configuration of the drafter's layers: Llama's layers, whatever the target is."""
    fields = source.fields()
    for nested in _NESTED:
        if fields.has(nested):
            fields = fields.child(nested)
    target = source.model.config
    most = max(fields.integer("max_position_embeddings", 2048), target.max_model_len)
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "max_position_embeddings": most,
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, maximum=MAX_PARTS),
        "tie_word_embeddings": False,
    }
    config = ModelConfig.from_dict(_merged(fields, values), max_model_len=target.max_model_len)
    check_width(source.where, "hidden_size", config.hidden_size, _own_width(stored, names))
    return config


def _merged(fields: Fields, values: Mapping[str, object]) -> dict[str, object]:
    unread = ("quantization_config", "layer_types", "sliding_window")
    own = {name: fields.get(name) for name in fields.names() if name not in unread}
    return {**own, **values}


def _own_width(stored: Mapping[str, StoredTensor], names: Mapping[str, str]) -> int:
    name = names.get("fc.", "fc.") + "weight"
    if name not in stored:
        raise ModelLoadError(f"no EAGLE checkpoint: {name} is missing")
    return stored[name].read().shape[0]


def _layout(
    source: DrafterSource,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    config: ModelConfig,
) -> StateLayout:
    """Find out from a checkpoint's tensors which parts the drafter has."""
    target, fields = source.model.config, source.fields()
    is_third = _layer_name(names, "hidden_norm.weight") in stored
    state_layers: tuple[int, ...] = ()
    if is_third:
        num_layers = target.num_layers
        state_layers = (2, num_layers // 2, num_layers - 3)
        if fields.has("eagle_aux_hidden_state_layer_ids"):
            state_layers = _layer_ids(fields, num_layers)
        elif num_layers < 6:
            raise ModelLoadError(f"{source.where}: EAGLE-3 reads layers of a model of 6 or more")
    has_head = "lm_head.weight" in stored and (is_third or _PICKED in stored)
    head_size = stored["lm_head.weight"].read().shape[0] if has_head else target.vocab_size
    has_embedding = "embed_tokens.weight" in stored
    if has_embedding:
        check_width(
            source.where,
            "vocab_size",
            stored["embed_tokens.weight"].read().shape[0],
            target.vocab_size,
        )
    return StateLayout(
        names=names,
        state_layers=state_layers,
        residual_is_normed=fields.boolean("norm_before_residual", False),
        has_embedding=has_embedding,
        has_head=has_head,
        head_size=head_size,
        picks=_PICKED in stored,
        fc_bias=names.get("fc.", "fc.") + "bias" in stored,
        embedding_norm="embedding_layernorm.weight" in stored,
        final_norm=is_third or _PRE_HEAD in stored,
        state_size=target.hidden_size,
    )


def _layer_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    found = fields.get(name)
    if not isinstance(found, list) or not all(
        isinstance(one, int) and 0 <= one < num_layers for one in found
    ):
        raise fields.wrong(name, f"expected indices of the model's {num_layers} layers")
    return tuple(found)


def _recipe(
    stored: Mapping[str, StoredTensor], names: Mapping[str, str], config: ModelConfig
) -> Recipe:
    """Return the recipe of the drafter's layers, with those biases and norms that have tensors."""

    def has(name: str) -> bool:
        return _layer_name(names, name) in stored

    mixer, feed_forward = config.layers[0].parts
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(feed_forward, MlpSpec)
    mixer = replace(
        mixer,
        qkv_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )
    before = "input_layernorm" if has("input_layernorm.weight") else None
    layer = LayerSpec(mixer, replace(feed_forward, bias=has("mlp.down_proj.bias")))
    return Recipe(
        layers=(layer,) * config.num_layers,
        ropes=config.recipe.ropes,
        norms=LayerNorms(before_mixer=before),
    )


def _picked(source: DrafterSource, stored: Mapping[str, StoredTensor], head_size: int) -> Tensor:
    """Return the token id of each output of the head; ``d2t`` has each id minus its index."""
    offsets = stored[_PICKED].read().to(torch.int64)
    if len(offsets) != head_size:
        raise ModelLoadError(f"{source.where}: {_PICKED}: {len(offsets)} for {head_size} tokens")
    picked = torch.arange(head_size) + offsets
    if int(picked.min()) < 0 or int(picked.max()) >= source.model.config.vocab_size:
        raise ModelLoadError(f"{source.where}: {_PICKED}: names tokens that the model lacks")
    return picked.to(source.device)
