"""Vision encoders, layouts and preprocessing compute what transformers does."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import load_image

from baton.api.errors import InvalidRequestError, ModelLoadError
from baton.media.expand import as_written, expand_images
from baton.media.image_header import read_header
from baton.media.layouts import layout_of
from baton.telemetry.round_watch import Progress
from models import ModelConfig, load_model
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from models.layers.rotary import RotaryEmbedding
from models.loading.loader import WeightPacker
from models.parallel.group import Ranks, SingleRank
from models.vision.preprocess import Preprocessor, decode
from tests.numerics.vision_checkpoints import (
    VISION_FAMILIES,
    VisionCheckpoint,
    drawn_image,
    drawn_sizes,
    file_of,
    make_vision_checkpoint,
)

SIZES = [(40, 30), (32, 32), (100, 37), (9, 70)]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("model"))


@torch.inference_mode()
def their_embeddings(checkpoint: VisionCheckpoint, image: Image.Image) -> Tensor:
    """``[num_placeholders, width]``, by transformers."""
    found = checkpoint.theirs.model.get_image_features(**checkpoint.model_inputs(image))
    by_layer = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(one)) for one in by_layer], dim=1)


def load(checkpoint: VisionCheckpoint, packer: WeightPacker | None) -> DecoderForCausalLM:
    model = load_model(checkpoint.folder, dtype=torch.float32, packer=packer, images=True)
    assert isinstance(model, DecoderForCausalLM)
    return model


@pytest.mark.parametrize("is_packed", [False, True])
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(
    checkpoint: VisionCheckpoint, is_packed: bool
) -> None:
    packer = CpuPacker.choose(torch.float32, "auto") if is_packed else None
    model = load(checkpoint, packer)
    layout, preprocessor = layout_of(checkpoint.folder), Preprocessor(checkpoint.folder)
    assert model.vision is not None
    assert layout is not None
    for width, height in SIZES:
        image = drawn_image(width, height)
        pixels = preprocessor.pixels(file_of(image))
        found = model.vision.encode({n: torch.from_numpy(one) for n, one in pixels.items()})
        expected = their_embeddings(checkpoint, image)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        tokens = layout.expand(width, height)
        assert tokens.token_ids.count(layout.placeholder_token_id) == len(found)
        assert np.prod(tokens.grid) == len(found)
        assert found.shape[1] == model.vision.width


def test_every_layer_shows_that_its_thread_is_not_stuck(checkpoint: VisionCheckpoint) -> None:
    model, progress = load(checkpoint, None), Progress()
    progress.count_this_thread()
    assert model.vision is not None
    arrays = Preprocessor(checkpoint.folder).pixels(file_of(drawn_image(40, 30)))
    with torch.inference_mode():
        model.vision.encode({name: torch.from_numpy(one) for name, one in arrays.items()})
    config = checkpoint.theirs.config.vision_config
    assert progress.num_signs == (getattr(config, "depth", 0) or config.num_hidden_layers)


def test_without_images_only_the_text_is_loaded(checkpoint: VisionCheckpoint) -> None:
    model = load_model(checkpoint.folder, dtype=torch.float32)
    assert isinstance(model, DecoderForCausalLM)
    assert model.vision is None


def test_three_axes_turn_as_in_transformers(checkpoint: VisionCheckpoint) -> None:
    config = ModelConfig.from_folder(checkpoint.folder, images=True)
    if not config.rope.axes:
        pytest.skip("a token of this model has one position")
    rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_model_len)
    positions = torch.randint(0, 2000, (3, 50))
    found = rotary(positions, 2000, torch.float32)
    theirs = checkpoint.theirs.model.language_model.rotary_emb
    for ours, other in zip(found, theirs(torch.empty(0), positions[:, None]), strict=True):
        assert torch.equal(ours, other[0])
    plain = rotary(positions[0], 2000, torch.float32)
    alike = rotary(positions[:1].expand(3, -1), 2000, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(plain, alike, strict=True))


class Seat(SingleRank):
    """A rank that only loads its share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_every_rank_of_every_stage_has_the_whole_encoder(checkpoint: VisionCheckpoint) -> None:
    whole = load(checkpoint, None).vision
    assert whole is not None
    for place in range(4):
        ranks = Ranks(Seat(place, 4), Seat(place % 2, 2))
        model = load_model(checkpoint.folder, dtype=torch.float32, ranks=ranks, images=True)
        assert isinstance(model, DecoderForCausalLM)
        assert model.vision is not None
        for name, weight in whole.state_dict().items():
            assert torch.equal(model.vision.state_dict()[name], weight), name


def test_a_layout_expands_as_the_processor_does(checkpoint: VisionCheckpoint) -> None:
    layout = layout_of(checkpoint.folder)
    assert layout is not None
    assert layout.marker == checkpoint.marker
    for width, height in drawn_sizes(40, most=300):
        image = Image.new("RGB", (width, height))
        try:
            expected = checkpoint.expanded(image)
        except ValueError:
            with pytest.raises(InvalidRequestError):
                layout.expand(width, height)
            continue
        assert list(layout.expand(width, height).token_ids) == expected, (width, height)


def test_pixel_values_are_the_processors(checkpoint: VisionCheckpoint) -> None:
    preprocessor = Preprocessor(checkpoint.folder)
    for width, height in SIZES:
        image = drawn_image(width, height, seed=width)
        found = preprocessor.pixels(file_of(image))["pixel_values"]
        expected = checkpoint.process(image)["pixel_values"]
        assert np.array_equal(found, expected.numpy().reshape(found.shape))


def test_text_around_an_image_is_tokenized_as_by_the_processor(
    checkpoint: VisionCheckpoint,
) -> None:
    layout, image = layout_of(checkpoint.folder), drawn_image(40, 30)
    assert layout is not None
    whole = checkpoint.expanded_text(image)
    for text in ("user\nMARKERWhat?", "MARKER\n\nMARKER", "MARKER"):
        expected = checkpoint.tokenizer(text.replace("MARKER", whole), add_special_tokens=False)
        written = as_written(text.replace("MARKER", layout.marker), layout)
        ids = checkpoint.tokenizer(written, add_special_tokens=False).input_ids
        files = [(b"", *image.size)] * text.count("MARKER")
        assert expand_images(ids, files, layout)[0] == expected.input_ids


def test_files_are_decoded_as_transformers_decodes_them() -> None:
    rotated = Image.Exif()
    rotated[0x0112] = 6  # orientation: turn right
    noise = drawn_image(20, 10)
    files = [
        file_of(noise, "JPEG", exif=rotated),
        file_of(noise.convert("P")),
        file_of(noise.convert("L"), "WEBP"),
        file_of(noise.convert("RGBA")),
        file_of(noise.convert("CMYK"), "JPEG"),
        file_of(noise.convert("1"), "GIF"),
    ]
    for data in files:
        expected = load_image(base64.b64encode(data).decode())
        assert np.array_equal(np.asarray(decode(data)), np.asarray(expected))
    assert decode(files[0]).size == (10, 20)
    for data in files:
        header = read_header(data)
        assert (header.width, header.height) == decode(data).size
    for broken in (b"", b"no image", files[0][:200]):
        with pytest.raises(InvalidRequestError, match="image: the file cannot be decoded"):
            decode(broken)


def test_a_processor_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    made = make_vision_checkpoint("Idefics3ForConditionalGeneration", tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_text(path.read_text().replace('"image_seq_len": 4', '"image_seq_len": 5'))
    with pytest.raises(ModelLoadError, match="image_seq_len: 5 tokens per tile"):
        layout_of(made.folder)
