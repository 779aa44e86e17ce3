"""ServedName: what one name stands for, as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import ConfigError
from baton.text.chat_template import DEFAULT, ChatTemplate
from router.intake.intake import Intake
from router.names.base_model import BaseModel
from router.names.defaults import NO_DEFAULTS, NameDefaults

MAX_NAME_CHARS = 256
MAX_TEMPLATE_CHARS = 2**16  # of a chat template, which goes to a worker with each conversation
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedName:
    """Hold what one name stands for; raises ConfigError naming the field.

    Attributes:
        base: base model whose nodes compute the requests.
        adapter: digest of the adapter's bytes, 64 hex characters; empty: none.
        defaults: values for requests that leave a field out.
        chat_template: text of a Jinja template; empty: the base model's.
    """

    name: str
    base: BaseModel
    adapter: str = ""
    defaults: NameDefaults = NO_DEFAULTS
    chat_template: str = ""

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= MAX_NAME_CHARS and self.name.isprintable()):
            raise ConfigError(
                f"name: must have 1 to {MAX_NAME_CHARS} printable characters, got {self.name!a:.99}"
            )
        if self.adapter and not _DIGEST.fullmatch(self.adapter):
            raise ConfigError(
                f"adapter: must be 64 hex characters in lower case, got {self.adapter!a:.99}"
            )
        if len(self.chat_template) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"chat_template: must have at most {MAX_TEMPLATE_CHARS} characters, "
                f"got {len(self.chat_template)}"
            )
        if self.chat_template:
            ChatTemplate({DEFAULT: self.chat_template}, {}, Path(self.name))  # or it cannot be used

    @property
    def intake(self) -> Intake:
        """The base model's intake."""
        return self.base.intake
