"""Vision specs: the shapes of vision encoders, read from config.json; no torch.

Defaults equal those of transformers' configuration classes. Refuses to know: tensors, weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from models.fields import MAX_PARTS, Fields

# Name of an activation in config.json -> Baton's name (`models/vision/layers.py`).
_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
_GATES = ("gelu_tanh", "gelu", "silu")
# Defaults: the layers without windows in Qwen2.5-VL, and the deep layers in Qwen3-VL.
_FULL, _DEEP = (7, 15, 23, 31), (8, 16, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """The shape of a vision transformer's layers.

    Attributes:
        hidden_size: size of the residual stream.
        inner_size: intermediate size of the feed-forward part.
        activation: ``gelu``, ``gelu_tanh``, ``quick_gelu`` or ``silu``.
        norm_eps: epsilon that norms add to the variance.
    """

    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    activation: str
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Return the size of an attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesSpec:
    """SigLIP over the tiles of an image, then a connector that joins patches (Idefics3, SmolVLM).

    Attributes:
        layers: the transformer's layers.
        num_channels: number of channels of a pixel.
        patch_size: number of pixels along a side of a patch.
        positions_per_side: number of learned positions along each side of the image.
        scale: number of patches along each side of a square that becomes one embedding.
    """

    layers: TransformerSpec
    num_channels: int
    patch_size: int
    positions_per_side: int
    scale: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralSpec:
    """A transformer over an image of any size, with rotary positions (Pixtral, Mistral 3).

    Attributes:
        layers: the transformer's layers.
        num_channels: number of channels of a pixel.
        patch_size: number of pixels along a side of a patch.
        theta: base of the rotary frequencies.
        merge: number of patches along each side of a square that becomes one embedding.
        merger_eps: epsilon of the merger's norm; None: there is no merger (Pixtral).
        projector_activation: activation between the projector's linear layers.
        projector_bias: whether the projector's linear layers have biases.
    """

    layers: TransformerSpec
    num_channels: int
    patch_size: int
    theta: float
    merge: int
    merger_eps: float | None
    projector_activation: str
    projector_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSpec:
    """A transformer over an image of any size, with rotary positions, and mergers (Qwen).

    Attributes:
        layers: the transformer's layers.
        num_channels: number of channels of a pixel.
        num_frames: number of frames of a patch; all frames of a patch show the same image.
        patch_size: number of pixels along a side of a patch.
        merge: number of patches along each side of a square that becomes one embedding.
        text_size: size of the text network's embeddings.
        theta: base of the rotary frequencies.
        is_gated: whether the norms are RMSNorms and the feed-forward parts are gated (Qwen2.5-VL).
        is_third: whether this is the encoder of Qwen3-VL, whose patch embedding has a bias, and
            whose parts have other names in checkpoints.
        window: number of embeddings along each side of an attention window; None: no windows.
        full_layers: indices of layers in which all patches attend to each other.
        positions_per_side: number of learned positions along each side; None: none are learned.
        deep_layers: indices of layers whose merged results are added after the first layers of the
            text network (DeepStack, Meng et al., arXiv:2406.04334).
    """

    layers: TransformerSpec
    num_channels: int
    num_frames: int
    patch_size: int
    merge: int
    text_size: int
    theta: float
    is_gated: bool = False
    is_third: bool = False
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    positions_per_side: int | None = None
    deep_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSpec:
    """SigLIP over an image of fixed size, then averages of squares of patches (Gemma 3).

    Attributes:
        layers: the transformer's layers.
        num_channels: number of channels of a pixel.
        patch_size: number of pixels along a side of a patch.
        patches_per_side: number of patches along each side of the image.
        tokens_per_side: number of embeddings along each side of the image.
    """

    layers: TransformerSpec
    num_channels: int
    patch_size: int
    patches_per_side: int
    tokens_per_side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Spec:
    """A transformer over an image of any size, then averages of squares of patches (Gemma 4).

    Attributes:
        layers: the transformer's layers.
        patch_size: number of pixels along a side of a patch.
        num_positions: number of learned positions per axis.
        theta: base of the rotary frequencies.
        square: number of patches along each side of a square that becomes one embedding.
        is_clipped: whether the inputs and results of linear layers are clipped to limits from the
            checkpoint.
        is_standardized: whether the averages are standardized: a bias is subtracted, and the
            result multiplied by a scale.
    """

    layers: TransformerSpec
    patch_size: int
    num_positions: int
    theta: float
    square: int
    is_clipped: bool
    is_standardized: bool


VisionSpec = TilesSpec | PixtralSpec | QwenSpec | GemmaSpec | Gemma4Spec


def encoding_width(spec: VisionSpec, text_size: int) -> int:
    """Return the size of an encoder's embeddings, with the vectors of DeepStack if any.

    Args:
        text_size: size of the text network's embeddings.
    """
    if isinstance(spec, QwenSpec):
        return spec.text_size * (1 + len(spec.deep_layers))
    return text_size


def read_tiles(fields: Fields) -> TilesSpec:
    """Read the vision part of Idefics3 and SmolVLM (Laurençon et al., arXiv:2408.12637)."""
    vision = _vision_fields(fields)
    patch_size = vision.integer("patch_size", 32)
    image_size = vision.integer("image_size", 224, minimum=patch_size)
    return TilesSpec(
        layers=TransformerSpec(
            num_layers=vision.integer("num_hidden_layers", 12, maximum=MAX_PARTS),
            hidden_size=vision.integer("hidden_size", 1152),
            inner_size=vision.integer("intermediate_size", 3072),
            num_heads=_num_heads(
                vision, "num_attention_heads", vision.integer("hidden_size", 1152)
            ),
            activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            norm_eps=vision.number("layer_norm_eps", 1e-6),
        ),
        num_channels=vision.integer("num_channels", 3),
        patch_size=patch_size,
        positions_per_side=image_size // patch_size,
        scale=fields.integer("scale_factor", 2),
    )


def read_gemma3(fields: Fields) -> GemmaSpec:
    """Read the vision part of Gemma 3 (Gemma Team, arXiv:2503.19786)."""
    vision = _vision_fields(fields)
    kind = vision.text("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise vision.wrong(
            "model_type", f"{kind!r} is not supported; supported: siglip_vision_model"
        )
    patch_size, hidden_size = vision.integer("patch_size", 16), vision.integer("hidden_size", 768)
    side = vision.integer("image_size", 224, minimum=patch_size) // patch_size
    tokens = math.isqrt(fields.integer("mm_tokens_per_image", 256))
    if tokens > side:
        raise fields.wrong(
            "mm_tokens_per_image", f"{tokens**2}, but an image has {side**2} patches"
        )
    return GemmaSpec(
        layers=TransformerSpec(
            num_layers=vision.integer("num_hidden_layers", 12, maximum=MAX_PARTS),
            hidden_size=hidden_size,
            inner_size=vision.integer("intermediate_size", 3072),
            num_heads=_num_heads(vision, "num_attention_heads", hidden_size, 12),
            activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            norm_eps=vision.number("layer_norm_eps", 1e-6),
        ),
        num_channels=vision.integer("num_channels", 3),
        patch_size=patch_size,
        patches_per_side=side,
        tokens_per_side=tokens,
    )


def read_gemma4(fields: Fields) -> Gemma4Spec:
    """Read the vision part of Gemma 4."""
    vision = _vision_fields(fields)
    hidden_size = vision.integer("hidden_size", 768)
    num_heads = vision.integer("num_attention_heads", 12)
    for name, default, only in (
        ("num_key_value_heads", 12, num_heads),
        ("head_dim", 64, hidden_size // num_heads),
    ):
        if vision.integer(name, default) != only:
            raise vision.wrong(name, f"only {only} is supported")
    if vision.boolean("attention_bias", False):
        raise vision.wrong("attention_bias", "only false is supported")
    return Gemma4Spec(
        layers=TransformerSpec(
            num_layers=vision.integer("num_hidden_layers", 16, maximum=MAX_PARTS),
            hidden_size=hidden_size,
            inner_size=vision.integer("intermediate_size", 3072),
            num_heads=num_heads,
            activation=_activation(vision, "hidden_activation", "gelu_pytorch_tanh", _GATES),
            norm_eps=vision.number("rms_norm_eps", 1e-6),
        ),
        patch_size=vision.integer("patch_size", 16),
        num_positions=vision.integer("position_embedding_size", 10 * 1024),
        theta=_theta(vision, 100.0),
        square=vision.integer("pooling_kernel_size", 3),
        is_clipped=vision.boolean("use_clipped_linears", False),
        is_standardized=vision.boolean("standardize", False),
    )


def read_pixtral(fields: Fields) -> PixtralSpec:
    """Read the vision part of Mistral 3 (Agrawal et al., arXiv:2410.07073)."""
    layer = fields.get("vision_feature_layer")
    if layer not in (None, -1):
        raise fields.wrong("vision_feature_layer", f"{layer!r} is not supported; supported: -1")
    text = fields.child("text_config") if fields.has("text_config") else Fields({}, "")
    return replace(
        _pixtral(fields, "pixtral"),
        merge=fields.integer("spatial_merge_size", 2),
        merger_eps=text.number("rms_norm_eps", 1e-5),
        projector_bias=fields.boolean("multimodal_projector_bias", False),
    )


def read_llava(fields: Fields) -> PixtralSpec:
    """Read the vision part of Pixtral, whose architecture is LLaVA's."""
    for name, default, only in (
        ("vision_feature_layer", -2, -1),
        ("vision_feature_select_strategy", "default", "full"),
    ):
        found = fields.get(name) if name in fields.names() else default
        if found != only:
            raise fields.wrong(name, f"{found!r} is not supported; supported: {only}")
    return _pixtral(fields, "clip_vision_model")


