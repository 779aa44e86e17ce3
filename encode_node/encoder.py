"""Encoder: runs a model's vision tower and projector on one device, without the text model."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from engine.core.images.image_plan import ENCODER_ERRORS, PixelArray, problem_of
from engine.core.images.prompt_images import ImagePixels
from engine.worker.device_choice import (
    choose_device,
    choose_dtype,
    choose_ops,
    choose_packer,
    has_bfloat16,
)
from engine.worker.host.allocator import keep_freed_memory
from engine.worker.host.cores import use_cores
from engine.worker.kv_cache import dtype_name
from models.config import ModelConfig
from models.loading.vision_part import load_vision_encoder

logger = logging.getLogger(__name__)


class Encoder:
    """Encodes images, one at a time. Used by one thread.

    Args:
        folder: the model's folder.
        config: engine options that decide device, dtype and kernels, as on the prefill nodes.

    Attributes:
        dtype: name of the embeddings' dtype.
        width: number of values per embedding.

    Raises:
        ModelLoadError: the folder is missing, incomplete or broken, or its model reads text only.
        ConfigError: an option does not fit the machine.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        began_at = time.perf_counter()
        self._device = device = choose_device(config.device)
        config = config.for_device(device.type)
        use_cores(config)
        described = ModelConfig.from_folder(folder)
        self.dtype = choose_dtype(config.dtype, device, described, has_bfloat16(config))
        packer = choose_packer(config, device, self.dtype)
        self._vision = load_vision_encoder(
            folder,
            dtype=self.dtype,
            device=device,
            packer=packer,
            ops=choose_ops(config, device),
        )
        if device.type == "cpu":
            keep_freed_memory()
        self.width = self._vision.width
        logger.info(
            "loaded the vision encoder of %s in %.1f s: %s on %s",
            folder,
            time.perf_counter() - began_at,
            dtype_name(self.dtype),
            device,
        )

    def encode(self, pixels: ImagePixels) -> Tensor:
        """Encode an image; return its embeddings, ``[num_embeddings, width]``.

        Raises:
            ValueError: the encoder failed, or made NaN or infinite values.
        """
        try:
            arrays = {array.name: self._to_tensor(array) for array in pixels.arrays}
            with torch.inference_mode():
                embeddings = self._vision.encode(arrays)
            has_numbers = bool(embeddings.isfinite().all())
        except ENCODER_ERRORS as error:
            logger.exception("an image cannot be encoded")
            raise ValueError(problem_of(error)) from error
        if not has_numbers:
            raise ValueError("its encoding has NaN or infinite numbers")
        return embeddings

    def _to_tensor(self, array: PixelArray) -> Tensor:
        # Copy the bytes, because torch needs a writable buffer.
        numbers = np.frombuffer(bytearray(array.data), dtype=array.dtype)
        return torch.from_numpy(numbers).reshape(array.shape).to(self._device)
