"""Bamba: layers of Mamba 2, and of attention in which half of a head turns.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

import re

from torch import nn

from baton.kv.layers import LayerKV, PagedKV, StateArray, StateKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import Attention, AttentionOptions
from models.layers.mamba2 import Mamba2

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


class MambaForCausalLM(DecoderForCausalLM):
    """Mamba 2 mixers, which checkpoints name differently."""

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        layer = _LAYER.match(name)
        if layer is not None and not self.config.attends(int(layer[1])):
            name = name.replace(".self_attn.", ".mamba.")
        return super().checkpoint_name(name)


class BambaForCausalLM(MambaForCausalLM):
    """Bamba: IBM, Princeton, CMU and UIUC, huggingface.co/blog/bamba (2024)."""

    def __init__(self, config: ModelConfig) -> None:
        options = DecoderOptions(
            mlp_bias=config.mlp_bias,
            mixer=_mixer,
            kv_layers=mamba_layers(config),
            stored_names=_NAMES,
        )
        super().__init__(config, options)


def _mixer(config: ModelConfig, layer_index: int) -> nn.Module:
    assert config.mamba2 is not None
    if not config.attends(layer_index):
        return Mamba2(config.mamba2, config.hidden_size, config.rms_norm_eps, layer_index)
    bias = config.attention_bias
    options = AttentionOptions(qkv_bias=bias, output_bias=bias)
    return Attention(config, options, layer_index, sliding_window=None)


def mamba_layers(config: ModelConfig) -> tuple[LayerKV, ...]:
    """Return what each layer keeps: keys and values, or the states of Mamba 2."""
    mamba2 = config.mamba2
    assert mamba2 is not None
    state = StateKV(
        (
            StateArray((mamba2.num_channels, mamba2.kernel_size - 1)),
            StateArray((mamba2.num_heads, mamba2.state_dim, mamba2.head_dim), "float32"),
        )
    )
    paged = PagedKV(config.num_kv_heads, config.head_dim)
    return tuple(state if recurrent else paged for recurrent in mamba2.recurrent_layers)