def _pixtral(fields: Fields, default: str) -> PixtralSpec:
    """Read Pixtral's encoder and projector, without a merger.

    Args:
        fields: fields of the whole model.
        default: kind of encoder if the file does not say.
    """
    vision = _vision_fields(fields)
    kind = vision.text("model_type", default)
    if kind != "pixtral":
        raise vision.wrong("model_type", f"{kind!r} is not supported; supported: pixtral")
    hidden_size = vision.integer("hidden_size", 1024)
    return PixtralSpec(
        layers=TransformerSpec(
            num_layers=vision.integer("num_hidden_layers", 24, maximum=MAX_PARTS),
            hidden_size=hidden_size,
            inner_size=vision.integer("intermediate_size", 4096),
            num_heads=_num_heads(vision, "num_attention_heads", hidden_size),
            activation=_activation(vision, "hidden_act", "gelu", _GATES),
            norm_eps=1e-5,
        ),
        num_channels=vision.integer("num_channels", 3),
        patch_size=vision.integer("patch_size", 16),
        theta=_theta(vision),
        merge=1,
        merger_eps=None,
        projector_activation=_activation(fields, "projector_hidden_act", "gelu"),
        projector_bias=fields.boolean("multimodal_projector_bias", True),
    )


def read_qwen2(fields: Fields) -> QwenSpec:
    """Read the vision part of Qwen2-VL (Wang et al., arXiv:2409.12191)."""
    vision = _vision_fields(fields)
    size = vision.integer("embed_dim", 1280)
    return QwenSpec(
        layers=_qwen_layers(vision, size, 32, size * vision.integer("mlp_ratio", 4), "quick_gelu"),
        text_size=vision.integer("hidden_size", 3584),
        **_qwen_patches(vision, 14),
    )


