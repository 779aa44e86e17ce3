"""Bamba: layers of Mamba 2, and of attention in which half of a head turns.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

import re

from torch import nn

from baton.kv_layers import LayerKV, PagedKV, StateArray, StateKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import Attention, AttentionOptions
from models.layers.mamba2 import Mamba2

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PARTS = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba: IBM, Princeton, CMU and UIUC, huggingface.co/blog/bamba (2024)."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.mamba2 is not None
        self._recurrent_layers = config.mamba2.recurrent_layers
        options = DecoderOptions(
            mlp_bias=config.mlp_bias, mixer=_mixer, kv_layers=tuple(_kv_layers(config))
        )
        super().__init__(config, options)

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        for ours, theirs in _PARTS.items():
            name = name.replace(ours, theirs)
        layer = _LAYER.match(name)
        if layer is not None and self._recurrent_layers[int(layer[1])]:
            name = name.replace(".self_attn.", ".mamba.")
        return name


def _mixer(config: ModelConfig, layer_index: int) -> nn.Module:
    assert config.mamba2 is not None
    if config.mamba2.recurrent_layers[layer_index]:
        return Mamba2(config.mamba2, config.hidden_size, config.rms_norm_eps, layer_index)
    bias = config.attention_bias
    options = AttentionOptions(qkv_bias=bias, output_bias=bias)
    return Attention(config, options, layer_index, sliding_window=None)


def _kv_layers(config: ModelConfig) -> list[LayerKV]:
    mamba2 = config.mamba2
    assert mamba2 is not None
    state = StateKV(
        (
            StateArray((mamba2.num_channels, mamba2.kernel_size - 1)),
            StateArray((mamba2.num_heads, mamba2.state_dim, mamba2.head_dim), "float32"),
        )
    )
    paged = PagedKV(config.num_kv_heads, config.head_dim)
    return [state if recurrent else paged for recurrent in mamba2.recurrent_layers]
