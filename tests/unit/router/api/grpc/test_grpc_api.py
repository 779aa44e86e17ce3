"""The public gRPC API over real sockets: every call, its errors, its trailers, and resuming."""

from __future__ import annotations

import asyncio
import contextlib
import io
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.access.identity import Principal
from baton.api.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
)
from baton.client.client import AsyncClient
from baton.client.messages import make_request
from baton.link.words import CancelCommand, PrefillCommand
from baton.serving.access_log import AccessEntry, AccessLog
from baton.serving.error_details import DETAILS_KEY, RECEIPT_KEY, receipt_from_trailers
from baton.serving.rpc import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from router.api.grpc.journal import JournalOptions
from router.gate.admission import make_admission
from router.gate.admission_options import AdmissionOptions
from tests.fakes.router.grpc_scene import TOKENIZER, breakable, expected, params, served
from tests.fakes.router.router_scene import asynchronous

# ---------------------------------------------------------------- one output


@asynchronous
async def test_the_receipt_is_in_the_last_response_and_in_the_trailers() -> None:
    async with served() as (_, client), open_channel(client._address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Generate(make_request([1, 2, 3], params()))
        responses = [response async for response in call]
        token_ids = [token_id for response in responses for token_id in response.token_ids]
        assert tuple(token_ids) == expected(100, 8)
        trailers = dict(await call.trailing_metadata())
        receipt = receipt_from_trailers(trailers)
        assert receipt is not None
        assert receipt.num_output_tokens == responses[-1].receipt.num_output_tokens == 8
        assert receipt.prefill is not None
        assert sum(receipt.ttft_parts.values()) == pytest.approx(receipt.ttft_s)
        assert receipt.accept_s > 0
        assert receipt.delivery_s > 0


class _NotingLog(AccessLog):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[AccessEntry] = []

    def write(self, entry: AccessEntry, principal: Principal | None, status: str) -> None:
        self.entries.append(entry)


@asynchronous
async def test_the_parts_of_a_receipt_sum_to_the_first_bytes_that_the_router_sends() -> None:
    log = _NotingLog()
    async with served(access_log=log) as (_, client):
        prompt = "def read(path):"
        completions = [await client.generate(prompt, params(seed=None)) for _ in range(5)]
    missing_s: list[float] = []
    for completion, entry in zip(completions, log.entries, strict=True):
        assert completion.receipt is not None
        assert entry.ttft_s is not None
        parts = completion.receipt.ttft_parts
        assert list(parts) == [
            "accept_s", "place_s", "prefill_queue_s", "prefill_s", "send_s", "network_s",
            "delivery_s",
        ]  # fmt: skip
        missing_s.append(entry.ttft_s - sum(parts.values()))
    # The router notes the first token a few lines of code after the receipt's last time. A busy
    # machine may stop the router between the two now and then, but not in each request.
    assert 0 <= min(missing_s) < 0.05


@pytest.mark.medium
@asynchronous
async def test_tokens_texts_and_models() -> None:
    async with served() as (_, client):
        assert await client.tokenize("print(x)") == TOKENIZER.encode("print(x)")
        assert await client.count_tokens("print(x)") == len(TOKENIZER.encode("print(x)"))
        chat = [{"role": "user", "content": "hello"}]
        assert await client.tokenize(chat) == TOKENIZER.encode_chat(chat)
        [model] = await client.models()
        assert (model.name, model.max_model_len) == ("demo", 100)


@asynchronous
async def test_the_page_that_describes_it_tells_the_truth() -> None:
    page = Path(__file__).parents[5] / "docs" / "grpc_api.md"
    source = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    printed = io.StringIO()
    async with served() as (_, client):
        names = {"address": client._address, "print": partial(print, file=printed)}
        await asyncio.to_thread(exec, compile(source, page, "exec"), names)
    lines = printed.getvalue().splitlines()
    assert lines[0] == f"100 {len(TOKENIZER.encode('def add(a, b):'))}"
    assert (
        lines[-1] == "prompt: token ids must be 0 to 4095 (the vocabulary), got 1000000 False None"
    )


# ---------------------------------------------------------------- batches


@asynchronous
async def test_a_batch_is_every_prompt_times_n_in_one_stream() -> None:
    async with served() as (scene, client):
        completions = await client.generate_batch([[1, 2], "print", [3]], params(5, n=2))
        assert [[choice.token_ids for choice in prompt] for prompt in completions] == [
            [expected(100, 5), expected(101, 5)]
        ] * 3
        assert [choice.choice_index for choice in completions[1]] == [0, 1]
        assert completions[0][1].request_id == completions[0][0].request_id + "-1"
        assert all(choice.receipt for prompt in completions for choice in prompt)
        assert scene.dispatcher.num_open == 0


@asynchronous
async def test_a_wrong_prompt_of_a_batch_reaches_no_node() -> None:
    async with served() as (scene, client):
        with pytest.raises(InvalidRequestError, match=r"^prompt: token ids must be 0 to 4095"):
            await client.generate_batch([[1], [5000]], params())
        with pytest.raises(InvalidRequestError, match=r"^prompts: must make 1 to 1024 outputs"):
            await client.generate_batch([], params())
        assert scene.prefill.of(PrefillCommand) == []


@asynchronous
async def test_leaving_a_batch_cancels_all_of_it() -> None:
    async with served() as (scene, client):
        scene.talks.clear()
        async with contextlib.aclosing(client.stream_batch([[1], [2]], params(n=2))) as deltas:
            await anext(deltas)
        await scene.until_quiet()
        assert len(scene.decode.of(CancelCommand)) == 4


# ---------------------------------------------------------------- sessions, priorities


@asynchronous
async def test_session_and_priority_reach_the_call() -> None:
    async with served() as (scene, client):
        await client.generate([1], params(1), session_id="talk", priority=-3)
        await client.generate_batch([[1], [2]], params(1, n=2), session_id="b", priority=5)
        await client.generate([1], params(1))
        assert [
            (call.terms.session_id, call.terms.priority) for call in scene.dispatcher.calls
        ] == [
            ("talk", -3),
            *[("b", 5)] * 4,
            ("", 0),
        ]
        with pytest.raises(InvalidRequestError, match=r"^priority: must be -2147483648 to"):
            await client.generate([1], params(1), priority=2**31)
        with pytest.raises(InvalidRequestError, match=r"^session_id: must have at most 256"):
            await client.generate([1], params(1), session_id="x" * 257)


# ---------------------------------------------------------------- errors


@asynchronous
async def test_errors_come_back_as_they_were_raised_with_what_to_do_about_them() -> None:
    async with served() as (scene, client):
        with pytest.raises(InvalidRequestError) as invalid:
            await client.generate([5000], params())
        assert invalid.value.field == "prompt"
        assert (invalid.value.retryable, invalid.value.retry_delay_s) == (False, None)
        assert invalid.value.receipt is None  # it never became a call
        scene.talks.clear()
        with pytest.raises(DeadlineExceededError):
            await client.generate([1], params(), timeout_s=0.1)
        await scene.until_quiet()
        scene.decode.leave()
        with pytest.raises(NodeUnavailableError, match="no decode node has joined") as lost:
            await client.generate([1], params())
        assert (lost.value.retryable, lost.value.retry_delay_s) == (True, 0.5)
        assert lost.value.receipt is not None
        assert lost.value.receipt.num_output_tokens == 0


@asynchronous
async def test_a_refusal_says_how_long_to_wait() -> None:
    async with served() as (scene, client), open_channel(client._address) as channel:
        limit = AdmissionOptions(max_open_requests=1)
        scene.dispatcher.admission = make_admission(scene.pool, limit)
        scene.talks.clear()
        first = asyncio.create_task(client.generate([1], params()))
        while scene.dispatcher.num_open == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError) as refused:
            await client.generate([1], params())
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Generate(make_request([1], params()))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = status_pb2.Status.FromString(dict(await call.trailing_metadata())[DETAILS_KEY])
        retry = error_details_pb2.RetryInfo()
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() > 0
        assert refused.value.retryable
        assert refused.value.retry_delay_s == pytest.approx(
            retry.retry_delay.ToNanoseconds() / 1e9, rel=0.5
        )
        scene.talks.set()
        assert (await first).token_ids == expected(100, 8)


