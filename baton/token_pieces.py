"""Token pieces: from the way a vocabulary writes a token to the bytes that it stands for.

Vocabularies cannot write bytes, so they have alphabets of their own: that of GPT-2's byte-level BPE
("Ġthe" is " the"), or SentencePiece's ("▁the" is " the", "<0xE2>" is a byte).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """The function for a tokenizer, from the ``decoder`` of its `tokenizer.json`."""
    if "ByteLevel" in _kinds(decoder):
        alphabet = _byte_level_alphabet()
        return lambda piece: b"".join(alphabet.get(char) or char.encode() for char in piece)
    return _sentence_piece_bytes


def _kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


def _sentence_piece_bytes(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)})
    return alphabet
