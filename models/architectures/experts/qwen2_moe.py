"""Qwen2 with experts, one of them shared. Refuses to know: how experts compute."""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.moe import feed_forward
from models.layers.windows import windows_of_alternate_layers


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen1.5-MoE and Qwen2-MoE: Yang et al., arXiv:2407.10671."""

    def __init__(self, config: ModelConfig) -> None:
        attention = AttentionOptions(qkv_bias=config.qkv_bias)
        windows = windows_of_alternate_layers(config)
        options = DecoderOptions(attention, sliding_windows=windows, feed_forward=feed_forward)
        super().__init__(config, options)
