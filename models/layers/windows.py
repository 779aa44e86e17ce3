"""Which layers have a sliding window, in models that switch it on for some of them.

Refuses to know: what a window does.
"""

from __future__ import annotations

from baton.api.errors import ModelLoadError
from models.config import ModelConfig


def windows_of_some_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, None where attention is full.

    ``layer_types`` decides where it is given, else the layers from ``max_window_layers`` on have
    one; none has while ``use_sliding_window`` is false.

    Raises:
        ModelLoadError: ``layer_types`` asks for a window that the config does not give.
    """
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types is None:
        first = config.max_window_layers
        return tuple(window if index >= first else None for index in range(config.num_layers))
    if window is None and "sliding_attention" in config.layer_types:
        raise ModelLoadError("config.json: layer_types: sliding_attention without a sliding window")
    return tuple(window if name == "sliding_attention" else None for name in config.layer_types)


def windows_of_alternate_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each layer in Qwen2-MoE, None where attention is full.

    ``layer_types`` decides if it is given. Else every second layer below ``max_window_layers``, the
    first included, has a window. No layer has one if ``use_sliding_window`` is false.

    Raises:
        ModelLoadError: ``layer_types`` asks for a window, and the config gives no size.
    """
    if config.layer_types is not None or not config.use_sliding_window:
        return windows_of_some_layers(config)
    layers = range(config.num_layers)
    has_window = [index % 2 == 0 and index < config.max_window_layers for index in layers]
    return tuple(config.sliding_window if windowed else None for windowed in has_window)


def windows_by_pattern(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each layer in models where most have one (Gemma, OLMo 3, gpt-oss).

    ``layer_types`` decides where it is given, else the last of each ``sliding_window_pattern``
    layers has none.

    Raises:
        ModelLoadError: a layer is to have a window that the config does not give.
    """
    window = config.sliding_window
    types = config.layer_types or tuple(
        "sliding_attention" if (index + 1) % config.sliding_window_pattern else "full_attention"
        for index in range(config.num_layers)
    )
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("config.json: sliding_window: missing, but some layers have one")
    return tuple(window if name == "sliding_attention" else None for name in types)
