"""PoolingSetup: tells whether and how a checkpoint makes embeddings, scores or labels.

Reads config.json, and the files that sentence-transformers writes: ``modules.json``, the pooling's
``config.json`` and ``config_sentence_transformers.json``. Needs no torch and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from baton.api.bounded_files import parse_json, read_file, read_object
from baton.api.errors import ConfigError, ModelLoadError
from baton.api.pooling import Activation, PoolingKind
from baton.checkpoint.pooling.architectures import Head, read_labels, split_architecture
from baton.checkpoint.pooling.choices import AUTO, NONE, POOLING_CHOICES, RERANK

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
_MAX_MODULES = 16
_MAX_PROMPT_CHARS = 65_536
_TRANSFORMER, _POOLING, _NORMALIZE, _LOGIT_SCORE = (
    "Transformer", "Pooling", "Normalize", "LogitScore",
)  # fmt: skip
_KNOWN = (_TRANSFORMER, _POOLING, _NORMALIZE, _LOGIT_SCORE)
# Kinds of pooling by their names in files of sentence-transformers, before and since version 5.4.
_KINDS = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
    "lasttoken": PoolingKind.LAST,
    "mean": PoolingKind.MEAN,
    "cls": PoolingKind.CLS,
}


class PoolingTask(Enum):
    """Purposes for which a model's hidden states are pooled."""

    NONE = "none"
    EMBED = "embed"
    RERANK = "rerank"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSetup:
    """Settings with which a model makes embeddings, scores or labels.

    Attributes:
        generates: whether requests that generate text are also served.
        kind: how embeddings are pooled.
        normalizes: whether embeddings have length 1.
        prompts: texts to put before an input, by name.
        default_prompt: name of the prompt of requests that name none; empty: no prompt.
        labels: names of the classification head's labels.
        activation: function that turns the head's logits into probabilities.
        answer_ids: for RERANK, the ids of the tokens that answer yes and no; empty: the tokenizer's
            ``yes`` and ``no``. If there is only one id, the score is made of this token's logit.
        gives_logits: whether scores are logits; otherwise they are between 0 and 1.
        hidden_size: number of values in an embedding; 0: unknown.
    """

    task: PoolingTask = PoolingTask.NONE
    generates: bool = True
    kind: PoolingKind = PoolingKind.LAST
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.NONE
    answer_ids: tuple[int, ...] = ()
    gives_logits: bool = False
    hidden_size: int = 0


GENERATES_ONLY = PoolingSetup()


def read_setup(folder: Path, asked: str = AUTO) -> PoolingSetup:
    """Read which embeddings, scores or labels the model of a folder can compute.

    Args:
        asked: value of the option ``--pooling``, one of `POOLING_CHOICES`.

    Raises:
        ModelLoadError: a file is broken, or needs something that is not supported.
        ConfigError: the option does not fit the checkpoint.
    """
    if asked not in POOLING_CHOICES:
        raise ConfigError(
            f"pooling: must be one of {', '.join(POOLING_CHOICES)}, got {asked!r:.60}"
        )
    config = read_object(folder / "config.json")
    head = _head(config)
    if head is Head.LABELS:
        if asked != AUTO:
            problem = f"a checkpoint with a classification head needs auto, got {asked}"
            raise ConfigError(f"pooling: {problem}")
        return _of_labels(folder, config)
    if asked in (NONE, RERANK):
        _needs_tokens(head)
    if asked == NONE:
        return GENERATES_ONLY
    prompts, default_prompt, texts = _prompts(folder / PROMPTS)
    setup = PoolingSetup(
        task=PoolingTask.RERANK if asked == RERANK else PoolingTask.EMBED,
        generates=head is Head.TOKENS,
        prompts=prompts,
        default_prompt=default_prompt,
        hidden_size=_hidden_size(config),
    )
    if asked == RERANK:
        return setup
    if asked != AUTO:
        return replace(setup, kind=PoolingKind(asked))
    modules = _modules(folder)
    if _LOGIT_SCORE in modules:
        _needs_tokens(head)
        return replace(
            setup,
            task=PoolingTask.RERANK,
            generates=False,
            answer_ids=_answer_ids(modules[_LOGIT_SCORE] / "config.json"),
            gives_logits=_gives_logits(texts),
        )
    if _POOLING in modules:
        kind, normalizes = _kind(modules[_POOLING] / "config.json"), _NORMALIZE in modules
        return replace(setup, generates=False, kind=kind, normalizes=normalizes)
    return GENERATES_ONLY if setup.generates else setup


