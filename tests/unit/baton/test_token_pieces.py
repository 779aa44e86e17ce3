"""Unit tests of token bytes: joined they are the text, whatever alphabet the vocabulary has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.text.token_pieces import piece_decoder
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
SENTENCE_PIECE = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}


@given(st.text())
def test_the_bytes_of_all_tokens_joined_are_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    joined = b"".join(map(TOKENIZER.token_bytes, token_ids))
    assert joined.decode() == TOKENIZER.decode(token_ids)


def test_a_special_token_is_its_name_and_an_unknown_one_is_nothing() -> None:
    assert TOKENIZER.token_bytes(4095) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("▁the", b" the"), ("<0xE2>", b"\xe2"), ("größe", "größe".encode()), ("<0xZZ>", b"<0xZZ>")],
)
def test_pieces_of_sentence_piece(piece: str, expected: bytes) -> None:
    assert piece_decoder(SENTENCE_PIECE)(piece) == expected


def test_byte_level_pieces_inside_a_sequence_of_decoders() -> None:
    decode = piece_decoder({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]})
    assert decode("Ġthe") == b" the"
    assert decode("âĤ") == b"\xe2\x82"  # two thirds of a euro sign
