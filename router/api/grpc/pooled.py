"""Convert the calls Embed, Score, Rerank and Classify between protobuf and plain values."""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.errors import InvalidRequestError
from baton.api.outputs import Receipt
from baton.api.pooling import Score
from baton.v1 import inference_pb2
from router.intake.pooled import PooledRequests, Text, check_num_inputs


async def embed(
    request: inference_pb2.EmbedRequest, requests: PooledRequests
) -> tuple[inference_pb2.EmbedResponse, list[Receipt]]:
    """Return the embeddings of a request's inputs, and their receipts."""
    found = await requests.embed(
        _inputs(request.inputs),
        field="inputs",
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
    )
    embeddings = [
        inference_pb2.Embedding(
            vector=one.vector,
            num_prompt_tokens=one.num_prompt_tokens,
            num_cached_tokens=one.num_cached_tokens,
        )
        for one in found.results
    ]
    return inference_pb2.EmbedResponse(embeddings=embeddings), found.receipts


async def score(
    request: inference_pb2.ScoreRequest, requests: PooledRequests
) -> tuple[inference_pb2.ScoreResponse, list[Receipt]]:
    """Return the scores of a request's documents, and their receipts."""
    found = await requests.score(
        request.queries, request.documents, instruction=request.instruction
    )
    scores = [_score_to_proto(one) for one in found.results]
    return inference_pb2.ScoreResponse(scores=scores), found.receipts


async def rerank(
    request: inference_pb2.RerankRequest, requests: PooledRequests
) -> tuple[inference_pb2.RerankResponse, list[Receipt]]:
    """Return a request's documents, best first, and their receipts."""
    found = await requests.score(
        [request.query],
        request.documents,
        fields=("query", "documents"),
        instruction=request.instruction,
    )
    best = sorted(enumerate(found.results), key=lambda one: (-one[1].score, one[0]))
    results = [
        inference_pb2.RankedDocument(index=index, score=_score_to_proto(one))
        for index, one in best[: request.top_n or None]
    ]
    return inference_pb2.RerankResponse(results=results), found.receipts


async def classify(
    request: inference_pb2.ClassifyRequest, requests: PooledRequests
) -> tuple[inference_pb2.ClassifyResponse, list[Receipt]]:
    """Return the labels of a request's inputs, and their receipts."""
    found = await requests.classify(_inputs(request.inputs), field="inputs")
    classifications = [
        inference_pb2.Classification(
            label=one.label,
            probabilities=one.probabilities,
            num_prompt_tokens=one.num_prompt_tokens,
            num_cached_tokens=one.num_cached_tokens,
        )
        for one in found.results
    ]
    response = inference_pb2.ClassifyResponse(classifications=classifications)
    return response, found.receipts


def _score_to_proto(one: Score) -> inference_pb2.Score:
    return inference_pb2.Score(
        score=one.score,
        num_prompt_tokens=one.num_prompt_tokens,
        num_cached_tokens=one.num_cached_tokens,
    )


def _inputs(prompts: Sequence[inference_pb2.Prompt]) -> list[Text]:
    """Return inputs as texts or token ids; raises InvalidRequestError for a conversation."""
    # The number is checked first, because a message may have a million inputs.
    check_num_inputs("inputs", len(prompts))
    found: list[Text] = []
    for place, prompt in enumerate(prompts):
        if prompt.images:
            raise InvalidRequestError(f"inputs[{place}].images", "must be empty: texts only")
        match prompt.WhichOneof("prompt"):
            case "text":
                found.append(prompt.text)
            case "token_ids":
                found.append(prompt.token_ids.ids)
            case _:
                raise InvalidRequestError("inputs", "each needs text or token_ids")
    return found
