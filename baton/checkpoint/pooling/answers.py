"""Check requests against a `PoolingSetup`, and build each request's answer from the pooled values.

Router and `engine.LLM` both use this module, so both refuse the same requests and return
bit-identical answers.
"""

from __future__ import annotations

from baton.api.errors import InvalidRequestError
from baton.api.pooling import (
    Classification,
    Embedding,
    PoolingKind,
    PoolingParams,
    activate,
    make_embedding,
    numbers_of,
    sigmoid,
)
from baton.checkpoint.pooling.setup import PoolingSetup, PoolingTask

_INSTEAD = {
    PoolingTask.NONE: "text only (--pooling last, mean, cls or rerank adds pooling)",
    PoolingTask.EMBED: "embeddings and scores",
    PoolingTask.RERANK: "scores",
    PoolingTask.CLASSIFY: "labels",
}


def check_generates(setup: PoolingSetup) -> None:
    """Raise InvalidRequestError unless the model generates text."""
    if not setup.generates:
        raise InvalidRequestError("model", f"generates no text; it makes {_INSTEAD[setup.task]}")


def check_embeds(setup: PoolingSetup, dimensions: int | None = None) -> None:
    """Raise InvalidRequestError unless the model makes embeddings.

    If ``dimensions`` is given, the embeddings must have at least this many values.
    """
    if setup.task is not PoolingTask.EMBED:
        raise InvalidRequestError("model", f"makes no embeddings; it makes {_made_by(setup)}")
    size = setup.hidden_size
    if dimensions is not None and not 1 <= dimensions <= (size or dimensions):
        limit = f"1 to {size} (the model's embeddings)" if size else "1 or more"
        raise InvalidRequestError("dimensions", f"must be {limit}, got {dimensions}")


def check_classifies(setup: PoolingSetup) -> None:
    """Raise InvalidRequestError unless the model has labels."""
    if setup.task is not PoolingTask.CLASSIFY:
        raise InvalidRequestError("model", f"has no labels; it makes {_made_by(setup)}")


def check_scores(setup: PoolingSetup) -> None:
    """Raise InvalidRequestError unless the model can give a score to a pair of texts."""
    if setup.task is PoolingTask.NONE:
        raise InvalidRequestError("model", f"makes no scores; it makes {_made_by(setup)}")
    if setup.task is PoolingTask.CLASSIFY and len(setup.labels) != 1:
        problem = f"a score needs a classification head with 1 label, it has {len(setup.labels)}"
        raise InvalidRequestError("model", problem)


def _made_by(setup: PoolingSetup) -> str:
    text = " and text" if setup.generates and setup.task is not PoolingTask.NONE else ""
    return _INSTEAD[setup.task] + text


def prompt_before(setup: PoolingSetup, name: str | None) -> str:
    """Return a prompt of the checkpoint: a text to put before an input.

    Args:
        name: name of the prompt; None: the checkpoint's default prompt; empty: no prompt.

    Raises:
        InvalidRequestError: the checkpoint has no prompt of this name.
    """
    chosen = setup.default_prompt if name is None else name
    if not chosen:
        return ""
    if chosen not in setup.prompts:
        known = ", ".join(sorted(setup.prompts)) or "none"
        raise InvalidRequestError(
            "prompt_name", f"{chosen!r:.80} is not known; this checkpoint has: {known}"
        )
    return setup.prompts[chosen]


def params_of(setup: PoolingSetup, answer_ids: tuple[int, ...] = ()) -> PoolingParams:
    """Return the pooling parameters of all requests to a model with this setup.

    Args:
        answer_ids: for RERANK, the ids of the tokens that answer yes and no.
    """
    if setup.task is PoolingTask.RERANK:
        return PoolingParams(PoolingKind.TOKENS, answer_ids)
    if setup.task is PoolingTask.CLASSIFY:
        return PoolingParams(PoolingKind.LABELS)
    return PoolingParams(setup.kind)


def embedding_of(
    setup: PoolingSetup,
    pooled: bytes,
    num_prompt_tokens: int,
    num_cached_tokens: int = 0,
    *,
    dimensions: int | None = None,
) -> Embedding:
    """Return the embedding made from a pooled hidden state."""
    vector = make_embedding(numbers_of(pooled), normalizes=setup.normalizes, dimensions=dimensions)
    return Embedding(vector, num_prompt_tokens, num_cached_tokens)


def score_of(setup: PoolingSetup, pooled: bytes) -> float:
    """Return the score of a pair of texts.

    Args:
        pooled: logits of the pair's last token: of the labels, or of the tokens for yes and no.
    """
    logits = numbers_of(pooled)
    if setup.task is PoolingTask.CLASSIFY:
        return activate(logits, setup.activation)[0]
    logit = logits[0] - logits[1] if len(logits) > 1 else logits[0]
    return logit if setup.gives_logits else sigmoid(logit)


def classification_of(
    setup: PoolingSetup, pooled: bytes, num_prompt_tokens: int, num_cached_tokens: int = 0
) -> Classification:
    """Return the probabilities of the labels and the best label.

    Args:
        pooled: logits of the classification head.
    """
    logits = numbers_of(pooled)
    best = max(range(len(logits)), key=logits.__getitem__)
    probabilities = tuple(activate(logits, setup.activation))
    return Classification(setup.labels[best], probabilities, num_prompt_tokens, num_cached_tokens)
