"""Pairs: make prompts of a query and a document, for models that judge whether they fit.

A checkpoint may have a chat template for the roles ``query`` and ``document``, which
sentence-transformers (5.4 and later) renders. Without this template, a reranker gets the prompt of
Qwen3-Reranker's model card; for a classification head, the tokenizer joins the two texts.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ROLES = ('"query"', "'query'"), ('"document"', "'document'")


def pair_text(query: str, document: str, instruction: str = "") -> str:
    """Return the prompt whose next token answers whether a document fits a query."""
    instruct = instruction or DEFAULT_INSTRUCTION
    asked = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    return f"{_BEFORE}{asked}{_AFTER}"


def takes_pairs(template: str) -> bool:
    """Return whether a chat template knows the roles ``query`` and ``document``."""
    return all(any(written in template for written in role) for role in _ROLES)


def pair_messages(query: str, document: str, instruction: str = "") -> list[Mapping[str, str]]:
    """Return a conversation with the roles ``query`` and ``document``, for a chat template."""
    asked = [{"role": "system", "content": instruction}] if instruction else []
    pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return [*asked, *pair]
