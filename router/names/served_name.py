"""ServedName: what one name stands for: a base model, an adapter and request defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.adapters.digest import is_digest
from baton.api.errors import ConfigError, ModelLoadError
from baton.text.chat_template import DEFAULT, ChatTemplate
from router.intake.intake import Intake
from router.names.base_model import BaseModel
from router.names.defaults import NO_DEFAULTS, NameDefaults

MAX_NAME_CHARS = 256
# Maximum number of characters of a chat template. The number is limited, because a worker process
# gets the template with each conversation.
MAX_TEMPLATE_CHARS = 2**16
MAX_SOURCE_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedName:
    """A served name and what it stands for; a wrong value raises ConfigError naming the field.

    Attributes:
        base: base model whose nodes compute the requests.
        adapter: digest of the adapter's files, 64 hex characters; empty: no adapter.
        adapter_source: where nodes find the adapter: a path below ``--adapter-root``, a package or
            a hub id; empty: unknown.
        pins_adapter: whether nodes keep the adapter in memory when other adapters need its slot.
        defaults: values for fields that requests leave out.
        chat_template: text of a Jinja template; empty: the base model's template is used.
    """

    name: str
    base: BaseModel
    adapter: str = ""
    adapter_source: str = ""
    pins_adapter: bool = False
    defaults: NameDefaults = NO_DEFAULTS
    chat_template: str = ""

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= MAX_NAME_CHARS and self.name.isprintable()):
            raise ConfigError(
                f"name: must have 1 to {MAX_NAME_CHARS} printable characters, got {self.name!a:.99}"
            )
        if self.adapter and not is_digest(self.adapter):
            raise ConfigError(
                f"adapter: must be 64 hex characters in lower case, got {self.adapter!a:.99}"
            )
        if len(self.adapter_source) > MAX_SOURCE_CHARS or not self.adapter_source.isprintable():
            raise ConfigError(
                f"adapter_source: must have at most {MAX_SOURCE_CHARS} printable characters, "
                f"got {self.adapter_source!a:.99}"
            )
        if len(self.chat_template) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"chat_template: must have at most {MAX_TEMPLATE_CHARS} characters, "
                f"got {len(self.chat_template)}"
            )
        if self.chat_template:
            try:
                ChatTemplate({DEFAULT: self.chat_template}, {}, Path(self.name))
            except ModelLoadError as error:
                reason = str(error).removeprefix("tokenizer: ")
                raise ConfigError(f"chat_template: {reason}") from None

    @property
    def intake(self) -> Intake:
        """The base model's intake."""
        return self.base.intake
