"""The `cohere` package: documents ranked by both versions of its API, and its errors."""

from __future__ import annotations

import asyncio
from typing import Any

import cohere

from checks import System, refusal, run

QUERY = "which one reads?"
DOCUMENTS = [f"def {verb}_{name}(self): ..." for verb in ("read", "close") for name in "abc"]
Ranking = list[tuple[int, float]]  # index and score of each document, the best first


def options_of(system: System) -> dict[str, Any]:
    """Return the options of every client."""
    return {"api_key": "none", "base_url": system.root_url, "max_retries": 0}


def ranking_of(answer: Any) -> Ranking:
    return [(one.index, one.relevance_score) for one in answer.results]


def rank(system: System, **fields: Any) -> Ranking:
    """Rank the documents with version 2's client."""
    asked = {"model": system.model, "query": QUERY, "documents": DOCUMENTS, **fields}
    return ranking_of(cohere.ClientV2(**options_of(system)).rerank(**asked))


def documents_are_ranked(system: System) -> None:
    ranking = rank(system)
    assert sorted(index for index, _ in ranking) == list(range(len(DOCUMENTS)))
    scores = [score for _, score in ranking]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert len(set(scores)) > 1
    assert rank(system, documents=DOCUMENTS[::-1])[0][1] == scores[0]


def the_best_documents_alone(system: System) -> None:
    assert rank(system, top_n=2) == rank(system)[:2]
    assert rank(system, priority=3) == rank(system)


def the_older_client_ranks_alike(system: System) -> None:
    client = cohere.Client(**options_of(system))
    asked: dict[str, Any] = {"model": system.model, "query": QUERY}
    answer = client.rerank(**asked, documents=DOCUMENTS, return_documents=True)
    assert ranking_of(answer) == rank(system)
    for one in answer.results:
        assert one.document is not None
        assert one.document.text == DOCUMENTS[one.index]
    objects = [{"text": one} for one in DOCUMENTS]
    assert ranking_of(client.rerank(**asked, documents=objects)) == rank(system)


def rankings_at_once(system: System) -> None:
    async def ask() -> list[Ranking]:
        async with cohere.AsyncClientV2(**options_of(system)) as client:
            asked = {"model": system.model, "query": QUERY, "documents": DOCUMENTS}
            answers = await asyncio.gather(*(client.rerank(**asked) for _ in range(8)))
        return [ranking_of(answer) for answer in answers]

    assert asyncio.run(ask()) == [rank(system)] * 8


def errors_are_its_own(system: System) -> None:
    cases: Any = (
        ("model", {"model": "other"}, cohere.NotFoundError),
        ("top_n", {"top_n": 0}, cohere.BadRequestError),
        ("documents", {"documents": []}, cohere.BadRequestError),
    )
    for field, fields, kind in cases:
        assert field in str(refusal(kind, rank, system=system, **fields))


if __name__ == "__main__":
    run(
        documents_are_ranked,
        the_best_documents_alone,
        the_older_client_ranks_alike,
        rankings_at_once,
        errors_are_its_own,
    )
