"""Mistral: a Llama without biases whose layers may all have a sliding window.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Jiang et al., arXiv:2310.06825."""

    def __init__(self, config: ModelConfig) -> None:
        windows = (config.sliding_window,) * config.num_layers
        super().__init__(config, DecoderOptions(sliding_windows=windows))
