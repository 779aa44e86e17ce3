"""Tokenizer: converts text to token ids and back, and renders the checkpoint's chat template.

Needs no torch, so that the router can use this module, too.
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

# Maximum number of characters that Unicode normalization (NFC or NFKC) may join to one character.
_MAX_SHRINKAGE = 4
_MAX_TOKEN_ID = 2**24
_SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]


class Tokenizer:
    """Tokenizer of a checkpoint (its `tokenizer.json`), with the checkpoint's chat template.

    Args:
        chat_template: file to use in place of the checkpoint's template.

    Attributes:
        folder: folder of the checkpoint.
        template_file: the argument ``chat_template``.
        chat_template: template for conversations; None: the checkpoint has none.
        longest_token_chars: maximum number of characters of a text that one token can cover.
        special_token_ids: tokens that `decode` leaves out by default.
        takes_tools: whether the chat template uses tools.
    """

    def __init__(self, folder: Path, *, chat_template: Path | None = None) -> None:
        """Load the files of the tokenizer.

        Raises:
            ModelLoadError: a file of the checkpoint is broken.
            ConfigError: the file ``chat_template`` cannot be used.
        """
        self.folder = folder
        self.template_file = chat_template
        path = folder / "tokenizer.json"
        content = read_file(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # Some checkpoints turn on truncation and padding for training, but prompts must keep
            # all tokens.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"tokenizer: {path} is broken: {str(error)[:500]}") from error
        vocabulary = self._tokenizer.get_vocab()
        if (highest := max(vocabulary.values(), default=0)) > _MAX_TOKEN_ID:
            # The library's time to serialize a tokenizer grows with the highest token id.
            problem = f"a token's id must be at most {_MAX_TOKEN_ID}, got {highest}"
            raise ModelLoadError(f"tokenizer: {path}: {problem}")
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = _described(self._tokenizer.decoder)
        self._bytes_of = piece_decoder(decoder)
        self._decoder = decoder
        self._pieces: dict[frozenset[int], OutputPieces | None] = {}  # skipped token ids -> pieces
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
        """Return whether the checkpoint has a tokenizer; otherwise prompts must be token ids."""
        return (folder / "tokenizer.json").is_file()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids, with the special tokens that the checkpoint adds to texts."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of a pair of texts, with the special tokens that a pair gets."""
        ids: list[int] = self._tokenizer.encode(first, second).ids
        return ids

    def answer_ids(self) -> tuple[int, int]:
        """Return the ids of the tokens ``yes`` and ``no``.

        Raises:
            InvalidRequestError: the vocabulary lacks a token.
        """
        yes, no = map(self._tokenizer.token_to_id, ("yes", "no"))
        if yes is None or no is None:
            raise InvalidRequestError("model", "this checkpoint has no tokens for yes and no")
        return yes, no

    def encode_long(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids in half the time of `encode`, but hold the GIL meanwhile."""
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
        replaced: tuple[str, str] | None = None,
    ) -> list[int]:
        """Return a conversation's token ids, up to where the assistant's answer begins.

        Args:
            tools: functions that the model may call, in the form of OpenAI's API.
            template_options: additional template variables, such as ``enable_thinking``.
            continues_last: whether the prompt ends inside the last message, so that the answer
                continues it.
            template: template to use in place of the checkpoint's. Nothing limits its cost, so use
                this only in a process that can be killed.
            replaced: a part of the rendered text, such as an image's marker, and the text that
                replaces this part before tokenizing.

        Raises:
            InvalidRequestError: there is no template, or the template refuses the messages.
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
        if replaced is not None:
            text = text.replace(*replaced)
        # The rendered text already contains the special tokens.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _render_continued(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Render a conversation up to the end of its last message's text or thought.

        Args:
            options: keyword arguments of `render_chat`.
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
        """Render a conversation up to the beginning of the assistant's answer.

        If the template does not know tools, `baton/text/tool_prompt.py` puts them into messages.
        Raises InvalidRequestError if there is no template, or if it refuses the messages.
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
            # Some templates do not accept any system message. If the client sent a system message,
            # the error is raised.
            if messages and messages[0].get("role") == "system":
                raise
        told = with_tools(messages, tools, in_system_message=False)
        return chosen.render(told, options=template_options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text that a `Detokenizer` makes of token ids.

        The text equals that of the tokenizers library, unless the vocabulary has byte tokens: then
        the library drops all bytes next to an invalid byte.
        """
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids, last=True)

    def pieces(self, skipped: frozenset[int]) -> OutputPieces | None:
        """Return the bytes that each token adds; None if other tokens change these bytes.

        Args:
            skipped: ids of tokens without text.
        """
        if skipped not in self._pieces:
            self._pieces[skipped] = output_pieces(self._tokenizer, self._decoder, skipped)
        return self._pieces[skipped]

    def decode_at_once(self, token_ids: Sequence[int], skipped: frozenset[int]) -> str:
        """Decode tokens with the library, without those in ``skipped``."""
        kept = [token_id for token_id in token_ids if token_id not in skipped]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def special_token_id(self, name: str) -> int | None:
        """Return the id of the special token with this text, or None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id if token_id in self.special_token_ids else None

    def mark_token_id(self, text: str) -> int | None:
        """Return the id of an added token that grammars must name by its id; None for other texts.

        The grammar library treats added tokens such as ``<tool_call>`` as special tokens, even if
        the tokenizer does not, so no text in a grammar matches them.
        """
        token_id: int | None = self._tokenizer.token_to_id(text)
        if token_id not in self._added_token_ids:
            return None
        is_tag = text[:1] == "<" and text[-1:] == ">"
        return token_id if is_tag or token_id in self.special_token_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; they may be only a part of a character."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token_id in self._added_token_ids:
            return piece.encode()
        return self._bytes_of(piece)


def _described(decoder: tokenizers.decoders.Decoder | None) -> Any:
    """Return a tokenizer's decoder in the form of `tokenizer.json`; None: there is no decoder.

    The whole tokenizer is not described, because this takes as long as reading the file.
    """
    return None if decoder is None else json.loads(decoder.__getstate__())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path)


def _token_text(value: object) -> str:
    """Return the text of a special token in a file: a string, or an object's field ``content``."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)
