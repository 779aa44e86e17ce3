"""A model in the form that its device computes with. Refuses to know: caches, steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine_config import EngineConfig
from baton.errors import ConfigError
from baton_kernels.dispatch import enable_native_kernels
from models.base import CausalLM
from models.packing import pack_for_cpu


def load_for_device(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    load: Callable[..., CausalLM],
) -> CausalLM:
    """Load a model there, and on a CPU pack what it multiplies with.

    Args:
        load: as `models.load_model`.

    Raises ModelLoadError, or ConfigError where an option is for another device.
    """
    on_cpu = device.type == "cpu"
    if not on_cpu and config.weights != "auto":
        raise ConfigError(f"weights: {config.weights} is for CPUs, got device {device}")
    model = load(folder, dtype=dtype, device=device, max_model_len=config.max_model_len)
    if on_cpu:
        enable_native_kernels(config.native_kernels)
        pack_for_cpu(model, config.weights)
    return model
