"""CWM: a Llama in which some layers have a sliding window. Refuses to know: how it computes."""

from __future__ import annotations

from baton.api.errors import ModelLoadError
from models.architectures.decoder import DecoderForCausalLM, DecoderOptions
from models.config import ModelConfig

# If the file names no layer types, the first of every so many layers has full attention.
_FULL_INTERVAL = 4


class CwmForCausalLM(DecoderForCausalLM):
    """The Code World Model: Copet et al., arXiv:2510.02387."""

    def __init__(self, config: ModelConfig) -> None:
        if config.sliding_window is None:
            raise ModelLoadError("config.json: sliding_window: missing")
        types = config.layer_types or tuple(
            "sliding_attention" if index % _FULL_INTERVAL else "full_attention"
            for index in range(config.num_layers)
        )
        windows = tuple(
            config.sliding_window if name == "sliding_attention" else None for name in types
        )
        super().__init__(config, DecoderOptions(mlp_bias=config.mlp_bias, sliding_windows=windows))
