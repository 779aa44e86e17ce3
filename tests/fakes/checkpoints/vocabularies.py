"""Tokenizers of well-known families, trained on this project's pages, and as GGUF files say them.

Their text handling is written as in the models' own `tokenizer.json`; only vocabularies are small.
Refuses to know: how Baton reads GGUF files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import tokenizers
from gguf import TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from tests.fakes.checkpoints.gguf_files import Vocabulary, vocabulary_of

_PAGES = Path(__file__).parents[3] / "docs"
_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: Mapping[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": Sequence([Split(Regex(_LLAMA3), "isolated"), _BYTES]),
    "qwen2": Sequence([Split(Regex(_QWEN2), "isolated"), _BYTES]),
    "tekken": Sequence([Split(Regex(_TEKKEN), "isolated"), _BYTES]),
    "glm4": Sequence([Split(Regex(_LLAMA3), "isolated"), _BYTES]),
    "gpt-4o": Sequence([Split(Regex(_O200K), "isolated"), _BYTES]),
    "qwen35": Sequence([Split(Regex(_QWEN35), "isolated"), _BYTES]),
    "seed-coder": Sequence([Split(Regex(_SEED), "isolated"), _BYTES]),
    "deepseek-v3": Sequence(
        [
            Split(Regex(r"\p{N}{1,3}"), "isolated"),
            Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
            Split(Regex(_DEEPSEEK3), "isolated"),
            _BYTES,
        ]
    ),
    "deepseek-coder": Sequence(
        [
            Split(Regex("[\r\n]"), "isolated"),
            Split(Regex(r"\s?\p{L}+"), "isolated"),
            Split(Regex(r"\s?\p{P}+"), "isolated"),
            Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            Digits(individual_digits=True),
            _BYTES,
        ]
    ),
}
_WHOLE_WORDS = ("llama-bpe", "tekken")
_BEGIN, _END, _SPECIAL, _PLAIN = "<|begin|>", "<|im_end|>", "<|end|>", "<think>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PIECES = (
    "a", "the", " The", "don't", "WE'RE", " ", "  ", "   ", "\n", "\r\n", "\t", "1", "23", "4567",
    "_", "-->", ".", ", ", "é", "e\N{COMBINING ACUTE ACCENT}", "日本", "🙂", "½", "Ⅷ", "٣", "नि",
    "\N{NO-BREAK SPACE}", "한국", "ß", "router", " prefill", "İ", _SPECIAL, _PLAIN,
)  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Return text of pieces that tokenizers treat specially."""
    return "".join(rng.choice(_PIECES) for _ in range(rng.randrange(1, 40)))


@lru_cache
def original(name: str) -> Tokenizer:
    """Load a tokenizer from its model's folder; encode without special tokens to compare."""
    if name == "gemma4":
        return _gemma4()
    return _sentence_piece() if name == "llama" else _byte_level(name)


def _byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in _WHOLE_WORDS))
    tokenizer.normalizer = normalizers.NFC() if name.startswith("qwen") else None
    tokenizer.pre_tokenizer = _CUTS[name]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=sorted(ByteLevel.alphabet())
    )
    tokenizer.train([str(path) for path in sorted(_PAGES.glob("[a-g]*.md"))], trainer)
    tokenizer.add_special_tokens([_BEGIN, _END, _SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(_PLAIN, normalized=False)])
    return tokenizer


def _sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    # Trained on single words, as SentencePiece does; used on whole texts.
    tokenizer.pre_tokenizer = Split(Regex(rf"{_SPACE}?[^{_SPACE}\n]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens]
    )
    tokenizer.train([str(path) for path in sorted(_PAGES.glob("[a-g]*.md"))], trainer)
    parts = json.loads(tokenizer.to_str())
    special = {"<unk>", "<s>", "</s>"}
    parts["added_tokens"] = [t for t in parts["added_tokens"] if t["content"] in special]
    parts["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.add_special_tokens([_SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(_PLAIN, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _gemma4() -> Tokenizer:
    """Make a tokenizer that puts no space before a text, as `GemmaTokenizer` of transformers."""
    parts = json.loads(original("llama").to_str())
    parts["normalizer"] = parts["normalizer"]["normalizers"][1]
    parts["decoder"]["decoders"].pop()
    parts["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return Tokenizer.from_str(json.dumps(parts))


def _byte_level_vocabulary(name: str) -> Vocabulary:
    tokenizer = original(name)
    ids = {f"{key}_token_id": tokenizer.token_to_id(token)
           for key, token in {"bos": _BEGIN, "eos": _END}.items()}  # fmt: skip
    return vocabulary_of(tokenizer, pre=name, fields=ids)


def _sentence_piece_vocabulary() -> Vocabulary:
    """Return the tokens with SentencePiece's scores: the earlier learned, the higher."""
    tokenizer = original("llama")
    found = vocabulary_of(tokenizer)
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    made = {
        "".join(merge.split(" ")): -float(n) for n, merge in reversed([*enumerate(found.merges)])
    }
    types = [
        int(special.get(token, TokenType.BYTE if token.startswith("<0x") else kind))
        for token, kind in zip(found.tokens, found.types, strict=True)
    ]
    return Vocabulary(
        found.tokens, types, kind="llama", pre="default",
        scores=[made.get(token, -1e6 - n) for n, token in enumerate(found.tokens)],
        fields={"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    )  # fmt: skip


def _gemma4_vocabulary() -> Vocabulary:
    """Return the tokens with merges, as the converter of Gemma 4 writes them."""
    of_pieces = _sentence_piece_vocabulary()
    fields = {**(of_pieces.fields or {}), "add_space_prefix": False, "add_bos_token": True}
    merges = vocabulary_of(original("gemma4")).merges
    return replace(of_pieces, kind="gemma4", pre="", merges=merges, fields=fields)


VOCABULARIES: Mapping[str, Callable[[], Vocabulary]] = {
    **{name: partial(_byte_level_vocabulary, name) for name in _CUTS},
    "llama": _sentence_piece_vocabulary,
    "gemma4": _gemma4_vocabulary,
}
