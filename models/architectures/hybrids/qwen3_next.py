"""Qwen3-Next and Qwen3.5, text: gated delta nets in most layers, gated attention in others.

Refuses to know: how states, attention and experts compute.
"""

from __future__ import annotations

import re

from torch import nn

from baton.kv.layers import LayerKV, PagedKV, StateArray, StateKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers import moe
from models.layers.attention import Attention, AttentionOptions
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.norm import NormWeight

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.")
# Of whole models: the part that sees images, and layers that predict several tokens.
_ELSEWHERE = ("mtp.", "model.visual.")


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next: Qwen Team, qwen.ai/blog (2025), of gated delta nets (arXiv:2412.06464)."""

    stored_by_key_head = True  # of a delta net's projections
    prefix = "model."  # of all but the head, in checkpoints

    def __init__(self, config: ModelConfig) -> None:
        net, by_key_head = config.delta_net, self.stored_by_key_head
        assert net is not None
        self._recurrent_layers = net.recurrent_layers
        attention = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            norm_weight=NormWeight.OFFSET,
            output_gate=True,
        )

        def make_mixer(config: ModelConfig, layer_index: int) -> nn.Module:
            if not net.recurrent_layers[layer_index]:
                return Attention(config, attention, layer_index, None)
            return GatedDeltaNet(
                *(net, config.hidden_size, config.rms_norm_eps, layer_index),
                stored_by_key_head=by_key_head,
            )

        options = DecoderOptions(
            mixer=make_mixer,
            feed_forward=None if config.moe is None else moe.feed_forward,
            kv_layers=tuple(_kv_layers(config)),
            norm_weight=NormWeight.OFFSET,
            ignored=_ELSEWHERE,
        )
        super().__init__(config, options)

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        layer = _LAYER.match(name)
        if layer is not None and self._recurrent_layers[int(layer[1])]:
            name = name.replace(".self_attn.", ".linear_attn.")
        return name.replace("model.", self.prefix, 1) if name.startswith(_OF_TEXT) else name


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5: the same, whose delta nets' projections are stored one by one; experts or not."""

    stored_by_key_head = False


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text of a Qwen3.5 that sees images, too."""

    prefix = "model.language_model."


def _kv_layers(config: ModelConfig) -> list[LayerKV]:
    net = config.delta_net
    assert net is not None
    state = StateKV(
        (
            StateArray((net.num_channels, net.kernel_size - 1)),
            StateArray((net.num_value_heads, net.key_dim, net.value_dim), "float32"),
        )
    )
    paged = PagedKV(config.num_kv_heads, config.head_dim)
    return [state if recurrent else paged for recurrent in net.recurrent_layers]
