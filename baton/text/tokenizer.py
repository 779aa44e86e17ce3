"""Tokenizer: text to token ids and back, and the checkpoint's chat template.

Torch-free, so that the router, the engine's offline front and the client's tests share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from baton.api.bounded_files import read_file, read_object
from baton.api.errors import InvalidRequestError, ModelLoadError
from baton.text.chat_template import (
    compile_chat_template,
    load_chat_template,
    read_chat_template,
)
from baton.text.continued_message import left_out, up_to_mark, with_last_marked
from baton.text.detokenizer import Detokenizer
from baton.text.token_pieces import OutputPieces, output_pieces, piece_decoder
from baton.text.tool_prompt import with_one_system_turn, with_tools

# So many characters may become one before a text is cut into tokens (Unicode's NFC and NFKC).
_MAX_SHRINKAGE = 4
_MAX_TOKEN_ID = 2**24
_SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]


class Tokenizer:
    """A checkpoint's `tokenizer.json` and chat template.

    Args:
        chat_template: a file to read instead of the checkpoint's own template.

    Attributes:
        folder, template_file: as given.
        chat_template: what conversations go through; None if there is none.
        longest_token_chars: no token stands for more characters of a text.
        special_token_ids: tokens that `decode` leaves out.
        takes_tools: whether the chat template looks at tools.
    """

    def __init__(self, folder: Path, *, chat_template: Path | None = None) -> None:
        """Raises ModelLoadError when the files are missing or broken, ConfigError of the given."""
        self.folder = folder
        self.template_file = chat_template
        path = folder / "tokenizer.json"
        content = read_file(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # Some checkpoints switch these on for training; a prompt is never cut or filled up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"tokenizer: {path} is broken: {str(error)[:500]}") from error
        vocabulary = self._tokenizer.get_vocab()
        if (highest := max(vocabulary.values(), default=0)) > _MAX_TOKEN_ID:
            # To describe itself, the library counts through all ids up to the highest.
            problem = f"a token's id must be at most {_MAX_TOKEN_ID}, got {highest}"
            raise ModelLoadError(f"tokenizer: {path}: {problem}")
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = _described(self._tokenizer.decoder)
        self._bytes_of = piece_decoder(decoder)
        self._decoder = decoder
        self._pieces: dict[frozenset[int], OutputPieces | None] = {}  # by what is skipped
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        if self._tokenizer.normalizer is not None:
            self.longest_token_chars *= _MAX_SHRINKAGE
        config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = special_tokens = {
            name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)
        }
        self.chat_template = (
            load_chat_template(folder, config, special_tokens)
            if chat_template is None
            else read_chat_template(chat_template, special_tokens)
        )

    @property
    def takes_tools(self) -> bool:
        return self.chat_template is not None and self.chat_template.takes_tools

    @classmethod
    def exists_in(cls, folder: Path) -> bool:
        """Say whether the checkpoint has a tokenizer; without one it serves token ids."""
        return (folder / "tokenizer.json").is_file()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text prompt, with the special tokens that the checkpoint adds to one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_long(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the same ids in about half the time; holds the GIL all the while."""
        ids: list[int] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        continues_last: bool = False,
        template: str | None = None,
    ) -> list[int]:
        """Tokenize a conversation, up to where the assistant's answer begins.

        Args:
            tools: functions that the model may call, as OpenAI's API describes them.
            template_options: more variables of the template, such as ``enable_thinking``.
            continues_last: end with the text of the last message, which the answer goes on with.
            template: instead of the checkpoint's; whoever wrote it decides what it costs.

        Raises InvalidRequestError when there is no template or it refuses the messages.
        """
        options: dict[str, Any] = {
            "tools": tools,
            "template_options": template_options,
            "template": template,
        }
        if continues_last:
            text = self._render_continued(messages, options)
        else:
            text = self.render_chat(messages, **options)
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _render_continued(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Render a conversation up to the end of its last message's text, or thought.

        Args:
            options: of `render_chat`.
        """
        source = options["template"]
        if source is None and self.chat_template is not None:
            source = self.chat_template.source(with_tools=bool(options["tools"]))
        thought_tag = "<think>" if "</think>" in (source or "") else ""
        for marked in with_last_marked(messages, thought_tag=thought_tag):
            text = up_to_mark(self.render_chat(marked, **options))
            if text is not None:
                return text
        raise left_out()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """Render the text that `encode_chat` tokenizes; raises what it does.

        A template that takes no tools is given them in messages (`baton/text/tool_prompt.py`).
        """
        chosen = self.chat_template
        if template is not None:
            chosen = compile_chat_template(template, self._special_tokens)
        if chosen is None:
            raise InvalidRequestError("chat", "this checkpoint has no chat template")
        if not tools or chosen.takes_tools:
            try:
                return chosen.render(messages, tools=tools, options=template_options)
            except InvalidRequestError:
                joined = with_one_system_turn(messages)
                if joined is None:
                    raise
            return chosen.render(joined, tools=tools, options=template_options)
        messages = with_one_system_turn(messages) or messages
        try:
            return chosen.render(with_tools(messages, tools), options=template_options)
        except InvalidRequestError:
            # Some know no system message; who sent one is told so.
            if messages and messages[0].get("role") == "system":
                raise
        told = with_tools(messages, tools, in_system_message=False)
        return chosen.render(told, options=template_options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids: the text that a `Detokenizer` makes of all of them.

        It is what the library makes of them, but for byte fallback: there one byte that is part of
        no character makes the library lose all bytes beside it.
        """
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids, last=True)

    def pieces(self, skipped: frozenset[int]) -> OutputPieces | None:
        """Return what each token adds to a text; None when that depends on its neighbours.

        Args:
            skipped: token ids that are no text.
        """
        if skipped not in self._pieces:
            self._pieces[skipped] = output_pieces(self._tokenizer, self._decoder, skipped)
        return self._pieces[skipped]

    def decode_at_once(self, token_ids: Sequence[int], skipped: frozenset[int]) -> str:
        """Decode tokens by the library, those of ``skipped`` left out."""
        kept = [token_id for token_id in token_ids if token_id not in skipped]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def special_token_id(self, name: str) -> int | None:
        """Return the id of a special token by name; None if there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id if token_id in self.special_token_ids else None

    def mark_token_id(self, text: str) -> int | None:
        """Return the id of an added token that grammars name by its id; None: the text is text.

        The grammar library takes added tokens such as ``<tool_call>`` for special ones, even where
        the tokenizer says that they are none: no text of a grammar is ever matched by them.
        """
        token_id: int | None = self._tokenizer.token_to_id(text)
        if token_id not in self._added_token_ids:
            return None
        is_tag = text[:1] == "<" and text[-1:] == ">"
        return token_id if is_tag or token_id in self.special_token_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; not always whole characters."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # the model has more than the tokenizer: padding
            return b""
        if token_id in self._added_token_ids:
            return piece.encode()
        return self._bytes_of(piece)


def _described(decoder: tokenizers.decoders.Decoder | None) -> Any:
    """Return a decoder as `tokenizer.json` has it; None if there is no decoder.

    Describing the whole tokenizer would take as long as reading it.
    """
    return None if decoder is None else json.loads(decoder.__getstate__())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path)


def _token_text(value: object) -> str:
    """Return the text of a special token, written as a string or an object with a ``content``."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)
