"""Unit tests of logprobs in OpenAI's two forms."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from baton.api.outputs import TokenLogprobs
from baton.text.tokenizer import Tokenizer
from router.api.http.logprobs import TextOffsets, TokenTexts
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
TEXTS = TokenTexts(TOKENIZER)
DEF, EURO = TOKENIZER.encode("def")[0], TOKENIZER.encode("€")


def test_chat_logprobs_carry_bytes_so_that_parts_of_characters_are_not_lost() -> None:
    assert len(EURO) > 1
    entries = [TokenLogprobs(-1.0, ((DEF, -0.5),)) for _ in EURO]
    content = TEXTS.chat(EURO, entries).content
    assert bytes(byte for token in content for byte in token.bytes).decode() == "€"
    assert "\N{REPLACEMENT CHARACTER}" in content[0].token
    top = content[0].top_logprobs[0]
    assert (top.token, bytes(top.bytes), top.logprob) == ("def", b"def", -0.5)


def test_completion_logprobs_are_aligned_lists_and_offsets_go_on() -> None:
    entry = TokenLogprobs(-1.0, ((DEF, -0.5),))
    offsets = TextOffsets(TEXTS, 4)
    found = TEXTS.completion([DEF, DEF], [None, entry], offsets)
    assert found.tokens == ["def", "def"]
    assert found.token_logprobs == [None, -1.0]
    assert found.top_logprobs == [None, {"def": -0.5}]
    assert (found.text_offset, offsets.next_offset(DEF)) == ([4, 7], 10)


def test_of_tokens_with_one_text_the_best_is_shown() -> None:
    half, other = EURO[0], EURO[1]
    entry = TokenLogprobs(-1.0, ((half, -0.1), (other, -0.2)))
    found = TEXTS.completion([DEF], [entry], TextOffsets(TEXTS))
    assert found.top_logprobs == [{"\N{REPLACEMENT CHARACTER}": -0.1}]


def test_without_a_tokenizer_tokens_are_shown_by_id() -> None:
    texts = TokenTexts(None)
    found = texts.completion([7, 8], [TokenLogprobs(-1.0)] * 2, TextOffsets(texts))
    assert found.tokens == ["token_id:7", "token_id:8"]
    assert found.text_offset == [0, 0]  # of a text that is empty


def offsets_of(token_ids: list[int], tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    offsets = TextOffsets(TokenTexts(tokenizer))
    return [offsets.next_offset(token_id) for token_id in token_ids]


def test_parts_of_a_character_begin_where_it_does_and_special_tokens_take_no_room() -> None:
    """Regression: each part counted as a character, and hidden special tokens as shown text."""
    special = min(TOKENIZER.special_token_ids)
    token_ids = [DEF, *EURO, special, DEF, *EURO, DEF]
    assert TOKENIZER.decode(token_ids) == "def€def€def"
    in_euro = len(EURO)
    assert offsets_of(token_ids) == [0, *[3] * in_euro, 4, 4, *[7] * in_euro, 8]


BYTES = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(4096)}
TEXT_OF_BYTES = st.lists(st.sampled_from([b for b in BYTES if b]), max_size=12)


@given(TEXT_OF_BYTES)
@example([b"\xe2", b"a", b"\xe2", b"\xe2", b"\x82"])
@example([b"\xe0", b"\x80", b"a"])  # begins no character
@example([b"\xef", b"\xbf", b"\xbd", b"a"])  # is the replacement character
def test_offsets_agree_with_the_text_whatever_the_bytes_are(pieces: list[bytes]) -> None:
    """Where a token begins with a character, the text goes on from there with what follows."""
    token_ids = [BYTES[piece] for piece in pieces]
    text = TOKENIZER.decode(token_ids)
    offsets = offsets_of(token_ids)
    assert offsets == sorted(offsets)
    special = TOKENIZER.special_token_ids
    for index, (token_id, offset) in enumerate(zip(token_ids, offsets, strict=True)):
        shown = b"" if token_id in special else pieces[index]
        if shown and not 0x80 <= shown[0] < 0xC0:
            assert text[offset:] == TOKENIZER.decode(token_ids[index:])
            assert text[:offset] == TOKENIZER.decode(token_ids[:index])


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Make a tokenizer that writes blanks as Llama 2 does, without a text's first one."""
    folder = tmp_path_factory.mktemp("sentence_piece")
    blank = "\N{LOWER ONE EIGHTH BLOCK}"
    vocab = {piece: i for i, piece in enumerate(["<unk>", f"{blank}hi", "<0xC3>", "<0xA4>", "x"])}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    parts = tokenizers.decoders
    built.decoder = parts.Sequence(
        [parts.Replace(blank, " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    built.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_a_blank_that_the_text_leaves_out_takes_no_room(sentence_piece: Tokenizer) -> None:
    token_ids = [1, 2, 3, 1, 4]
    assert sentence_piece.decode(token_ids) == "hiä hix"
    assert offsets_of(token_ids, sentence_piece) == [0, 2, 2, 3, 6]