def read_qwen2_5(fields: Fields) -> QwenSpec:
    """Read the vision part of Qwen2.5-VL (Bai et al., arXiv:2502.13923)."""
    vision = _vision_fields(fields)
    size, inner = vision.integer("hidden_size", 3584), vision.integer("intermediate_size", 3420)
    patches = _qwen_patches(vision, 14)
    window = vision.integer("window_size", 112) // patches["patch_size"] // patches["merge"]
    if not window:
        raise vision.wrong("window_size", "must be at least the side of a merged patch")
    found = vision.token_ids("fullatt_block_indexes")
    return QwenSpec(
        layers=_qwen_layers(vision, size, 32, inner, "silu", _GATES),
        text_size=vision.integer("out_hidden_size", 3584),
        is_gated=True,
        window=window,
        full_layers=frozenset(found if "fullatt_block_indexes" in vision.names() else _FULL),
        **patches,
    )


def read_qwen3(fields: Fields) -> QwenSpec:
    """Read the vision part of Qwen3-VL (arXiv:2511.21631)."""
    found = read_qwen3_5(fields)
    vision, name = _vision_fields(fields), "deepstack_visual_indexes"
    deep = vision.token_ids(name) if name in vision.names() else _DEEP
    if any(layer >= found.layers.num_layers for layer in deep) or list(deep) != sorted(set(deep)):
        raise vision.wrong(name, f"expected ascending layers below {found.layers.num_layers}")
    return replace(found, deep_layers=tuple(deep))


