"""Mistral: a Llama without biases; all layers, or some (Ministral), may have a sliding window.

Refuses to know: how a decoder computes.
"""

from __future__ import annotations

from baton.api.errors import ModelLoadError
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Jiang et al., arXiv:2310.06825."""

    def __init__(self, config: ModelConfig) -> None:
        windows = (config.sliding_window,) * config.num_layers
        super().__init__(config, DecoderOptions(sliding_windows=windows))


class MinistralForCausalLM(DecoderForCausalLM):
    """Ministral 8B, where ``layer_types`` says which layers have the window."""

    def __init__(self, config: ModelConfig) -> None:
        types = config.layer_types or ("sliding_attention",) * config.num_layers
        if config.layer_types and "sliding_attention" in types and config.sliding_window is None:
            raise ModelLoadError("config.json: sliding_window: missing, but some layers have one")
        windows = tuple(
            config.sliding_window if name == "sliding_attention" else None for name in types
        )
        super().__init__(config, DecoderOptions(sliding_windows=windows))