@asynchronous
async def test_an_error_in_the_stream_says_what_it_had_cost() -> None:
    async with served() as (scene, client), open_channel(client._address) as channel:
        scene.talks.clear()
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Generate(make_request([1], params()))
        assert list((await call.read()).token_ids) == [100]
        scene.decode.leave()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict(await call.trailing_metadata())
        assert {DETAILS_KEY, RECEIPT_KEY} <= trailers.keys()
        receipt = receipt_from_trailers(trailers)
        assert receipt is not None
        assert (receipt.num_output_tokens, receipt.prefill_node) == (1, "prefill")


# ---------------------------------------------------------------- resuming


@asynchronous
async def test_a_resumable_stream_outlives_its_call_and_goes_on_where_it_broke() -> None:
    async with served() as (scene, client):
        scene.talks.clear()
        stream = client.stream([1], params(), request_id="a", resumable=True)
        async with contextlib.aclosing(stream) as deltas:
            first = await anext(deltas)
        assert first.token_ids == (100,)
        scene.talks.set()
        await scene.until_quiet()
        rest = [delta async for delta in client.resume("a", 1)]
        assert [delta.output_index for delta in rest] == [1]  # all that was there, as one
        assert first.token_ids + rest[0].token_ids == expected(100, 8)
        assert rest[0].receipt is not None
        assert scene.decode.of(CancelCommand) == []
        whole = [delta async for delta in client.resume("a")]
        assert first.text + rest[0].text == "".join(delta.text for delta in whole)


