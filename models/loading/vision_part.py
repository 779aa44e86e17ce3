"""Loads a model's vision encoder without its text part, for nodes that only encode images."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from torch import nn

from baton.api.errors import ModelLoadError
from baton_kernels.ops import Ops
from models.config import ModelConfig
from models.decoder import Decoder, DecoderForCausalLM, Elsewhere
from models.loading.loader import WeightPacker, fill_model, on_meta_device, open_weights
from models.loading.text_parts import VISION
from models.vision.encoders import make_encoder
from models.vision.layers import VisionEncoder


class _NoText(nn.Module):
    """A stand-in for the text part, without weights, but with the attributes that packers read."""

    embed_tokens = None
    tapes = None
    num_stages = 1


def load_vision_encoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packer: WeightPacker | None = None,
    ops: Ops | None = None,
) -> VisionEncoder:
    """Load the vision encoder (vision tower and projector) of a model folder.

    Args:
        dtype: type of weights and activations.
        packer: stores linear layers in another form; None: torch parameters.
        ops: kernels that compute the layers; None: the fastest kernels for the device.

    Raises:
        ModelLoadError: the folder is missing, incomplete or broken, or its model reads text only.
    """
    config = ModelConfig.from_folder(folder, images=True)
    if config.vision is None:
        raise ModelLoadError(f"{folder}: has no vision encoder, so there is nothing to encode")
    with on_meta_device():
        model = DecoderForCausalLM(config)
        model.vision = make_encoder(config.vision, config.hidden_size)
        model.model, model.lm_head, model.score = cast("Decoder", _NoText()), Elsewhere(), None
    with ExitStack() as files:
        stored = open_weights(folder, config, files)
        of_vision = {name: one for name, one in stored.items() if name.startswith(VISION)}
        fill_model(model, folder, of_vision, dtype, device, packer, ops)
    return model.vision
