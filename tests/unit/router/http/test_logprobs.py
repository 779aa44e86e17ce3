"""Unit tests of logprobs in OpenAI's two forms."""

from __future__ import annotations

from pathlib import Path

from baton.outputs import TokenLogprobs
from baton.tokenizer import Tokenizer
from router.http.logprobs import TokenTexts

TOKENIZER = Tokenizer(Path(__file__).parents[4] / "examples" / "demo_model")
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
    found, offset = TEXTS.completion([DEF, DEF], [None, entry], 4)
    assert found.tokens == ["def", "def"]
    assert found.token_logprobs == [None, -1.0]
    assert found.top_logprobs == [None, {"def": -0.5}]
    assert (found.text_offset, offset) == ([4, 7], 10)


def test_of_tokens_with_one_text_the_best_is_shown() -> None:
    half, other = EURO[0], EURO[1]
    entry = TokenLogprobs(-1.0, ((half, -0.1), (other, -0.2)))
    found, _ = TEXTS.completion([DEF], [entry], 0)
    assert found.top_logprobs == [{"\N{REPLACEMENT CHARACTER}": -0.1}]


def test_without_a_tokenizer_tokens_are_shown_by_id() -> None:
    found, _ = TokenTexts(None).completion([7], [TokenLogprobs(-1.0)], 0)
    assert found.tokens == ["token_id:7"]
