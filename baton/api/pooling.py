"""Pooling: how a prompt's hidden states become an embedding, a score or labels.

A node returns unchanged values, such as one hidden state. Router and `engine.LLM` normalize,
shorten and compare them with the functions of this file, so both give bit-identical results.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import mul

from baton.api.errors import InvalidRequestError

MAX_POOLED_BYTES = 2**18
MAX_TOKEN_LOGITS = 16  # maximum number of tokens whose logits a request may ask for


class PoolingKind(Enum):
    """Ways to make one row of values from the hidden states after the last norm.

    LAST, CLS: the last or first token's hidden state. MEAN: the mean over all tokens.
    LABELS: the classification head's logits of the last token. TOKENS: the last token's logits of
    some tokens of the vocabulary.
    """

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    LABELS = "labels"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a request that is pooled and samples no token.

    Attributes:
        token_ids: for TOKENS, the tokens whose logits are returned, in this order; else empty.
    """

    kind: PoolingKind = PoolingKind.LAST
    token_ids: tuple[int, ...] = ()

    @property
    def needs_all_rows(self) -> bool:
        """Return whether pooling needs all hidden states, so that no prefix cache can be used."""
        return self.kind in (PoolingKind.MEAN, PoolingKind.CLS)


def check_pooling_params(params: PoolingParams, *, vocab_size: int, num_labels: int) -> None:
    """Raise InvalidRequestError unless a model can pool with these parameters.

    Args:
        num_labels: number of labels of the model's classification head; 0: it has no such head.
    """
    if params.kind is PoolingKind.LABELS and not num_labels:
        raise InvalidRequestError("pooling", "labels needs a model with a classification head")
    num_tokens = len(params.token_ids)
    if params.kind is not PoolingKind.TOKENS:
        if num_tokens:
            raise InvalidRequestError("pooling", "token_ids are for the kind tokens only")
    elif not 1 <= num_tokens <= MAX_TOKEN_LOGITS:
        raise InvalidRequestError(
            "pooling", f"tokens needs 1 to {MAX_TOKEN_LOGITS} token_ids, got {num_tokens}"
        )
    for token_id in params.token_ids:
        if not 0 <= token_id < vocab_size:
            limit = f"0 to {vocab_size - 1} (the vocabulary)"
            raise InvalidRequestError("pooling", f"token_ids must be {limit}, got {token_id}")


def pooled_problem(pooled: bytes) -> str:
    """Return why bytes from a node are no valid result of pooling; empty if they are valid."""
    if not 0 < len(pooled) <= MAX_POOLED_BYTES or len(pooled) % 4:
        return f"pooled: must be 4 to {MAX_POOLED_BYTES} bytes of float32, got {len(pooled)}"
    if not math.isfinite(sum(numbers_of(pooled))):
        return "pooled: must be finite numbers"
    return ""


def numbers_of(pooled: bytes) -> array[float]:
    """Return the values in a pooled request's result, which nodes send as little-endian float32."""
    numbers = array("f")
    numbers.frombytes(pooled)
    return numbers


# ------------------------------------------------------------------ embeddings


def make_embedding(
    numbers: array[float], *, normalizes: bool, dimensions: int | None = None
) -> array[float]:
    """Return a pooled hidden state as an embedding.

    Keeping only the first dimensions is a method of Kusupati et al. (arXiv:2205.13147).

    Args:
        numbers: the pooled hidden state.
        normalizes: whether to scale the vector to length 1, after it was shortened.
        dimensions: number of first dimensions to keep; None: all.
    """
    if dimensions is not None:
        numbers = numbers[:dimensions]
    return _normalized(numbers) if normalizes else numbers


def _normalized(numbers: array[float]) -> array[float]:
    length = max(math.hypot(*numbers), 1e-12)  # minimum as in torch's `normalize`
    return array("f", [number / length for number in numbers])


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = max(math.hypot(*one) * math.hypot(*other), 1e-12)
    return math.fsum(map(mul, one, other)) / lengths


# ------------------------------------------------------------------ labels and scores


class Activation(Enum):
    """Functions that turn a classification head's logits into probabilities."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


def activate(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the probabilities of logits, or the logits themselves if ``activation`` is NONE."""
    if activation is Activation.NONE:
        return list(logits)
    if activation is Activation.SIGMOID:
        return [sigmoid(logit) for logit in logits]
    most = max(logits)
    parts = [math.exp(logit - most) for logit in logits]
    total = math.fsum(parts)
    return [part / total for part in parts]


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), without overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    part = math.exp(logit)
    return part / (1.0 + part)


# ------------------------------------------------------------------ results


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text.

    Attributes:
        vector: values of the embedding, with the precision of float32.
        num_prompt_tokens: number of tokens of the text and of the prompt before it.
        num_cached_tokens: number of these tokens that were in the prefix cache.
    """

    vector: array[float]
    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document fits a query; a larger score is better."""

    score: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Classification:
    """The probabilities of a text's labels.

    Attributes:
        label: the most probable label.
        probabilities: probability of each label, in the order of the checkpoint's ``id2label``; for
            a regression model, the logits.
    """

    label: str
    probabilities: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
