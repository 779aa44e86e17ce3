"""TextOptions: what a user says of how conversations become prompts, and outputs messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of the router; see `baton router --help`.

    Attributes:
        chat_template: a file to use instead of the checkpoint's template; empty: none.
    """

    chat_template: str = ""

    def make_tokenizer(self, folder: Path) -> Tokenizer | None:
        """The checkpoint's; None where it brings none.

        Raises ConfigError when the chat template cannot be used.
        """
        template_file = Path(self.chat_template).expanduser() if self.chat_template else None
        if Tokenizer.exists_in(folder):
            return Tokenizer(folder, chat_template=template_file)
        if template_file is not None:
            raise ConfigError("chat_template: this checkpoint has no tokenizer.json")
        return None