def _head(config: Mapping[str, Any]) -> Head:
    """Return the head of the model that a config.json describes."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    return split_architecture(name)[1] if isinstance(name, str) else Head.TOKENS


def _hidden_size(config: Mapping[str, Any]) -> int:
    of_text = config.get("text_config")
    found = {**config, **of_text} if isinstance(of_text, dict) else config
    size = found.get("hidden_size")
    return size if type(size) is int and size > 0 else 0


def _needs_tokens(head: Head) -> None:
    if head is not Head.TOKENS:
        raise ConfigError("pooling: this checkpoint has no output head: none and rerank need one")


def _of_labels(folder: Path, config: Mapping[str, Any]) -> PoolingSetup:
    try:
        labels = read_labels(config.get)
    except ModelLoadError as error:
        raise ModelLoadError(f"model: {folder}/{error}") from None
    kinds = {
        "regression": Activation.NONE,
        "multi_label_classification": Activation.SIGMOID,
        "single_label_classification": Activation.SOFTMAX,
    }
    found = kinds.get(str(config.get("problem_type")))
    # If config.json names no activation, sentence-transformers uses the sigmoid for a single label.
    if found is None:
        found = Activation.SIGMOID if len(labels) == 1 else Activation.SOFTMAX
    of_cross_encoder = config.get("sentence_transformers")
    gives_logits = isinstance(of_cross_encoder, dict) and _gives_logits(of_cross_encoder)
    return PoolingSetup(
        task=PoolingTask.CLASSIFY,
        generates=False,
        labels=labels,
        activation=Activation.NONE if gives_logits else found,
    )


def _gives_logits(texts: Mapping[str, Any]) -> bool:
    """Return whether the settings of a cross encoder say that its scores are logits."""
    return str(texts.get("activation_fn", "")).rpartition(".")[2] == "Identity"


# ------------------------------------------------------------------ sentence-transformers' files


def _modules(folder: Path) -> dict[str, Path]:
    """Return the folder of each module in ``modules.json``, by the module's kind, in order.

    Returns an empty dictionary if there is no ``modules.json``.
    """
    path = folder / MODULES
    if not path.is_file():
        return {}
    try:
        listed = parse_json(read_file(path).decode())
    except ValueError as error:  # includes texts that are not UTF-8
        _refuse(path, str(error))
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_MODULES:
        _refuse(path, f"must be a list of 1 to {_MAX_MODULES} modules")
    found: dict[str, Path] = {}
    for module in listed:
        kind, place = (
            (module.get("type"), module.get("path", "")) if isinstance(module, dict) else ("", "")
        )
        name = str(kind).rpartition(".")[2]
        if name not in _KNOWN:
            supported = f"supported: {', '.join(_KNOWN)}; or give --pooling last, mean or cls"
            _refuse(path, f"{name!r:.60} is not supported; {supported}")
        if not isinstance(place, str) or ".." in place or PurePosixPath(place).is_absolute():
            _refuse(path, f"path: {place!r:.60} is not a folder of this checkpoint")
        found[name] = folder / place
    return found


def _kind(path: Path) -> PoolingKind:
    """Read the kind of pooling from the file of the pooling module."""
    content = read_object(path)
    new = content.get("pooling_mode")
    if new is None:
        named = [name for name, value in content.items() if name in _KINDS and value is True]
        modes = (
            name.startswith("pooling_mode_") and value is True for name, value in content.items()
        )
        num_modes = sum(modes)
    else:
        named = [name for name in (new if isinstance(new, list) else [new]) if name in _KINDS]
        num_modes = len(new) if isinstance(new, list) else 1
    if num_modes != 1 or len(named) != 1:
        _refuse(path, "needs one pooling: the last token, the mean, or the first token (cls)")
    kind = _KINDS[named[0]]
    if content.get("include_prompt") is False and kind is PoolingKind.MEAN:
        _refuse(path, "include_prompt: a mean without the prompt's tokens is not supported")
    return kind


def _prompts(path: Path) -> tuple[dict[str, str], str, Mapping[str, Any]]:
    """Read the prompts, the name of the default prompt, and all fields of the file.

    The results are empty if the file lacks them or is missing.
    """
    if not path.is_file():
        return {}, "", {}
    content = read_object(path)
    prompts = content.get("prompts") or {}
    is_right = isinstance(prompts, dict) and all(
        isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in prompts.values()
    )
    if not is_right:
        _refuse(path, f"prompts: must be texts of at most {_MAX_PROMPT_CHARS} characters, by name")
    default = content.get("default_prompt_name") or ""
    if default and default not in prompts:
        _refuse(path, f"default_prompt_name: {default!r:.60} is no name of prompts")
    return dict(prompts), str(default), content


def _answer_ids(path: Path) -> tuple[int, ...]:
    """Read the ids of the tokens whose logits give a score: for yes and no, or for yes alone."""
    content = read_object(path)
    given = [content.get("true_token_id"), content.get("false_token_id")]
    given = given[:1] if given[1] is None else given
    ids = tuple(one for one in given if type(one) is int and one >= 0)
    if len(ids) != len(given):
        _refuse(path, "true_token_id and false_token_id must be token ids")
    return ids


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ModelLoadError(f"model: {path}: {problem}")