@pytest.mark.medium
@asynchronous
async def test_a_client_goes_on_by_itself_when_its_connection_breaks() -> None:
    async with served() as (scene, client), breakable(client._address) as (address, cut):
        scene.talks.clear()
        async with AsyncClient(address) as behind:
            stream = behind.stream([1], params(), resumable=True)
            first = await anext(stream)
            cut()
            scene.talks.set()
            rest = [delta async for delta in stream]
            token_ids = [*first.token_ids, *(token for delta in rest for token in delta.token_ids)]
            assert tuple(token_ids) == expected(100, 8)
            assert rest[-1].receipt is not None
            fragile = behind.stream([1], params())
            scene.talks.clear()
            await anext(fragile)
            cut()
            with pytest.raises(NodeUnavailableError):
                await anext(fragile)


@asynchronous
async def test_others_are_cancelled_with_their_call() -> None:
    async with served() as (scene, client):
        scene.talks.clear()
        async with contextlib.aclosing(client.stream([1], params(), request_id="a")) as deltas:
            await anext(deltas)
        await scene.until_quiet()
        assert len(scene.decode.of(CancelCommand)) == 1
        with pytest.raises(InvalidRequestError, match="'a' is not"):
            await anext(client.resume("a", 1))


@asynchronous
async def test_nobody_comes_back_in_time_and_it_is_cancelled_on_its_nodes() -> None:
    async with served(JournalOptions(grace_s=0.05)) as (scene, client):
        scene.talks.clear()
        stream = client.stream([1], params(), request_id="a", resumable=True)
        async with contextlib.aclosing(stream) as deltas:
            await anext(deltas)
        await scene.until_quiet()
        assert len(scene.decode.of(CancelCommand)) == 1
        assert scene.journal.num_streams == 0


