"""TextOptions: what a user says of how conversations become prompts, and outputs messages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.errors import ConfigError
from baton.api.sampling_defaults import read_sampling_defaults
from baton.text.tokenizer import Tokenizer
from router.intake.parsers.choice import AUTO, NONE, OutputParsers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of the router; see `baton router --help`.

    Attributes:
        chat_template: a file to use instead of the checkpoint's template; empty: none.
        trust_request_chat_template: requests may bring their own.
        tool_call_parser, reasoning_parser: names of parsers, ``auto`` or ``none``.
        generation_config: ``auto``: the checkpoint's recommendations are defaults; or ``none``.
    """

    chat_template: str = ""
    trust_request_chat_template: bool = False
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    generation_config: str = AUTO

    def __post_init__(self) -> None:
        if self.generation_config not in (AUTO, NONE):
            given = self.generation_config
            raise ConfigError(f"generation_config: must be {AUTO} or {NONE}, got {given!r}")

    def sampling_defaults(self, folder: Path) -> dict[str, Any]:
        """What is sampled with where a request does not say; raises ModelLoadError."""
        defaults = read_sampling_defaults(folder) if self.generation_config == AUTO else {}
        if defaults:
            shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
            logger.info("sampling defaults of generation_config.json: %s", shown)
        return defaults

    def load(self, folder: Path) -> tuple[Tokenizer | None, OutputParsers]:
        """What a model's texts need; raises ConfigError of an option that cannot be had."""
        tokenizer = self.make_tokenizer(folder)
        return tokenizer, self.make_parsers(tokenizer)

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

    def make_parsers(self, tokenizer: Tokenizer | None) -> OutputParsers:
        """What outputs go through; raises ConfigError for a name that there is not."""
        parsers = OutputParsers(tokenizer, self.tool_call_parser, self.reasoning_parser)
        logger.info(
            "outputs: tool-call parser %s, reasoning parser %s",
            parsers.tool_call_parser,
            parsers.reasoning_parser,
        )
        return parsers
