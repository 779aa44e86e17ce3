"""Pre-tokenizers: how byte-level vocabularies split a text before merging, by name in GGUF files.

The patterns are from the models' own tokenizers; llama.cpp's `src/llama-vocab.cpp` has the names.
Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
# Like _TEKKEN, but contractions belong to the preceding word, and digits form groups of three.
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_LETTERS, _SIGNS = r"[\p{L}\p{M}]", r"[\p{P}\p{S}]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?{_LETTERS}+| ?{_SIGNS}+[\r\n]*|{_REST}",
)
_QWEN35 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
# Like _O200K, but Chinese characters are split from other characters.
_KIMI_UPPER, _KIMI_LOWER = (f"{kind[:-1]}&&[^\\p{{Han}}]]" for kind in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～\u2018-\u201f\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_LLAMA_CPP_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of vocabularies splits a text.

    Attributes:
        patterns: regexes that split the text, applied one after another; each match becomes a
            piece.
        composes: whether to normalize the text first (Unicode's NFC).
        takes_whole_words: whether a piece of text that is in the vocabulary becomes one token
            without merges.
        begins_texts: whether texts begin with a BOS token if the GGUF file says nothing about this.
    """

    patterns: Sequence[str]
    composes: bool = False
    takes_whole_words: bool = False
    begins_texts: bool = False

    def description(self) -> Mapping[str, Any]:
        """Return the pre-tokenizer in the form of `tokenizer.json`."""
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        to_bytes = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


_GPT2_LIKE = PreTokenizer((_GPT2,))
_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), takes_whole_words=True, begins_texts=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), composes=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2_LIKE),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGIT_BY_DIGIT,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3_LIKE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_O200K,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "qwen35": PreTokenizer((_QWEN35,), composes=True),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_LIKE),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), takes_whole_words=True, begins_texts=True),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "default": PreTokenizer(_LLAMA_CPP_DEFAULT),
}
