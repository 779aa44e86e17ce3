"""Tokenizers of every kind that checkpoints bring, trained here on a few lines, as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXT = [
    "def read_config(path):\n    return open(path).read()  # größer\n",
    "It's a test, isn't it? Yes! 日本語 and some more words , too .\n",
    "the the the then there these hello world hello hi",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """Make a byte-level BPE tokenizer, as GPT-2, Llama 3, Qwen and SmolLM have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentence_piece_bpe() -> Tokenizer:
    """Make a tokenizer as of Llama 2 and Mistral: byte fallback, first space removed."""
    tokenizer = _bpe_with_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def sentence_piece_bpe_unstripped() -> Tokenizer:
    """Make a tokenizer as of Gemma: byte fallback, nothing removed."""
    tokenizer = _bpe_with_byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def sentence_piece_bpe_rewritten() -> Tokenizer:
    """Make a tokenizer that rewrites joined text: a match may span two tokens."""
    return _rewritten(decoders.Replace("o\n", "*\n"), decoders.Replace("*\n.", "!"))


def sentence_piece_bpe_rewritten_by_a_regex() -> Tokenizer:
    """Make a tokenizer that rewrites joined text by a pattern, which needs the whole text."""
    return _rewritten(decoders.Replace(Regex("h.*?r"), "-"), decoders.Strip(" ", 1, 0))


def _rewritten(*behind: decoders.Decoder) -> Tokenizer:
    tokenizer = sentence_piece_bpe()
    before = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*before, *behind])
    return tokenizer


def _bpe_with_byte_fallback() -> Tokenizer:
    """Ids from 3 on are the bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    lines = [f"▁{line.replace(' ', '▁')}".replace("\n", "") for line in TEXT]
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(lines, trainer)
    vocab = {name: index for index, name in enumerate([*SPECIAL, *_BYTES])}
    for piece in trained.get_vocab():
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    return _with_special_tokens(Tokenizer(model))


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def unigram_metaspace() -> Tokenizer:
    """Make a tokenizer as of T5 and multilingual models: Unigram, byte fallback, metaspace."""
    words = ["▁", "▁the", "▁hello", "re", "n", "e", "h", "i", "▁hi", "a", "t", "s", ",", "o", "l"]
    pieces = [(name, 0.0) for name in SPECIAL]
    pieces += [(byte, -9.0) for byte in _BYTES]
    pieces += [(word, -1.0 - index / 10) for index, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="always"), decoders.ByteFallback()]
    )
    return _with_special_tokens(tokenizer)


def word_piece() -> Tokenizer:
    """Make a WordPiece tokenizer, as BERT has."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """Make a tokenizer as of GPT-1 and CLIP: marks end words and decode to spaces between them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Make a tokenizer without a decoder: blanks separate words."""
    words = [*SPECIAL, "hello", "world", "the", "größer", "日本語"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_special_tokens(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        byte_level_bpe,
        sentence_piece_bpe,
        sentence_piece_bpe_unstripped,
        sentence_piece_bpe_rewritten,
        sentence_piece_bpe_rewritten_by_a_regex,
        unigram_metaspace,
        word_piece,
        suffix_bpe,
        word_level,
    )
}


def save_tokenizer(kind: str, folder: Path) -> Path:
    """Write a folder with a `tokenizer.json` of this kind."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return folder
