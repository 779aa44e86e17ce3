"""Make clients' request messages for embeddings, scores and labels, and read the answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.api.pooling import Classification, Embedding, Score
from baton.client.messages import RequestOptions, make_prompt
from baton.v1 import inference_pb2

Text = str | Sequence[int]


def embed_request(
    inputs: Sequence[Text], prompt_name: str | None, dimensions: int | None, options: RequestOptions
) -> inference_pb2.EmbedRequest:
    """Return a request for the embeddings of texts or lists of token ids."""
    return inference_pb2.EmbedRequest(
        inputs=map(make_prompt, inputs),
        prompt_name=prompt_name,
        dimensions=dimensions,
        terms=inference_pb2.PooledTerms(**options),
    )


def embeddings_from_proto(response: inference_pb2.EmbedResponse) -> list[Embedding]:
    """Return the embeddings of a response, in the order of the inputs."""
    return [
        Embedding(array("f", one.vector), one.num_prompt_tokens, one.num_cached_tokens)
        for one in response.embeddings
    ]


def score_request(
    queries: Sequence[str], documents: Sequence[str], instruction: str, options: RequestOptions
) -> inference_pb2.ScoreRequest:
    """Return a request for scores that tell how well documents fit queries."""
    return inference_pb2.ScoreRequest(
        queries=queries,
        documents=documents,
        instruction=instruction,
        terms=inference_pb2.PooledTerms(**options),
    )


def scores_from_proto(response: inference_pb2.ScoreResponse) -> list[Score]:
    """Return the scores of a response, in the order of the documents."""
    return [_score_from_proto(one) for one in response.scores]


def rerank_request(
    query: str, documents: Sequence[str], top_n: int, instruction: str, options: RequestOptions
) -> inference_pb2.RerankRequest:
    """Return a request for the documents that fit a query best, in order."""
    return inference_pb2.RerankRequest(
        query=query,
        documents=documents,
        top_n=top_n,
        instruction=instruction,
        terms=inference_pb2.PooledTerms(**options),
    )


def ranks_from_proto(response: inference_pb2.RerankResponse) -> list[tuple[int, Score]]:
    """Return the index and score of each document in the answer, best first."""
    return [(one.index, _score_from_proto(one.score)) for one in response.results]


def classify_request(
    inputs: Sequence[Text], options: RequestOptions
) -> inference_pb2.ClassifyRequest:
    """Return a request for the labels of texts or lists of token ids."""
    return inference_pb2.ClassifyRequest(
        inputs=map(make_prompt, inputs), terms=inference_pb2.PooledTerms(**options)
    )


def classifications_from_proto(response: inference_pb2.ClassifyResponse) -> list[Classification]:
    """Return the labels of a response, in the order of the inputs."""
    return [
        Classification(
            one.label, tuple(one.probabilities), one.num_prompt_tokens, one.num_cached_tokens
        )
        for one in response.classifications
    ]


def _score_from_proto(one: inference_pb2.Score) -> Score:
    return Score(one.score, one.num_prompt_tokens, one.num_cached_tokens)
