"""A tokenizer whose chat template takes images, and a layout of images, without a model."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from baton.api.images import ImageTokens
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

MARKER, ROW_MARK = "<image>", "<row>"
# Written as SmolVLM's: it shows contents that are lists of parts only.
TEMPLATE = """\
{% for message in messages %}<{{ message['role'] }}>\
{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}<image>{% endif %}\
{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """A placeholder per 14 x 14 pixels, and a mark behind each row.

    Attributes:
        around: text that is put before and behind an image.
    """

    marker_token_id: int
    row_token_id: int
    marker: str = MARKER
    settings: bytes = b"rows of 14"
    around: str = ""

    @property
    def written(self) -> str:
        return f"{self.around}{self.marker}{self.around}"

    @property
    def placeholder_token_id(self) -> int:
        return self.marker_token_id

    def expand(self, width: int, height: int) -> ImageTokens:
        columns, rows = -(-width // 14), -(-height // 14)
        row = (self.marker_token_id,) * columns + (self.row_token_id,)
        return ImageTokens(row * rows, (1, rows, columns))


@functools.cache
def image_tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer with two more tokens and a template for images."""
    folder = Path(tempfile.mkdtemp(prefix="baton-image-tokenizer-"))
    made = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made.add_special_tokens([MARKER, ROW_MARK])
    made.save(str(folder / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return Tokenizer(folder)


def rows_layout() -> RowsLayout:
    """Return the layout for `image_tokenizer`."""
    ids = [image_tokenizer().special_token_id(name) for name in (MARKER, ROW_MARK)]
    assert ids[0] is not None
    assert ids[1] is not None
    return RowsLayout(ids[0], ids[1])
