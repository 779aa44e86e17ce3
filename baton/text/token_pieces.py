"""Token pieces: convert a vocabulary's spelling of a token to the token's bytes.

Vocabularies consist of texts, so they spell bytes by characters: GPT-2's byte-level BPE ("Ġthe" is
" the"), or SentencePiece's ("▁the" is " the", "<0xE2>" is a byte).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders whose result for a token depends only on the token and on whether it is the first.
_LOCAL = {"Replace", "Metaspace", "WordPiece"}
_ANCHOR = "x"  # decoded before a token, so that the token is not the first


class LibraryTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that this module uses."""

    @property
    def decoder(self) -> Any: ...

    def id_to_token(self, id: int) -> str | None: ...


def piece_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function that converts a piece to its bytes.

    Args:
        decoder: the field ``decoder`` of a `tokenizer.json`.
    """
    if "ByteLevel" in _kinds(decoder):
        return _byte_level_bytes()
    return _sentence_piece_bytes


class OutputPieces:
    """The bytes that each token adds to an output, for vocabularies where no other token matters.

    `output_pieces` makes these objects. Each token's bytes are cached.

    Attributes:
        has_byte_tokens: whether some tokens are single bytes, which spell characters that have no
            token.
        replaced: pairs of an old text and its replacement, to apply in order to the joined text.
        stripped: character to remove afterwards from the text's beginning, at most ``num_stripped``
            times.
        rewrite: makes the output from the whole joined text, if the decoder needs all of it;
            None: the attributes above are enough.
    """

    def __init__(
        self,
        spell: Callable[[int, bool], bytes | None],
        *,
        has_byte_tokens: bool = False,
        replaced: tuple[tuple[str, str], ...] = (),
        stripped: str = "",
        num_stripped: int = 0,
        rewrite: Callable[[str], str] | None = None,
    ) -> None:
        self.has_byte_tokens = has_byte_tokens
        self.replaced = replaced
        self.rewrite = rewrite
        self.stripped = stripped
        self.num_stripped = num_stripped
        self._spell = spell
        self._later = _Memory(lambda token_id: spell(token_id, False) or b"")

    def first(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that begins an output; None if it has no text."""
        return self._spell(token_id, True)

    def later(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of tokens that do not begin an output."""
        return b"".join(map(self._later.__getitem__, token_ids))


class _Memory(dict[int, bytes]):
    """Cache of the bytes of each token, which are computed at first use."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._look_up(token_id)
        return found


def output_pieces(
    tokenizer: LibraryTokenizer,
    description: Mapping[str, Any] | None,
    skipped: Collection[int],
) -> OutputPieces | None:
    """Return the bytes that each token of a vocabulary adds; None if other tokens change them.

    Args:
        description: the field ``decoder`` of the vocabulary's `tokenizer.json`.
        skipped: ids of tokens without text.
    """

    def by_id(spell: Callable[[str, bool], bytes]) -> Callable[[int, bool], bytes | None]:
        def look_up(token_id: int, is_first: bool) -> bytes | None:
            piece = None if token_id in skipped else tokenizer.id_to_token(token_id)
            return None if piece is None else spell(piece, is_first)

        return look_up

    # If the tokenizer has no decoder, the library puts blanks between tokens.
    if description is None:
        return OutputPieces(by_id(lambda piece, first: f"{'' if first else ' '}{piece}".encode()))
    parts, behind = _around_fuse(list(_parts(description)))
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"] and not behind:
        in_alphabet = _byte_level_bytes()
        return OutputPieces(by_id(lambda piece, first: in_alphabet(piece)))
    has_bytes = kinds[-1:] == ["ByteFallback"]
    if not set(kinds[: len(kinds) - has_bytes]) <= _LOCAL:
        return None
    decode = _library_decoder(parts)
    if decode([_ANCHOR]) != _ANCHOR:
        return None

    def spell(piece: str, is_first: bool) -> bytes:
        if has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        before = [] if is_first else [_ANCHOR]
        return decode([*before, piece])[len(before) :].encode()

    strip = behind.pop() if behind and behind[-1].get("type") == "Strip" else {}
    texts = [_replaced_text(part) for part in behind]
    if strip.get("stop") or None in texts:
        whole = _library_decoder([*behind, *([strip] if strip else [])])
        return OutputPieces(
            by_id(spell), has_byte_tokens=has_bytes, rewrite=lambda text: whole([text])
        )
    return OutputPieces(
        by_id(spell),
        has_byte_tokens=has_bytes,
        replaced=tuple(text for text in texts if text is not None),
        stripped=strip.get("content", ""),
        num_stripped=strip.get("start", 0),
    )


def _around_fuse(
    parts: list[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Split a list of decoders at ``Fuse``: decoders of single tokens, and of the joined text."""
    kinds = [part.get("type") for part in parts]
    if "Fuse" not in kinds:
        return parts, []
    fuse = kinds.index("Fuse")
    return parts[:fuse], [part for part in parts[fuse:] if part.get("type") != "Fuse"]


def _replaced_text(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return old text and replacement of a ``Replace`` decoder; None for other decoders."""
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if part.get("type") != "Replace" or not text:
        return None
    return str(text), str(part.get("content", ""))


def _library_decoder(parts: list[Mapping[str, Any]]) -> Callable[[list[str]], str]:
    """Return a decoder of the tokenizers library, made of some parts of a field ``decoder``."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    decoder = {"type": "Sequence", "decoders": parts}
    library = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model})
    )
    decode: Callable[[list[str]], str] = library.decoder.decode
    return decode


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    return (str(part.get("type")) for part in _parts(decoder))


def _sentence_piece_bytes(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_level_bytes() -> Callable[[str], bytes]:
    alphabet = _byte_level_alphabet()

    def spell(piece: str) -> bytes:
        found = [alphabet.get(char) for char in piece]
        # A character that is not in the alphabet shows an added token, whose text stands for
        # itself.
        return piece.encode() if None in found else b"".join(filter(None, found))

    return spell


def _byte_level_alphabet() -> dict[str, bytes]:
    """Return GPT-2's alphabet, which maps characters to bytes.

    Printable characters stand for their own byte, and U+0100 and later characters for other bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})
    return alphabet
