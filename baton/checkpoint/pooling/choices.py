"""Values of the option ``--pooling``; apart from `setup.py`, so that ``--help`` is fast."""

from __future__ import annotations

AUTO, NONE, RERANK = "auto", "none", "rerank"
POOLING_CHOICES = (AUTO, NONE, "last", "mean", "cls", RERANK)
POOLING_HELP = (
    "Pooling of prompts in place of text. auto: as the checkpoint's files say (modules.json of "
    "sentence-transformers, a classification head); none: nothing; last, mean or cls: normalized "
    "embeddings pooled like this; rerank: scores by the logits of yes and no, as Qwen3-Reranker."
)
