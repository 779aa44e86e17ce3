"""Gemma 4's encoder and layout compute what transformers does; there is no text network yet."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

from baton.api.errors import InvalidRequestError
from baton.media.layouts.gemma4 import Gemma4Layout
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer
from models.fields import Fields
from models.vision.encoders import make_encoder
from models.vision.preprocess import Preprocessor
from models.vision.specs import read_gemma4
from tests.numerics.tiny_models import fill_small_weights
from tests.numerics.vision_checkpoints import (
    FIRST_SPECIAL,
    drawn_image,
    drawn_sizes,
    file_of,
    make_tokenizer,
)

TEXT_SIZE = 24
IMAGE, BEGIN, END = range(FIRST_SPECIAL, FIRST_SPECIAL + 3)
IMAGE_SETTINGS = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}


@pytest.fixture(scope="module", params=[False, True])
def config(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, transformers.Gemma4VisionConfig]:
    """A folder with the files of an image processor, and the vision part's configuration."""
    folder = tmp_path_factory.mktemp("model")
    vision = transformers.Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        pooling_kernel_size=3,
        position_embedding_size=256,
        use_clipped_linears=request.param,
        standardize=request.param,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    make_tokenizer(("<|image|>", "<|image>", "<image|>")).save_pretrained(folder)
    transformers.Gemma4ImageProcessorPil(**IMAGE_SETTINGS).save_pretrained(folder)
    marks = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
    whole = {**marks, "vision_config": {"patch_size": 4, "pooling_kernel_size": 3}}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder, vision


def layout_in(folder: Path) -> Gemma4Layout:
    files = ProcessorFiles.read(folder)
    assert files is not None
    return Gemma4Layout(files, Tokenizer(folder))


@torch.inference_mode()
def test_embeddings_are_those_of_transformers(
    config: tuple[Path, transformers.Gemma4VisionConfig],
) -> None:
    folder, vision = config
    torch.manual_seed(0)
    tower = Gemma4VisionModel(vision).eval()
    embedder = Gemma4MultimodalEmbedder(vision, SimpleNamespace(hidden_size=TEXT_SIZE)).eval()
    for part in (tower, embedder):
        fill_small_weights(part)
    tower.patch_embedder.position_embedding_table.normal_()
    for name, buffer in tower.named_buffers():
        if "_min" in name or "_max" in name:  # limits that cut some numbers
            buffer.fill_(-1.0 if "_min" in name else 1.0)
        elif "std_" in name:
            buffer.normal_()
    spec = read_gemma4(Fields({"vision_config": vision.to_dict()}, "config.json"))
    encoder = make_encoder(spec, TEXT_SIZE)
    stored = {f"vision_tower.{name}": one for name, one in tower.state_dict().items()}
    stored |= {f"embed_vision.{name}": one for name, one in embedder.state_dict().items()}
    encoder.load_state_dict(stored)
    layout, preprocessor = layout_in(folder), Preprocessor(folder)
    for width, height in [(40, 30), (64, 64), (100, 37), (9, 70)]:
        pixels = preprocessor.pixels(file_of(drawn_image(width, height)))
        arrays = {name: torch.from_numpy(one) for name, one in pixels.items()}
        found = encoder.encode(arrays)
        states = tower(arrays["pixel_values"][None], arrays["image_position_ids"][None])
        torch.testing.assert_close(found, embedder(states.last_hidden_state), rtol=1e-5, atol=1e-5)
        begin, *placeholders, end = layout.expand(width, height).token_ids
        assert (begin, set(placeholders), end) == (BEGIN, {IMAGE}, END)
        assert len(placeholders) == len(found)


def test_a_layout_expands_as_the_processor_does(
    config: tuple[Path, transformers.Gemma4VisionConfig],
) -> None:
    layout = layout_in(config[0])
    assert (layout.marker, layout.written) == ("<|image|>", "<|image|>")
    processor = transformers.Gemma4ImageProcessorPil(**IMAGE_SETTINGS)
    for width, height in drawn_sizes(20, most=300):
        try:
            found = processor([drawn_image(width, height)], return_tensors="np")
        except ValueError:
            with pytest.raises(InvalidRequestError):
                layout.expand(width, height)
            continue
        expanded = layout.expand(width, height)
        assert len(expanded.token_ids) - 2 == found["num_soft_tokens_per_image"][0]
        frames, rows, columns = expanded.grid
        columns_and_rows = found["image_position_ids"][0].max(axis=0) + 1
        assert (frames, rows * 3, columns * 3) == (1, *columns_and_rows[::-1])
