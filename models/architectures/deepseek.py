"""DeepSeek V2 and V3, R1 and Kimi K2: latent attention, and experts but for the first layers.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from baton.kv_layers import LatentKV
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.latent_attention import LatentAttention
from models.layers.moe import feed_forward

_NAMES = {
    ".mlp.shared_expert.": ".mlp.shared_experts.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}


class DeepseekForCausalLM(DecoderForCausalLM):
    """DeepSeek-AI, arXiv:2405.04434 (V2) and arXiv:2412.19437 (V3)."""

    def __init__(self, config: ModelConfig) -> None:
        mla = config.mla
        assert mla is not None, "a model with latent attention"
        kv_layers = (LatentKV(mla.width),) * config.num_layers
        super().__init__(
            config,
            DecoderOptions(mixer=LatentAttention, feed_forward=feed_forward, kv_layers=kv_layers),
        )
        first = config.num_layers
        self._mtp_layers = tuple(
            f"model.layers.{layer}." for layer in range(first, first + mla.num_mtp_layers)
        )

    def checkpoint_name(self, name: str) -> str:
        """See ``DecoderForCausalLM.checkpoint_name``."""
        for own, theirs in _NAMES.items():
            name = name.replace(own, theirs)
        return name

    def ignores_weight(self, name: str) -> bool:
        """Leave the layers alone that predict several tokens: nothing here drafts with them."""
        return name.startswith(self._mtp_layers)
