"""GLM-4 with experts: Llama's attention, of which half of a head turns, and DeepSeek V3's experts.

Refuses to know: how experts compute.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.architectures.deepseek import EXPERTS_NAMES
from models.config import ModelConfig
from models.layers.attention import AttentionOptions
from models.layers.moe import feed_forward


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5 and 4.6: GLM-4.5 Team, arXiv:2508.06471."""

    def __init__(self, config: ModelConfig) -> None:
        attention = AttentionOptions(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)
        options = DecoderOptions(attention, feed_forward=feed_forward, stored_names=EXPERTS_NAMES)
        super().__init__(config, options)
