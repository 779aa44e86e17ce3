"""Embeddings, scores and labels by prefill nodes alone: the bits of one process, over every API."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from baton import Client
from baton.api.errors import InvalidRequestError
from engine import LLM
from tests.fakes.checkpoints.pooling_models import (
    LABELS,
    make_classifier,
    make_embedder,
    make_reranker,
)
from tests.fakes.processes.deployments import run_deployment

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]

MAKE = {"embedder": make_embedder, "reranker": make_reranker}
TEXTS = ["def read_config(path):", "x", "class Reader:\n    pass\n" * 20, "import os"]
QUERY, DOCUMENTS = "which one reads?", [f"def read_{name}(self): ..." for name in "abcd"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 256}


@dataclass(frozen=True, slots=True)
class Site:
    """Three models behind one router without decode nodes, and the same models in this process."""

    url: str
    address: str
    alone: dict[str, LLM]

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer's object, which must be no error."""
        status, answer = self.try_post(path, **body)
        assert status == 200, answer
        return answer

    def try_post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Return the status and the object of an answer."""
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), kind)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@contextlib.contextmanager
def open_site(
    make: Mapping[str, Callable[[Path], Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Serve models, each by one prefill node."""
    folders = {name: tmp_path_factory.mktemp(name) for name in make}
    for name, folder in folders.items():
        make[name](folder)
    first, *others = map(str, folders.values())
    names = [f"--served-model-name={name}={folder}" for name, folder in folders.items()]
    with run_deployment(
        *("--num-blocks", "256"),
        model=first,
        more_models=others,
        num_decode=0,
        http=True,
        router_args=names if others else ["--served-model-name", next(iter(make))],
    ) as running:
        alone = {name: LLM(str(folder), **OPTIONS) for name, folder in folders.items()}
        yield Site(f"http://{running.config.http_listen}", running.config.listen, alone)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(MAKE, tmp_path_factory) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_the_openai_client_gets_the_bits_of_one_process(site: Site, client: openai.OpenAI) -> None:
    expected = site.alone["embedder"].embed(TEXTS)
    found = client.embeddings.create(model="embedder", input=TEXTS)  # asks for base64
    assert [list(one.embedding) for one in found.data] == [one.vector.tolist() for one in expected]
    assert [one.index for one in found.data] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == sum(one.num_prompt_tokens for one in expected)
    whole = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format="float")
    assert whole.data[0].embedding == expected[0].vector.tolist()
    cut = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)
    ours = site.alone["embedder"].embed(TEXTS[0], dimensions=8)[0]
    assert cut.data[0].embedding == ours.vector.tolist()


def test_inputs_have_all_forms_and_prompts(site: Site) -> None:
    llm = site.alone["embedder"]
    for given, inputs in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [8]], [[5, 6], [8]])):
        answer = site.post("/v1/embeddings", model="embedder", input=given)
        expected = [one.vector.tolist() for one in llm.embed(inputs)]
        assert [one["embedding"] for one in answer["data"]] == expected
    for fields in ({"prompt_name": "query"}, {"input_type": "search_query"}):
        answer = site.post("/v1/embeddings", model="embedder", input="birds", **fields)
        named = llm.embed("birds", prompt_name="query")[0].vector.tolist()
        assert answer["data"][0]["embedding"] == named


def test_bits_do_not_depend_on_company(site: Site) -> None:
    expected = site.alone["embedder"].embed(TEXTS)
    with ThreadPoolExecutor(8) as pool, Client(site.address) as client:
        calls = [pool.submit(client.embed, TEXTS[i % 3 :], model="embedder") for i in range(12)]
        for number, call in enumerate(calls):
            vectors = [one.vector for one in call.result()]
            assert vectors == [one.vector for one in expected[number % 3 :]]


