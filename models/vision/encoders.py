"""make_encoder: builds the encoder that a vision spec describes."""

from __future__ import annotations

from models.vision.gemma import GemmaEncoder
from models.vision.gemma4 import Gemma4Encoder
from models.vision.layers import VisionEncoder
from models.vision.pixtral import PixtralEncoder
from models.vision.qwen import QwenEncoder
from models.vision.siglip_tiles import TilesEncoder
from models.vision.specs import (
    Gemma4Spec,
    GemmaSpec,
    PixtralSpec,
    QwenSpec,
    TilesSpec,
    VisionSpec,
)


def make_encoder(spec: VisionSpec, text_size: int) -> VisionEncoder:
    """Make an encoder without weights.

    Args:
        spec: shape of the encoder; its type tells the kind of encoder.
        text_size: size of the text network's embeddings.
    """
    match spec:
        case TilesSpec():
            return TilesEncoder(spec, text_size)
        case PixtralSpec():
            return PixtralEncoder(spec, text_size)
        case QwenSpec():
            return QwenEncoder(spec)
        case GemmaSpec():
            return GemmaEncoder(spec, text_size)
        case Gemma4Spec():
            return Gemma4Encoder(spec, text_size)
