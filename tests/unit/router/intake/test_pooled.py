"""PooledRequests: what a request may cost a router, and how errors name its inputs."""

from __future__ import annotations

import tracemalloc
from array import array
from dataclasses import replace

import pytest

from baton.access.identity import Limits, Principal
from baton.api.errors import InvalidRequestError, NodeUnavailableError, OverloadedError
from baton.api.outputs import Receipt
from baton.checkpoint.pooling.setup import PoolingSetup, PoolingTask
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2
from router.api.grpc import pooled
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.intake.pooled import PooledRequests, _Numbers
from router.policies.least_tokens import LeastTokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.nodes import make_pool
from tests.fakes.router.router_scene import asynchronous

TOKENIZER = Tokenizer(DEMO_MODEL)
TERMS = Terms(received_at=0.0)
RECEIPT = Receipt(
    num_prompt_tokens=1,
    num_output_tokens=0,
    ttft_s=0.0,
    total_s=0.0,
    prefill_node="p",
    decode_node="",
    prefill=None,
    decode=None,
)


def make_requests(
    task: PoolingTask, *, terms: Terms = TERMS, num_labels: int = 0
) -> PooledRequests:
    setup = PoolingSetup(
        task=task, generates=False, labels=("one",) * num_labels, answer_ids=(1, 2), hidden_size=8
    )
    intake = make_intake(
        Dispatcher(make_pool(), LeastTokens()),
        TOKENIZER,
        vocab_size=4096,
        default_timeout_s=60.0,
        setup=setup,
    )
    return PooledRequests(intake, terms)


@asynchronous
async def test_a_long_query_is_not_copied_for_each_document() -> None:
    requests = make_requests(PoolingTask.RERANK)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="prompt is too long") as caught:
        await requests.score(["x" * 200_000], ["y"] * 2048)
    assert caught.value.field == "documents[0]"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20


@asynchronous
async def test_a_key_over_its_limit_has_nothing_tokenized() -> None:
    limits = Limits(requests_per_minute=1, max_open_requests=4)
    principal = Principal(name="alice", tenant="a", limits=limits)
    requests = make_requests(PoolingTask.EMBED, terms=replace(TERMS, principal=principal))
    requests._intake.admission.charge(principal)
    with pytest.raises(OverloadedError):  # not: is too long
        await requests.embed(["x" * 10**6])


@asynchronous
async def test_a_response_has_a_limited_number_of_labels() -> None:
    requests = make_requests(PoolingTask.CLASSIFY, num_labels=4096)
    with pytest.raises(InvalidRequestError, match="must have at most 512 inputs of 4096 numbers"):
        await requests.classify(["x"] * 513)


@asynchronous
async def test_an_error_names_the_input_as_the_client_does() -> None:
    requests = make_requests(PoolingTask.EMBED)
    with pytest.raises(InvalidRequestError, match=r"^inputs\[1\]: token ids must be"):
        await requests.embed([[1], [4096]], field="inputs")


@asynchronous
async def test_images_are_refused_over_grpc() -> None:
    request = inference_pb2.EmbedRequest(inputs=[inference_pb2.Prompt(text="a", images=[b"x"])])
    with pytest.raises(InvalidRequestError, match=r"^inputs\[0\]\.images: must be empty"):
        await pooled.embed(request, make_requests(PoolingTask.EMBED))


class ChangingWeights(PooledRequests):
    """Pooled requests on nodes whose weights change after the first input."""

    num_run = 0

    async def _run_one(self, call: Call, accepted_at: float) -> _Numbers:
        self.num_run += 1
        weights = "old" if self.num_run == 1 else "new"
        return _Numbers(array("f", [1.0] * 8).tobytes(), replace(RECEIPT, weights=weights))


@asynchronous
async def test_one_version_of_the_weights_computes_all_of_an_answer() -> None:
    given = make_requests(PoolingTask.EMBED)
    requests = ChangingWeights(given._intake, TERMS)
    found = await requests.embed([[1], [2], [3]])
    assert {one.weights for one in found.receipts} == {"new"}
    assert requests.num_run == 4
    requests = ChangingWeights(given._intake, TERMS)
    with pytest.raises(NodeUnavailableError, match="weights changed meanwhile"):
        await requests.score(["a"], ["b", "c"])  # the query has old weights
