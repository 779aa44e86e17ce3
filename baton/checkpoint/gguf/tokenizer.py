"""GGUF tokenizer: rebuilds tokenizer.json from a GGUF file's metadata.

Three kinds: `gpt2` (byte-level BPE with merges), `llama` (SentencePiece with scores, from which
merges are derived) and `gemma4` (SentencePiece with merges). Knows no networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_KINDS = ("gpt2", "llama", "gemma4")
_KEYS = "tokenizer.ggml."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TEMPLATE = "tokenizer.chat_template"
# Limit of a token's length, because all splits of a token are tried if a file has no merges.
# SentencePiece allows 16 characters.
_MAX_TOKEN_CHARS = 1024


class _Vocabulary:
    """The vocabulary of a GGUF file, whose lists are checked when they are read."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.kind = file.metadata.get(f"{_KEYS}model")
        if self.kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise self.wrong("model", f"{self.kind!r} is not supported; supported: {known}")
        self.tokens: Sequence[str] = self._list("tokens", str)
        self.types: Sequence[int] = self._list("token_type", int, [_NORMAL] * len(self.tokens))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def wrong(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {_KEYS}{key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{_KEYS}{key}", default)

    def token_id(self, key: str) -> int | None:
        """Return the token id in the metadata ``key``, or None if the file lacks the key."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.wrong(key, f"must be one of {len(self.tokens)} tokens, got {value!r}")
        return value

    def scores(self) -> Sequence[float]:
        return self._list("scores", float)

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges in order, or None if a file of the kind `llama` has none.

        Raises:
            ModelLoadError: the merges are broken, or are missing in a file of another kind.
        """
        if self.get("merges") is None:
            if self.kind != "llama":
                raise self.wrong("merges", "missing")
            return None
        pairs = []
        for merge in self._list("merges", str, length=None):
            cut = merge.find(" ", 1)  # a pair's first character may be a space
            if cut < 0 or cut + 1 == len(merge):
                raise self.wrong("merges", f"{merge!r} is not a pair")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that the tokenizer finds in a text before it splits the text."""
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and (kind in (_CONTROL, _USER_DEFINED) or self._is_unknown(kind))
        ]

    def _is_unknown(self, kind: int) -> bool:
        return kind == _UNKNOWN and self.kind != "gpt2"

    def _list(
        self, key: str, of: type, default: list[Any] | None = None, length: int | None = -1
    ) -> list[Any]:
        """Return a list of the metadata, checked for its type and for the vocabulary's length.

        Args:
            of: type of the list's items.
            default: list to return if the file lacks the key; None: the key is required.
        """
        value = self.get(key, default)
        if not isinstance(value, list) or not value or not isinstance(value[0], of):
            raise self.wrong(key, f"must be a list of {of.__name__}, got {type(value).__name__}")
        if length is not None and key != "tokens" and len(value) != len(self.tokens):
            raise self.wrong(key, f"has {len(value)} entries for {len(self.tokens)} tokens")
        return value


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of `tokenizer.json`; raises ModelLoadError for an unknown kind."""
    vocabulary = _Vocabulary(file)
    parts = _byte_level(vocabulary) if vocabulary.kind == "gpt2" else _sentence_piece(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **parts,
    }


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`: special tokens and chat template."""
    vocabulary = _Vocabulary(file)
    config: dict[str, Any] = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = vocabulary.token_id(key)
        if token_id is not None:
            config[name] = vocabulary.tokens[token_id]
    default = file.metadata.get(_TEMPLATE)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    for template in (default, *named.values()):
        if template is not None and not isinstance(template, str):
            problem = f"must be a text, got {template!r:.100}"
            raise ModelLoadError(f"{file.path}: {_TEMPLATE}: {problem}")
    if named:
        templates = ({"default": default} if default is not None else {}) | named
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.get("pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        problem = "missing (made by an old converter)" if name is None else f"{name!r} is not known"
        raise vocabulary.wrong("pre", f"{problem}; known: {', '.join(PRE_TOKENIZERS)}")
    pre_tokenizer = PRE_TOKENIZERS[name]
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.composes else None,
        "pre_tokenizer": pre_tokenizer.description(),
        "post_processor": _template(vocabulary, begins_texts=pre_tokenizer.begins_texts),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocabulary, vocabulary.merges() or [], pre_tokenizer=pre_tokenizer),
    }


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    has_prefix = bool(vocabulary.get("add_space_prefix", vocabulary.kind == "llama"))
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = vocabulary.merges()
    if merges is None:
        merges = list(_merges_by_score(vocabulary))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary, begins_texts=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges),
    }


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    *,
    pre_tokenizer: PreTokenizer | None = None,
) -> dict[str, Any]:
    """Return the section ``model`` of `tokenizer.json`.

    Without a pre-tokenizer, characters that are not in the vocabulary become byte tokens.
    """
    unknown = vocabulary.token_id("unknown_token_id") if pre_tokenizer is None else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": pre_tokenizer is None,
        "byte_fallback": pre_tokenizer is None,
        "ignore_merges": pre_tokenizer is not None and pre_tokenizer.takes_whole_words,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _merges_by_score(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the merges: pairs of tokens that SentencePiece would join, in order of their priority.

    SentencePiece joins the neighbours whose joint token has the highest score, so pairs are sorted
    by the score of their joint token. Pairs with the same joint token are sorted by the ids of
    their two tokens.
    """
    ids, scores = vocabulary.ids, vocabulary.scores()
    longest = max(map(len, vocabulary.tokens))
    if longest > _MAX_TOKEN_CHARS:
        problem = f"must have at most {_MAX_TOKEN_CHARS} characters each, got {longest}"
        raise vocabulary.wrong("tokens", problem)
    pairs = [
        (-scores[ids[token]], ids[token[:cut]], ids[token[cut:]])
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED, _UNUSED)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    for _, left, right in sorted(pairs):
        yield vocabulary.tokens[left], vocabulary.tokens[right]


def _template(vocabulary: _Vocabulary, *, begins_texts: bool) -> Mapping[str, Any] | None:
    """Return the post-processor that adds BOS and EOS tokens to a text; None: texts get neither."""
    around = {}
    for key, default in (("bos", begins_texts), ("eos", False)):
        if not vocabulary.get(f"add_{key}_token", default):
            continue
        if (token_id := vocabulary.token_id(f"{key}_token_id")) is not None:
            around[key] = token_id
    if not around:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if "bos" in around:
        token = vocabulary.tokens[around["bos"]]
        single.insert(0, {"SpecialToken": {"id": token, "type_id": 0}})
    if "eos" in around:
        token = vocabulary.tokens[around["eos"]]
        single.append({"SpecialToken": {"id": token, "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            vocabulary.tokens[token_id]: {
                "id": vocabulary.tokens[token_id],
                "ids": [token_id],
                "tokens": [vocabulary.tokens[token_id]],
            }
            for token_id in around.values()
        },
    }
