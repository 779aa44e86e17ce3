"""TextOptions: options of chat templates, output parsers, sampling defaults and pooling.

Modules that read checkpoints are imported late, so that `--help` is fast.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.api.errors import ConfigError
from baton.checkpoint.pooling.choices import POOLING_CHOICES, POOLING_HELP
from baton.options import check_limits, option
from router.intake.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS

if TYPE_CHECKING:
    from baton.checkpoint.pooling.setup import PoolingSetup
    from baton.text.tokenizer import Tokenizer
    from router.intake.parsers.choice import OutputParsers

logger = logging.getLogger(__name__)

# The default in place of OpenAI's temperature of 1, with which small models write nonsense.
CALM_SAMPLING = {"temperature": 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options for turning conversations into prompts, and outputs into messages."""

    chat_template: str = option(
        "", help="Jinja file to use instead of the checkpoint's chat template."
    )
    trust_request_chat_template: bool = option(
        False,
        help="Let HTTP requests bring their own chat template (chat_template). It runs in "
        "Jinja's sandbox, in a process with limits; still, it is a program.",
    )
    cut_changing_lines: bool = option(
        True,
        help="Leave out lines that some clients change in each request's system message, such as "
        "Claude Code's x-anthropic-billing-header: no prompt that has them is found in a cache.",
    )
    generation_config: str = option(
        AUTO,
        choices=(AUTO, NONE),
        help="Source of sampling parameters that HTTP requests do not set. auto: the "
        "checkpoint's generation_config.json, or else temperature 0.7. none: OpenAI's API, "
        "temperature 1 and all else off.",
    )
    tool_call_parser: str = option(
        AUTO,
        choices=(AUTO, NONE, *TOOL_CALL_PARSERS.names()),
        help="Format in which the model writes tool calls; auto: by its chat template.",
    )
    reasoning_parser: str = option(
        AUTO,
        choices=(AUTO, NONE, *REASONING_PARSERS.names()),
        help="Format in which the model writes its reasoning; auto: by its chat template.",
    )

    pooling: str = option(AUTO, choices=POOLING_CHOICES, help=POOLING_HELP)

    def __post_init__(self) -> None:
        check_limits(self)

    def sampling_defaults(self, folder: Path) -> dict[str, Any]:
        """Return the values of sampling parameters that HTTP requests leave out, by field.

        Raises ModelLoadError if `generation_config.json` is broken.
        """
        from baton.checkpoint.sampling_defaults import read_sampling_defaults

        if self.generation_config != AUTO:
            return {}
        defaults, source = read_sampling_defaults(folder), "of generation_config.json"
        if not defaults:
            defaults, source = dict(CALM_SAMPLING), "as generation_config.json has none"
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("sampling defaults %s: %s", source, shown)
        return defaults

    def read_setup(self, folder: Path) -> PoolingSetup:
        """Return whether the model generates text and what it pools; raises ConfigError."""
        from baton.checkpoint.pooling.setup import read_setup

        setup = read_setup(folder, self.pooling)
        generates = "text and " if setup.generates else ""
        logger.info("requests are served for: %s%s", generates, setup.task.value)
        return setup

    def load(self, folder: Path) -> tuple[Tokenizer | None, OutputParsers]:
        """Return a model's tokenizer, if it has one, and its parsers; raises ConfigError."""
        tokenizer = self.make_tokenizer(folder)
        return tokenizer, self.make_parsers(tokenizer)

    def make_tokenizer(self, folder: Path) -> Tokenizer | None:
        """Return the checkpoint's tokenizer, or None.

        Raises ConfigError if the chat template is invalid.
        """
        from baton.text.tokenizer import Tokenizer

        template_file = Path(self.chat_template).expanduser() if self.chat_template else None
        if Tokenizer.exists_in(folder):
            return Tokenizer(folder, chat_template=template_file)
        if template_file is not None:
            raise ConfigError("chat_template: this checkpoint has no tokenizer.json")
        return None

    def make_parsers(self, tokenizer: Tokenizer | None) -> OutputParsers:
        """Return the parsers of the model's outputs."""
        from router.intake.parsers.choice import OutputParsers

        parsers = OutputParsers(tokenizer, self.tool_call_parser, self.reasoning_parser)
        logger.info(
            "outputs: tool-call parser %s, reasoning parser %s",
            parsers.tool_call_parser,
            parsers.reasoning_parser,
        )
        return parsers
