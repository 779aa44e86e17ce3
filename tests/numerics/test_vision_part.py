"""Tests that the vision encoder alone computes what it computes within the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.api.errors import ModelLoadError
from models import load_model
from models.cpu.packing import CpuPacker
from models.loading.vision_part import load_vision_encoder
from models.vision.preprocess import Preprocessor
from models.vision.specs import encoding_width
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.numerics.test_images_equal_transformers import image
from tests.numerics.vision_checkpoints import VISION_FAMILIES, file_of, make_vision_checkpoint


@pytest.mark.large
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_encoder_alone_equals_the_encoder_in_the_model(family: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(family, tmp_path).folder
    packer = CpuPacker.choose(torch.float32, "auto")
    whole = load_model(folder, dtype=torch.float32, images=True, packer=packer)
    alone = load_vision_encoder(
        folder, dtype=torch.float32, device=torch.device("cpu"), packer=packer
    )
    assert whole.vision is not None
    assert whole.config.vision is not None
    arrays = Preprocessor(folder).pixels(file_of(image(1)))
    pixels = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    with torch.inference_mode():
        found, wanted = alone.encode(pixels), whole.vision.encode(pixels)
    assert torch.equal(found, wanted)
    assert found.shape[1] == alone.width
    assert alone.width == encoding_width(whole.config.vision, whole.config.hidden_size)


def test_a_model_that_reads_text_only_has_nothing_to_encode() -> None:
    with pytest.raises(ModelLoadError, match="has no vision encoder"):
        load_vision_encoder(DEMO_MODEL, dtype=torch.float32, device=torch.device("cpu"))
