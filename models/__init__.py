"""Networks only: a model folder in Hugging Face layout becomes a module that runs on paged KV.

Refuses to know: requests, schedulers, samplers, tokenizers, computer networks.
Importing this imports no torch, so that programs without torch can read ``ModelConfig``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.registry import MODELS
from models.rope_config import RopeConfig

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from baton.checkpoint.weights_cache import WeightsCache
    from models.base import CausalLM
    from models.loading.loader import WeightPacker
    from models.parallel.group import Ranks


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    packer: WeightPacker | None = None,
    ranks: Ranks | None = None,
    cache: WeightsCache | None = None,
) -> CausalLM:
    """Load a model folder: config.json, generation_config.json and the safetensors weights.

    Args:
        folder: a local folder as ``save_pretrained`` writes it.
        dtype: type of weights and activations; None: the checkpoint's own.
        device: device of the weights.
        max_model_len: longest sequence to serve, in tokens; None: see ``ModelConfig.from_folder``.
        packer: keeps linear layers in a form of their own, such as
            ``models.cpu.packing.CpuPacker``; None: as torch's parameters.
        ranks: ranks that share the model; each loads its part; None: a single rank.
        cache: keeps packed weights in files that processes share; None: they are this process's.

    Raises:
        ModelLoadError: the folder is missing, incomplete, broken or of an unsupported kind; one
            line that names the file and the field or tensor.
    """
    from models.loading.loader import load_model as load  # here, because it imports torch
    from models.parallel.group import ALONE

    return load(
        folder,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        packer=packer,
        ranks=ranks or ALONE,
        cache=cache,
    )


__all__ = ["MODELS", "ModelConfig", "RopeConfig", "load_model"]