def test_documents_are_ranked_alike_by_every_api(site: Site) -> None:
    scores = [one.score for one in site.alone["reranker"].score(QUERY, DOCUMENTS)]
    best = sorted(range(4), key=lambda place: -scores[place])
    asked: dict[str, Any] = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    answer = site.post("/v1/rerank", **asked, include_receipt=True)
    assert [one["index"] for one in answer["results"]] == best
    assert [one["relevance_score"] for one in answer["results"]] == [scores[i] for i in best]
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[best[0]]}
    receipts = answer["baton"]["receipts"]
    assert {one["decode_node"] for one in receipts} == {""}
    assert {one["num_output_tokens"] for one in receipts} == {0}
    assert all(one["prefill"]["num_cached_tokens"] >= 64 for one in receipts[1:])
    objects = [{"text": one} for one in DOCUMENTS]
    newer = site.post("/v2/rerank", **asked | {"documents": objects}, top_n=2)
    assert [one["index"] for one in newer["results"]] == best[:2]
    assert "document" not in newer["results"][0]
    assert newer["meta"]["api_version"] == {"version": "2"}
    scored = site.post("/score", model="reranker", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in scored["data"]] == scores
    with Client(site.address) as client:
        ranked = client.rerank(QUERY, DOCUMENTS, model="reranker", top_n=3)
        assert [index for index, _ in ranked] == best[:3]
        found = client.score([QUERY], DOCUMENTS, model="reranker")
    assert [one.score for one in found] == scores


def test_texts_are_compared_by_their_embeddings(site: Site) -> None:
    ours = site.alone["embedder"].score("birds", TEXTS)
    with Client(site.address) as client:
        found = client.score(["birds"], TEXTS, model="embedder")
    assert [one.score for one in found] == [one.score for one in ours]


@pytest.mark.large
def test_texts_are_classified(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_site({"classifier": make_classifier}, tmp_path_factory) as site:
        expected = site.alone["classifier"].classify(TEXTS)
        answer = site.post("/classify", model="classifier", input=TEXTS)
        assert [one["label"] for one in answer["data"]] == [one.label for one in expected]
        probabilities = [one.probabilities for one in expected]
        assert [tuple(one["probs"]) for one in answer["data"]] == probabilities
        assert answer["data"][0]["num_classes"] == len(LABELS)
        with Client(site.address) as client:
            found = client.classify(TEXTS)
            assert [one.probabilities for one in found] == probabilities
            with pytest.raises(InvalidRequestError, match="model: generates no text"):
                client.generate("a")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]},
         "model: generates no text; it makes embeddings and scores"),
        ("/classify", {"input": "a"}, "model: has no labels; it makes embeddings and scores"),
        ("/v1/embeddings", {"input": []}, "input: must have 1 to 2048 inputs, got 0"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input: must be all texts"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions: must be 1 to 32"),
        ("/v1/embeddings", {"input": [[1], [4096]]}, "input[1]: token ids must be 0 to 4095"),
        ("/v1/embeddings", {"input": ["a", "a" * 10**6]}, "prompt is too long"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name: 'x' is not known"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "normalize: must be true or"),
        ("/v1/embeddings", {"input": "a", "output_dtype": "int8"}, "output_dtype: must be float"),
        ("/v1/score", {"queries": "a", "documents": "b", "use_activation": False},
         "use_activation: must be true or absent"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]: must have at least"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n: must be 1 or more"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "queries: must be one, or"),
        ("/v1/score", {"queries": "a"}, "documents: or text_2 is needed"),
    ],
)  # fmt: skip
def test_wrong_requests_get_one_line(path: str, body: Any, problem: str, site: Site) -> None:
    status, answer = site.try_post(path, model="embedder", **body)
    message = answer["error"]["message"]
    assert status == 400
    assert problem in message
    assert "\n" not in message


def test_the_grpc_client_gets_the_same_errors(site: Site) -> None:
    with Client(site.address) as client:
        with pytest.raises(InvalidRequestError, match="model: makes no embeddings; it makes"):
            client.embed(["a"], model="reranker")
        with pytest.raises(InvalidRequestError, match="model: generates no text"):
            client.generate("a", model="embedder")
