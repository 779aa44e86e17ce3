"""GemmaLayout: an image is a fixed number of placeholders between two marks (Gemma 3).

The processor puts two line ends before and behind the marks, which the tokenizer may join with line
ends of the text around the image. Therefore the line ends are written into the text (`written`).
"""

from __future__ import annotations

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer

_BEGIN, _PLACEHOLDER, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class GemmaLayout:
    """The layout of Gemma 3; implements `ImageLayout`.

    Args:
        files: settings of the processor.
        tokenizer: the checkpoint's tokenizer.
    """

    marker = _BEGIN
    written = f"\n\n{_BEGIN}\n\n"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        """Read the settings; raises ModelLoadError if they do not fit the model or tokenizer."""
        self.settings = files.settings
        self.marker_token_id = files.token_id(tokenizer, _BEGIN)
        self.placeholder_token_id = files.token_id(tokenizer, _PLACEHOLDER)
        end = files.token_id(tokenizer, _END)
        if files.image.get("do_pan_and_scan"):
            raise files.wrong("do_pan_and_scan", "only false is supported")
        count = files.processor_integer("image_seq_length", 256)
        if count != files.model_integer("mm_tokens_per_image", default=256):
            raise files.wrong("image_seq_length", f"{count}, but config.json has another number")
        side = int(count**0.5)
        placeholders = (self.placeholder_token_id,) * count
        self._tokens = ImageTokens((self.marker_token_id, *placeholders, end), (1, side, side))

    def expand(self, width: int, height: int) -> ImageTokens:
        """Implement `ImageLayout.expand`."""
        if width < 1 or height < 1:
            raise InvalidRequestError("image", f"{width} x {height} pixels: a side is empty")
        return self._tokens
