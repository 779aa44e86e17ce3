"""Qwen2 and Qwen2.5, dense: query, key and value have a bias. Refuses to know: how it computes."""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.windows import windows_of_some_layers


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2: Yang et al., arXiv:2407.10671."""

    def __init__(self, config: ModelConfig) -> None:
        attention = AttentionOptions(qkv_bias=True)
        windows = windows_of_some_layers(config)
        super().__init__(config, DecoderOptions(attention, sliding_windows=windows))
