"""Mixtral: Mistral with experts, which its checkpoints name in their own way.

Refuses to know: how experts compute.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig
from models.layers.moe import feed_forward

_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral: Jiang et al., arXiv:2401.04088."""

    def __init__(self, config: ModelConfig) -> None:
        windows = (config.sliding_window,) * config.num_layers
        options = DecoderOptions(
            sliding_windows=windows, feed_forward=feed_forward, stored_names=_NAMES
        )
        super().__init__(config, options)
