"""Choose the image layout of a checkpoint by its processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.api.images import ImageLayout
from baton.media.layouts.processor_files import ProcessorFiles
from baton.registry import Registry
from baton.text.tokenizer import Tokenizer

# Name of a processor class in transformers -> function that makes the layout.
LAYOUTS: Registry[Callable[[ProcessorFiles, Tokenizer], ImageLayout]] = Registry(
    "image processor",
    {
        "Gemma3Processor": "baton.media.layouts.gemma:GemmaLayout",
        "Gemma4Processor": "baton.media.layouts.gemma4:Gemma4Layout",
        "Idefics3Processor": "baton.media.layouts.tiles:TilesLayout",
        "PixtralProcessor": "baton.media.layouts.pixtral:PixtralLayout",
        "Qwen2VLProcessor": "baton.media.layouts.qwen:QwenLayout",
        "Qwen2_5_VLProcessor": "baton.media.layouts.qwen:QwenLayout",
        "Qwen3VLProcessor": "baton.media.layouts.qwen:QwenLayout",
        "SmolVLMProcessor": "baton.media.layouts.tiles:TilesLayout",
    },
)


def layout_of(folder: Path, tokenizer: Tokenizer | None = None) -> ImageLayout | None:
    """Return the layout of images in a checkpoint's prompts; None: the model takes no images.

    Args:
        folder: the model folder.
        tokenizer: the checkpoint's tokenizer; None: it is loaded.

    Raises:
        ModelLoadError: a file of the processor is broken, or does not fit the model.
    """
    files = ProcessorFiles.read(folder)
    if files is None or files.processor_class not in LAYOUTS.names():
        return None
    if tokenizer is None:
        if not Tokenizer.exists_in(folder):
            return None
        tokenizer = Tokenizer(folder)
    return LAYOUTS.load(files.processor_class)(files, tokenizer)