@asynchronous
async def test_the_same_request_again_is_the_same_stream_and_another_one_is_refused() -> None:
    async with served() as (scene, client):

        async def read(max_tokens: int) -> tuple[int, ...]:
            stream = client.stream([1], params(max_tokens), request_id="a", resumable=True)
            return tuple([token_id async for delta in stream for token_id in delta.token_ids])

        both = await asyncio.gather(read(8), read(8))
        assert list(both) == [expected(100, 8)] * 2
        assert await read(8) == expected(100, 8)  # it has ended, and is kept
        assert len(scene.prefill.of(PrefillCommand)) == 1
        with pytest.raises(InvalidRequestError, match="request_id: 'a' is another request's"):
            await read(9)


@asynchronous
async def test_a_request_that_failed_can_be_tried_again_by_its_name() -> None:
    async with served() as (scene, client):

        async def read() -> tuple[int, ...]:
            stream = client.stream([1], params(8), request_id="a", resumable=True)
            return tuple([token_id async for delta in stream for token_id in delta.token_ids])

        scene.pool.remove(scene.decode.node)
        with pytest.raises(NodeUnavailableError):
            await read()
        scene.pool.add_node(scene.decode.node)
        scene.prefill.reach(scene.decode)
        assert await read() == expected(100, 8)


@asynchronous
async def test_one_can_only_resume_behind_a_response() -> None:
    async with served() as (scene, client):
        scene.talks.clear()
        stream = client.stream([1], params(), request_id="a", resumable=True)
        async with contextlib.aclosing(stream) as deltas:
            await anext(deltas)
        with pytest.raises(InvalidRequestError, match="next_output_index: must be where"):
            await anext(client.resume("a", 5))


@asynchronous
async def test_the_journal_is_bounded_and_forgets_what_has_ended_first() -> None:
    async with served(JournalOptions(max_streams=2)) as (scene, client):

        async def begin(request_id: str) -> None:
            stream = client.stream([1], params(), request_id=request_id, resumable=True)
            async with contextlib.aclosing(stream) as deltas:
                await anext(deltas)

        await begin("ended")
        await scene.until_quiet()
        scene.talks.clear()
        await begin("b")
        await begin("c")
        with pytest.raises(InvalidRequestError):
            await anext(client.resume("ended"))
        with pytest.raises(OverloadedError, match="resumable: no room: 2 requests") as full:
            await begin("d")
        assert full.value.retry_delay_s == 1.0
        assert scene.journal.num_streams == 2


TOO_MANY_PARTS = "request: must have at most 66560 parts (16 token ids are one)"
PACKED_IDS = inference_pb2.GenerateRequest(
    token_ids=types_pb2.TokenIds(ids=[128] * 3_000_000)
).SerializeToString()
UNPACKED_IDS = b"\x1a\x04\x08\x01\x08\x01" * 400_000


@pytest.mark.parametrize(
    ("method", "message", "problem"),
    [
        ("Tokenize", b"\x0a\x04\x0a\x02\xff\xfe", "prompt.text: is not valid UTF-8"),
        ("Generate", b"\x0a\x02\xff\xfe", "request_id: is not valid UTF-8"),
        ("Generate", b"\xff\xff", "request: is no message of this call"),
        ("Generate", b"\x0a" * 5000, "request: is no message of this call"),
        ("Tokenize", b"\x0a\x00" * 2_000_000, TOO_MANY_PARTS),
        ("CountTokens", b"\xf8\x07\x01" * 200_000, TOO_MANY_PARTS),  # fields of nobody
        ("Generate", PACKED_IDS, TOO_MANY_PARTS),
        ("Generate", UNPACKED_IDS, TOO_MANY_PARTS),
    ],
)
def test_bytes_that_are_no_message_are_the_clients_error(
    method: str, message: bytes, problem: str
) -> None:
    """Regression: the answer was UNKNOWN, with a traceback in the log."""

    @asynchronous
    async def run() -> None:
        async with served() as (_, client), open_channel(client._address) as channel:
            call = channel.unary_stream(f"/baton.v1.Inference/{method}", bytes, bytes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == problem

    run()
