"""Tiny random checkpoints that see images, made by transformers: model, image processor, tokenizer.

Refuses to know: what is asserted about ours.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.numerics.tiny_models import fill_small_weights, save

# The alphabet of bytes and a token for two line ends are before special tokens; unused ids behind.
FIRST_SPECIAL = 257
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}MARKER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Outputs of image processors that only processors use.
_NOT_FOR_MODELS = ("rows", "cols", "num_crops", "num_soft_tokens_per_image")
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One architecture's tiny checkpoint.

    Attributes:
        tokens: special tokens; the first is the marker that chat templates write.
        vision: fields of the vision part's config.
        images: class of the image processor, and its settings.
        expand: the text of an image, given the image processor's results.
        processor: fields of ``processor_config.json``.
        options: options of the image processor's calls that the processor gives.
        text: fields of the text part's config.
        whole: fields of the whole model's config; one of ``tokens`` stands for its id.
        around: text that the processor puts before and behind an image.
    """

    tokens: Sequence[str]
    vision: Mapping[str, Any]
    images: tuple[str, Mapping[str, Any]]
    expand: Callable[[Any], str]
    processor: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    around: str = ""


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """A random model on disk, and the same model in transformers.

    Attributes:
        marker: text that stands for an image in a prompt.
    """

    folder: Path
    theirs: Any
    tokenizer: Any
    images: Any
    family: VisionFamily

    @property
    def marker(self) -> str:
        return self.family.tokens[0]

    def process(self, *images: Image.Image) -> Any:
        """Return what the image processor makes of the images of one prompt."""
        return self.images(list(images), return_tensors="pt", **self.family.options)

    def model_inputs(self, *images: Image.Image) -> dict[str, Any]:
        """Return the model's inputs for the images of one prompt."""
        found = self.process(*images).items()
        return {n: one for n, one in found if n not in _NOT_FOR_MODELS}

    def expanded_text(self, image: Image.Image) -> str:
        """Return the text that the processor has for an image."""
        around = self.family.around
        return f"{around}{self.family.expand(self.process(image))}{around}"

    def expanded(self, image: Image.Image) -> list[int]:
        """Return the tokens of an image, without the text around the image."""
        text = self.family.expand(self.process(image))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


# ------------------------------------------------------------------ Idefics3 and SmolVLM

_TILES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.2,
}
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TILE_TOKENS = (
    "<image>",
    _AROUND,
    _WHOLE,
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_TILE_SIZES = {"size": {"longest_edge": 4 * 32}, "max_image_size": {"longest_edge": 32}}


def _tiles(found: Any) -> str:
    sizes = found["rows"][0][0], found["cols"][0][0]
    text: str = get_image_prompt_string(*sizes, 4, _AROUND, "<image>", _WHOLE)
    return text


# ------------------------------------------------------------------ Mistral 3

_PIXTRAL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 4,
    "initializer_range": 0.2,
}


def _pixtral(found: Any, side: int = 8) -> str:
    """Expand like ``PixtralProcessor.replace_image_token``, whose module needs torchvision."""
    height, width = found["image_sizes"][0].tolist()
    text = ("[IMG]" * (width // side) + "[IMG_BREAK]") * (height // side)
    return f"{text.removesuffix('[IMG_BREAK]')}[IMG_END]"


# ------------------------------------------------------------------ Qwen

_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_WHOLE = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
_QWEN: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 2, 1]}


def _qwen(found: Any) -> str:
    return "<|image_pad|>" * int(found["image_grid_thw"][0].prod() // 4)


def _qwen_family(name: str, vision: Mapping[str, Any], **text: Any) -> VisionFamily:
    sizes = {"shortest_edge": 16**2, "longest_edge": 96**2}
    return VisionFamily(
        _QWEN_TOKENS,
        vision,
        ("Qwen2VLImageProcessorPil", {"patch_size": 4, "size": sizes}),
        _qwen,
        {"processor_class": name},
        text={"rope_parameters": _SECTIONS, **text},
        whole=_QWEN_WHOLE,
    )


_DELTA_NETS = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5},
}

# The second of two stages has all layers that share keys and values.
_GEMMA4_KINDS = ("sliding", "full", "sliding", "sliding", "full", "sliding", "full")

