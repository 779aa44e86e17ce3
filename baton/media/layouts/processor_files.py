"""ProcessorFiles: the settings of a checkpoint's image processor, read from its files.

transformers reads the same files in the same order: ``processor_config.json``, which may contain
the image processor's settings, and ``preprocessor_config.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.bounded_files import read_object
from baton.api.errors import ModelLoadError
from baton.checkpoint.model_folder import PROCESSOR_FILES
from baton.text.tokenizer import Tokenizer

_MAX_INTEGER = 2**31 - 1
_DIGEST_BYTES = 16
# Architecture -> processor class, for checkpoints whose files do not name a processor.
_BY_ARCHITECTURE = {
    "Gemma3ForConditionalGeneration": "Gemma3Processor",
    "Gemma4ForConditionalGeneration": "Gemma4Processor",
    "Idefics3ForConditionalGeneration": "Idefics3Processor",
    "LlavaForConditionalGeneration": "PixtralProcessor",
    "Mistral3ForConditionalGeneration": "PixtralProcessor",
    "Qwen2VLForConditionalGeneration": "Qwen2VLProcessor",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLProcessor",
    "Qwen3VLForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3_5ForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3VLProcessor",
    "SmolVLMForConditionalGeneration": "SmolVLMProcessor",
}


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Settings of a checkpoint's processor.

    Attributes:
        folder: the model folder.
        processor_class: class of the processor in transformers.
        processor: fields of the processor itself.
        image: fields of the image processor.
        model: fields of ``config.json``.
    """

    folder: Path
    processor_class: str
    processor: Mapping[str, Any]
    image: Mapping[str, Any]
    model: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> ProcessorFiles | None:
        """Read the files; None: the checkpoint has no image processor.

        Raises:
            ModelLoadError: a file is broken.
        """
        found = [
            read_object(folder / name) if (folder / name).is_file() else None
            for name in PROCESSOR_FILES
        ]
        processor, image = found[0] or {}, found[1]
        if isinstance(processor.get("image_processor"), dict):
            image = processor["image_processor"]
        if image is None:
            return None
        model = read_object(folder / "config.json")
        names = (
            processor.get("processor_class"),
            image.get("processor_class"),
            _by_architecture(model),
        )
        name = next((name for name in names if isinstance(name, str)), "")
        return cls(folder, name, processor, image, model)

    @property
    def settings(self) -> bytes:
        """Return a digest of all settings that change the pixel values that the model gets."""
        processor = {n: one for n, one in self.processor.items() if n != "image_processor"}
        content = json.dumps([self.processor_class, processor, self.image], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()

    def image_integer(self, *names: str, default: int) -> int:
        """Return an integer field of the image processor.

        Args:
            names: names of nested objects, outermost first, then the field's name.
        """
        return self._integer(self.image, names, default)

    def processor_integer(self, name: str, default: int) -> int:
        """Return an integer field of the processor itself."""
        return self._integer(self.processor, (name,), default)

    def processor_text(self, name: str, default: str) -> str:
        """Return a text field of the processor itself."""
        value = self.processor.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, f"expected a text, found {value!r:.60}")
        return value

    def token_id(self, tokenizer: Tokenizer, text: str) -> int:
        """Return the id of an added token; raises ModelLoadError if the tokenizer has none."""
        token_id = tokenizer.mark_token_id(text)
        if token_id is None:
            raise self.wrong("tokenizer.json", f"has no token {text}")
        return token_id

    def model_integer(self, *names: str, default: int) -> int:
        """Return an integer field of ``config.json``."""
        return self._integer(self.model, names, default)

    def _integer(self, fields: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
        value: Any = fields
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= _MAX_INTEGER:
            raise self.wrong(".".join(names), f"expected an integer >= 1, found {value!r:.60}")
        return value

    def wrong(self, name: str, problem: str) -> ModelLoadError:
        """Return an error about a field of the processor."""
        return ModelLoadError(f"{self.folder}: image processor: {name}: {problem}")


def _by_architecture(model: Mapping[str, Any]) -> str | None:
    names = model.get("architectures")
    known = [_BY_ARCHITECTURE.get(name) for name in names] if isinstance(names, list) else []
    return next((name for name in known if name is not None), None)
