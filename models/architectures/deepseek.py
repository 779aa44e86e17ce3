"""DeepSeek V2 and V3, R1 and Kimi K2: latent attention, and experts but for the first layers.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from baton.kv.layers import LatentKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.latent_attention import LatentAttention
from models.layers.moe import feed_forward

EXPERTS_NAMES = {
    ".mlp.shared_expert.": ".mlp.shared_experts.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}


class DeepseekForCausalLM(DecoderForCausalLM):
    """DeepSeek-AI, arXiv:2405.04434 (V2) and arXiv:2412.19437 (V3)."""

    def __init__(self, config: ModelConfig) -> None:
        mla = config.mla
        assert mla is not None, "a model with latent attention"
        kv_layers = (LatentKV(mla.width),) * config.num_layers
        options = DecoderOptions(
            mixer=LatentAttention,
            feed_forward=feed_forward,
            kv_layers=kv_layers,
            stored_names=EXPERTS_NAMES,
        )
        super().__init__(config, options)
