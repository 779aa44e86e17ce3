"""CWM: a Llama in which some layers have a sliding window. Refuses to know: how it computes."""

from __future__ import annotations

from baton.api.errors import ModelLoadError
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig


class CwmForCausalLM(DecoderForCausalLM):
    """The Code World Model: Copet et al., arXiv:2510.02387."""

    def __init__(self, config: ModelConfig) -> None:
        if config.layer_types is None or config.sliding_window is None:
            missing = "layer_types" if config.layer_types is None else "sliding_window"
            raise ModelLoadError(f"config.json: {missing}: missing")
        windows = tuple(
            config.sliding_window if name == "sliding_attention" else None
            for name in config.layer_types
        )
        super().__init__(config, DecoderOptions(mlp_bias=config.mlp_bias, sliding_windows=windows))