def read_qwen3_5(fields: Fields) -> QwenSpec:
    """Read the vision part of Qwen3.5, which is like Qwen3-VL's, but without deep layers."""
    vision = _vision_fields(fields)
    size, inner = vision.integer("hidden_size", 1152), vision.integer("intermediate_size", 4304)
    return QwenSpec(
        layers=_qwen_layers(vision, size, 27, inner, "gelu_pytorch_tanh"),
        text_size=vision.integer("out_hidden_size", 3584),
        is_third=True,
        positions_per_side=math.isqrt(vision.integer("num_position_embeddings", 2304)),
        **_qwen_patches(vision, 16),
    )


def _qwen_layers(
    vision: Fields,
    size: int,
    num_layers: int,
    inner_size: int,
    activation: str,
    supported: tuple[str, ...] | None = None,
) -> TransformerSpec:
    return TransformerSpec(
        num_layers=vision.integer("depth", num_layers, maximum=MAX_PARTS),
        hidden_size=size,
        inner_size=inner_size,
        num_heads=_num_heads(vision, "num_heads", size),
        activation=_activation(vision, "hidden_act", activation, supported),
        norm_eps=1e-6,
    )


def _qwen_patches(vision: Fields, patch_size: int) -> dict[str, Any]:
    channels = "in_chans" if vision.has("in_chans") else "in_channels"
    return {
        "num_channels": vision.integer(channels, 3),
        "num_frames": vision.integer("temporal_patch_size", 2),
        "patch_size": vision.integer("patch_size", patch_size),
        "merge": vision.integer("spatial_merge_size", 2),
        "theta": _theta(vision),
    }


def _vision_fields(fields: Fields) -> Fields:
    return fields.child("vision_config") if fields.has("vision_config") else Fields({}, "")


def _num_heads(vision: Fields, name: str, hidden_size: int, default: int = 16) -> int:
    """Read the number of heads; raises ModelLoadError if it does not divide the hidden size."""
    num_heads = vision.integer(name, default)
    if hidden_size % num_heads:
        raise vision.wrong(name, f"{num_heads} does not divide hidden_size {hidden_size}")
    return num_heads


def _activation(
    fields: Fields, name: str, default: str, supported: tuple[str, ...] | None = None
) -> str:
    found = fields.text(name, default)
    known = [n for n, ours in _ACTIVATIONS.items() if supported is None or ours in supported]
    if found not in known:
        raise fields.wrong(name, f"{found!r} is not supported; supported: {', '.join(known)}")
    return _ACTIVATIONS[found]


def _theta(vision: Fields, default: float = 10_000.0) -> float:
    """Read the base of the rotary frequencies from the fields of transformers 4 or 5."""
    if not vision.has("rope_parameters"):
        return vision.number("rope_theta", default)
    rope = vision.child("rope_parameters")
    kind = rope.text("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise rope.wrong("rope_type", f"{kind!r} is not supported; supported: axial, default")
    return rope.number("rope_theta", default)
