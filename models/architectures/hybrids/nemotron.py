"""Nemotron-H: Mamba 2, attention without RoPE, MLPs of squared ReLUs or experts of these.

A layer here is a mixer and what follows it; in checkpoints each part is a layer of its own.
Refuses to know: how states, attention and experts compute.
"""

from __future__ import annotations

import re

from torch import nn

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.architectures.deepseek import EXPERTS_NAMES
from models.architectures.hybrids.bamba import mamba_layers
from models.config import ModelConfig
from models.layers.attention import Attention, AttentionOptions
from models.layers.mamba2 import Mamba2
from models.layers.mlp import SquaredReluMLP
from models.layers.moe import SparseMoe
from models.layers.norm import NormWeight
from models.rope_config import NO_ROPE

_PART = re.compile(
    r"model\.layers\.(\d+)\.(self_attn|input_layernorm|mlp|post_attention_layernorm)"
)
_OTHERS = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f."}


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H and Nemotron 3: NVIDIA, arXiv:2504.03624."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.nemotron is not None
        self._places = config.nemotron.places
        options = DecoderOptions(
            mixer=_mixer,
            feed_forward=_feed_forward,
            kv_layers=mamba_layers(config),
            ropes=(NO_ROPE,),
            norm_weight=NormWeight.WIDE,
            stored_names=EXPERTS_NAMES,
            ignored=("mtp.",),
        )
        super().__init__(config, options)

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        name = super().checkpoint_name(name)
        for ours, theirs in _OTHERS.items():
            name = name.replace(ours, theirs)
        return _PART.sub(self._stored_part, name)

    def _stored_part(self, found: re.Match[str]) -> str:
        layer, part = self._places[int(found[1])], found[2]
        is_mixers = part in ("self_attn", "input_layernorm")
        place = layer.mixer if is_mixers else layer.feed_forward
        return f"backbone.layers.{place}.{'mixer' if part in ('self_attn', 'mlp') else 'norm'}"


def _mixer(config: ModelConfig, layer_index: int) -> nn.Module:
    if config.attends(layer_index):
        return Attention(config, AttentionOptions(), layer_index, None)
    assert config.mamba2 is not None
    return Mamba2(config.mamba2, config.hidden_size, config.rms_norm_eps, layer_index)


def _feed_forward(config: ModelConfig, layer_index: int) -> nn.Module | None:
    nemotron = config.nemotron
    assert nemotron is not None
    if nemotron.places[layer_index].feed_forward is None:
        return None
    if layer_index in nemotron.with_experts:
        return SparseMoe(config)
    return SquaredReluMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