VISION_FAMILIES: dict[str, VisionFamily] = {
    # An image has more tokens than the window and than a block of KV.
    "Gemma3ForConditionalGeneration": VisionFamily(
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        {**_TILES, "patch_size": 4, "model_type": "siglip_vision_model", "vision_use_head": True},
        ("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
        lambda found: f"<start_of_image>{'<image_soft_token>' * 16}<end_of_image>",
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        text={
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
        },
        whole={
            "mm_tokens_per_image": 16,
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "tie_word_embeddings": False,
        },
        around="\n\n",
    ),
    "Gemma4ForConditionalGeneration": VisionFamily(
        ("<|image|>", "<|image>", "<image|>"),
        {
            **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 40},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
            **{"patch_size": 4, "position_embedding_size": 256, "initializer_range": 0.2},
        },
        ("Gemma4ImageProcessorPil", {"patch_size": 4, "max_soft_tokens": 70}),
        lambda found: f"<|image>{'<|image|>' * int(found['num_soft_tokens_per_image'][0])}<image|>",
        {"processor_class": "Gemma4Processor"},
        text={
            "num_hidden_layers": len(_GEMMA4_KINDS),
            "layer_types": [f"{kind}_attention" for kind in _GEMMA4_KINDS],
            "sliding_window": 6,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 6,
            "use_bidirectional_attention": "vision",
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size": 32,
        },
        whole={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "tie_word_embeddings": True,
        },
    ),
    "Idefics3ForConditionalGeneration": VisionFamily(
        _TILE_TOKENS,
        _TILES,
        ("Idefics3ImageProcessorPil", _TILE_SIZES),
        _tiles,
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        options={"return_row_col_info": True},
        whole={"scale_factor": 2, "image_token_id": "<image>"},
    ),
    "SmolVLMForConditionalGeneration": VisionFamily(
        _TILE_TOKENS,
        {**_TILES, "num_hidden_layers": 1, "patch_size": 4, "hidden_size": 16},
        ("SmolVLMImageProcessorPil", _TILE_SIZES),
        _tiles,
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        options={"return_row_col_info": True},
        whole={"scale_factor": 4, "image_token_id": "<image>"},
    ),
    "LlavaForConditionalGeneration": VisionFamily(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {**_PIXTRAL, "model_type": "pixtral"},
        ("PixtralImageProcessorPil", {"patch_size": 4, "size": {"longest_edge": 40}}),
        functools.partial(_pixtral, side=4),
        {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 1},
        options={"patch_size": 4},
        text={"model_type": "mistral"},
        whole={
            "image_token_index": "[IMG]",
            "image_seq_length": 1,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration": VisionFamily(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        _PIXTRAL,
        ("PixtralImageProcessorPil", {"patch_size": 4, "size": {"longest_edge": 64}}),
        _pixtral,
        {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
        options={"patch_size": 8},
        text={"model_type": "mistral"},
        whole={"image_token_index": "[IMG]", "tie_word_embeddings": False},
    ),
    "Qwen2VLForConditionalGeneration": _qwen_family(
        "Qwen2VLProcessor",
        {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen_family(
        "Qwen2_5_VLProcessor",
        {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VLForConditionalGeneration": _qwen_family(
        "Qwen3VLProcessor",
        {**_QWEN, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
    ),
    "Qwen3VLMoeForConditionalGeneration": _qwen_family(
        "Qwen3VLProcessor",
        {**_QWEN, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Qwen3_5ForConditionalGeneration": _qwen_family(
        "Qwen3VLProcessor", {**_QWEN, "num_position_embeddings": 36}, **_DELTA_NETS
    ),
}


def make_vision_checkpoint(architecture: str, folder: Path) -> VisionCheckpoint:
    """Make a random model in which each weight matters, and save it with its processor."""
    family = VISION_FAMILIES[architecture]
    tokenizer = make_tokenizer(family.tokens)
    whole = {
        name: tokenizer.convert_tokens_to_ids(value) if value in family.tokens else value
        for name, value in family.whole.items()
    }
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    config = model_class.config_class(
        text_config={**TEXT, **family.text},
        vision_config=dict(family.vision),
        attn_implementation="eager",
        **whole,
    )
    theirs = model_class(config).eval()
    fill_small_weights(theirs)
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("mm_input_projection_weight"):  # 0 in transformers
            torch.nn.init.normal_(parameter, std=0.5)
    save(theirs, folder)
    tokenizer.save_pretrained(folder)
    name, settings = family.images
    images = getattr(transformers, name)(**settings)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    template = CHAT_TEMPLATE.replace("MARKER", family.tokens[0])
    (folder / "chat_template.jinja").write_text(template)
    return VisionCheckpoint(folder, theirs, tokenizer, images, family)


def make_tokenizer(special: Sequence[str]) -> Any:
    """Make a tokenizer of single bytes, of two line ends in one token, and of special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"ĊĊ": len(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ċ", "Ċ")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    assert made.token_to_id(special[0]) == FIRST_SPECIAL
    assert made.get_vocab_size() <= VOCAB_SIZE
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


# ------------------------------------------------------------------ images


def drawn_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def drawn_sizes(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return widths and heights: very unlike ones, equal ones, and drawn ones."""
    draw = random.Random(seed)
    edges = [(1, 1), (1, most), (most, 1), (32, 32), (33, 32), (32, 33), (64, 64), (most, most)]
    return edges + [(draw.randint(1, most), draw.randint(1, most)) for _ in range(count)]
