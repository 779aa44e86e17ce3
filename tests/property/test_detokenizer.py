"""Property test: however an output's tokens are grouped, its text is that of one decode."""

from __future__ import annotations

import random
import time

import pytest

from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.tokenizer_kinds import KINDS, save_tokenizer
from tests.property.num_examples import num_examples

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WORDS = (
    "hello", "the", "größer", "日本語", "👩‍🚀", "🇨🇭", "\n", "  ", " ", "it's", "n't", ".", ",",
    "\t", "é", "e\u0301", "\x00", "▁", "<s>", "</w>", "##x", "Ġ", "<0x0A>", REPLACEMENT, "f(x):",
)  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer(save_tokenizer(request.param, tmp_path_factory.mktemp("kind")))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer("sentence_piece_bpe", tmp_path_factory.mktemp("sp")))


def make_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 12)))


def grouped(rng: random.Random, ids: list[int]) -> list[list[int]]:
    groups, position = [], 0
    while position < len(ids):
        size = rng.choice((0, 1, 1, 2, 3, 7))
        groups.append(ids[position : position + size])
        position += size
    return [*groups, []] if rng.random() < 0.5 or not groups else groups


def shown(tokenizer: Tokenizer, groups: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(group) for group in groups[:-1]]
    return [*pieces, detokenizer.push(groups[-1], last=True)]


def test_any_grouping_of_a_text_is_the_text_of_one_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random("texts")
    for _ in range(num_examples(60)):
        ids = tokenizer.encode(make_text(rng))
        whole = tokenizer.decode(ids)
        assert whole == tokenizer.decode_at_once(ids, tokenizer.special_token_ids)
        for groups in (grouped(rng, ids), [ids], [[one] for one in ids] or [[]]):
            assert "".join(shown(tokenizer, groups)) == whole


def test_any_grouping_of_any_tokens_is_the_text_of_one_decode(tokenizer: Tokenizer) -> None:
    rng, vocab_size = random.Random("tokens"), max(tokenizer.encode("hello the")) + 300
    for _ in range(num_examples(60)):
        ids = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 20))]
        whole = tokenizer.decode(ids)
        for groups in (grouped(rng, ids), [ids], [[one] for one in ids] or [[]]):
            assert "".join(shown(tokenizer, groups)) == whole
        by_library = tokenizer.decode_at_once(ids, tokenizer.special_token_ids)
        if REPLACEMENT not in by_library:
            assert whole == by_library


def test_what_was_shown_is_never_taken_back(tokenizer: Tokenizer) -> None:
    rng = random.Random("prefixes")
    for _ in range(num_examples(30)):
        ids = tokenizer.encode(make_text(rng))
        detokenizer, text = Detokenizer(tokenizer), ""
        for one in ids:
            text += detokenizer.push([one])
            assert tokenizer.decode(ids).startswith(text)


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]  # behind the three special tokens


def test_a_newline_is_shown_at_once_whatever_comes_behind_it(sentence_piece: Tokenizer) -> None:
    """The library has three replacement characters for these three bytes if it gets all at once."""
    hi = sentence_piece.encode("hi")
    ids = hi + byte_ids(b"\n\xf0\x9f")
    assert sentence_piece.decode(ids) == f"hi\n{REPLACEMENT * 2}"
    one_by_one = shown(sentence_piece, [[one] for one in ids])
    assert "".join(one_by_one) == f"hi\n{REPLACEMENT * 2}"
    assert one_by_one[len(hi)] == "\n"
    assert one_by_one[-1] == REPLACEMENT * 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("größe 👩‍🚀".encode(), "größe 👩‍🚀"),
        (b"\x80a", f"{REPLACEMENT}a"),
        (b"\xf0\x9fa\n", f"{REPLACEMENT * 2}a\n"),
        (b"\xe2\x82\xe2\x82\xac", f"{REPLACEMENT * 2}€"),
        (b"  x", " x"),
    ],
)
def test_a_byte_that_is_part_of_no_character_spoils_no_other(
    sentence_piece: Tokenizer, data: bytes, text: str
) -> None:
    ids = byte_ids(data)
    assert sentence_piece.decode(ids) == text
    assert "".join(shown(sentence_piece, [[one] for one in ids])) == text


@pytest.mark.parametrize("step", [1, 1000])
def test_long_outputs_take_time_that_grows_with_them_only(tokenizer: Tokenizer, step: int) -> None:
    ids = (tokenizer.encode("hello the größer 👩‍🚀 ") + [5] * 50) * 300
    began_at = time.process_time()
    detokenizer = Detokenizer(tokenizer)
    for start in range(0, len(ids), step):
        detokenizer.push(ids[start : start + step])
    assert time.process_time() - began_at < 10  # what is quadratic takes minutes
