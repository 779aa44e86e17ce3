"""Unit tests of the public service over hand-driven nodes: where a stop string ends a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast

import msgspec
import pytest

from baton.access.identity import ANYBODY
from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason, RequestDelta, TextDelta, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.link import wire
from baton.link.words import CancelCommand, NodeBeat, PrefillCommand, ServingState, SessionHint
from baton.serving.access_log import AccessEntry
from baton.serving.call_gate import Context
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2, types_pb2
from baton.wire import types as wire_types
from router.api.grpc.inference_service import InferenceService
from router.calls.dispatcher import Dispatcher
from router.policies.least_tokens import LeastTokens
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.name_tables import one_base
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT, join_pair, make_pool

TOKENIZER = Tokenizer(DEMO_MODEL)
TEXT = "print(x)\nEND of it, and so on and on, on and on, until somebody says stop"
TOKEN_IDS = TOKENIZER.encode(TEXT)


class _NoDeadline:
    principal = ANYBODY

    def __init__(self) -> None:
        self.entry = AccessEntry()

    def time_remaining(self) -> None:
        return None

    def set_trailing_metadata(self, trailers: object) -> None:
        pass  # tests/unit/router/api/grpc/test_grpc_api.py reads them


class Scene:
    """A service over one pair of nodes that say one token of `TEXT` after the other."""

    def __init__(self, tokenizer: Tokenizer | None = TOKENIZER, **params: Any) -> None:
        pool = make_pool()
        self.prefill, self.decode = join_pair(pool)
        self.dispatcher = Dispatcher(pool, LeastTokens())
        intake = make_intake(self.dispatcher, tokenizer, vocab_size=4096, default_timeout_s=60.0)
        self.service = InferenceService(one_base(self.dispatcher, intake))
        self.request = inference_pb2.GenerateRequest(
            request_id="a",
            token_ids=types_pb2.TokenIds(ids=[1, 2, 3]),
            sampling_params=wire_types.sampling_params_to_proto(SamplingParams(**params)),
        )

    async def run(self, *, tokens_per_step: int = 1) -> list[TextDelta]:
        """The streamed pieces; nodes speak only as far as the service listens."""
        stream = self.service.Generate(self.request, cast(Context, _NoDeadline()))
        pieces: list[TextDelta] = []
        for index in [0, *range(1, len(TOKEN_IDS), tokens_per_step)]:
            reply = asyncio.ensure_future(anext(stream))
            for _ in range(10):
                await asyncio.sleep(0)
            if reply.done():  # nothing was asked of the nodes
                await reply
            width = tokens_per_step if index else 1
            self._say(index, TOKEN_IDS[index : index + width])
            pieces.append(wire.text_delta_from_proto(await reply))
            if pieces[-1].finish_reason is not None:
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                break
        return pieces

    def _say(self, index: int, token_ids: list[int]) -> None:
        last = index + len(token_ids) == len(TOKEN_IDS)
        epoch = self.prefill.of(PrefillCommand)[-1].epoch
        output = RequestDelta(
            "a",
            index,
            tuple(token_ids),
            FinishReason.LENGTH if last else None,
            tuple(TokenLogprobs(-1.0) for _ in token_ids),
            epoch=epoch,
        )
        if index == 0:
            self.prefill.say(msgspec.structs.replace(output, prefill=PREFILL_RECEIPT))
        else:
            decode = DECODE_RECEIPT if last else None
            self.decode.say(msgspec.structs.replace(output, decode=decode))

    @property
    def cancels(self) -> list[int]:
        return [len(node.of(CancelCommand)) for node in (self.prefill, self.decode)]


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 100])
@asynchronous
async def test_a_stop_string_ends_the_call_before_it_and_stops_the_nodes(
    tokens_per_step: int,
) -> None:
    scene = Scene(stop=("\nEND", "never"))
    pieces = await scene.run(tokens_per_step=tokens_per_step)
    assert "".join(piece.text for piece in pieces) == "print(x)"
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert pieces[-1].stop_string == "\nEND"
    assert {piece.stop_string for piece in pieces[:-1]} <= {None}
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert token_ids == TOKEN_IDS[: len(token_ids)]
    assert "\nEND" in TOKENIZER.decode(token_ids)
    assert "\nEND" not in TOKENIZER.decode(token_ids[:-1])
    assert sum(len(piece.logprobs) for piece in pieces) == len(token_ids)
    receipt = pieces[-1].receipt
    assert receipt is not None
    assert (receipt.num_output_tokens, receipt.prefill) == (len(token_ids), PREFILL_RECEIPT)
    assert receipt.decode_node == "d0"
    if tokens_per_step < 100:  # the decode node is still at work
        assert receipt.decode is None
        assert scene.cancels == [1, 1]
    assert scene.dispatcher.num_open == 0


@asynchronous
async def test_token_1_alone_may_be_the_stop_string() -> None:
    scene = Scene(stop=(TOKENIZER.decode(TOKEN_IDS[:1]),))
    [piece] = await scene.run()
    assert (piece.text, piece.token_ids) == ("", (TOKEN_IDS[0],))
    assert piece.receipt is not None
    assert (piece.receipt.decode_node, piece.receipt.decode) == ("", None)
    assert scene.cancels == [1, 1]


@asynchronous
async def test_without_one_the_text_is_whole_and_the_receipt_too() -> None:
    scene = Scene(stop=("says stop or not",))
    pieces = await scene.run()
    assert "".join(piece.text for piece in pieces) == TEXT
    assert {piece.stop_string for piece in pieces} == {None}
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert pieces[-1].receipt is not None
    assert pieces[-1].receipt.decode == DECODE_RECEIPT
    assert scene.cancels == [0, 0]


@asynchronous
async def test_sessions_are_dropped_on_nodes_that_serve() -> None:
    scene = Scene()
    beat = NodeBeat(serving_state=ServingState.DRAINED)
    scene.prefill.pool.on_event(scene.prefill.node, beat)
    request = inference_pb2.DropPinsRequest(session_id="s")
    await scene.service.DropPins(request, cast(Context, _NoDeadline()))
    assert [len(node.of(SessionHint)) for node in (scene.prefill, scene.decode)] == [0, 1]


@asynchronous
async def test_too_many_pins_are_refused_before_any_is_converted() -> None:
    scene = Scene()
    scene.request.pins.extend(types_pb2.PrefixPin(ttl_s=1.0) for _ in range(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "prefixes_from_proto", lambda pins: pytest.fail("converted"))
        with pytest.raises(InvalidRequestError, match=r"^pins: must have at most 4, got 5$"):
            await scene.run()


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"banned_token_ids": (4096,)}, "banned_token_ids: token ids must be 0 to 4095"),
        ({"logit_bias": ((5000, 1.0),)}, "logit_bias: token ids must be 0 to 4095"),
    ],
)
@asynchronous
async def test_a_token_id_outside_the_vocabulary_reaches_no_node(
    params: dict[str, Any], problem: str
) -> None:
    scene = Scene(**params)
    with pytest.raises(InvalidRequestError, match=f"^{problem}"):
        await scene.run()
    assert scene.prefill.of(PrefillCommand) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"regex": "([a-z"}, r"structured_output\.regex: .*unclosed character class"),
        (
            {"json_schema": {"type": "thing"}},
            r"structured_output\.json_schema: Invalid type: thing",
        ),
        ({"json_schema": '{"not":' * 500 + "1" + "}" * 500}, r"structured_output\.json_schema: "),
        ({"grammar": "start: other"}, r"structured_output\.grammar: .*unknown name"),
        ({"grammar": "root := x"}, r"structured_output\.grammar: Expected ::="),
        ({"grammar": "a: b\n" * 1001}, r"structured_output\.grammar: must have at most 1000 rules"),
    ],
)
@asynchronous
async def test_a_grammar_that_cannot_be_read_reaches_no_node(
    given: dict[str, Any], problem: str
) -> None:
    scene = Scene(structured_output=StructuredOutput(**given))
    with pytest.raises(InvalidRequestError, match=f"^{problem}") as caught:
        await anext(scene.service.Generate(scene.request, cast(Context, _NoDeadline())))
    assert "\n" not in str(caught.value)
    assert scene.prefill.of(PrefillCommand) == []


@asynchronous
async def test_an_empty_structured_output_says_what_is_missing() -> None:
    scene = Scene()
    scene.request.sampling_params.structured_output.SetInParent()
    with pytest.raises(InvalidRequestError, match=r"^structured_output: must have exactly one of"):
        await scene.run()


@asynchronous
async def test_structured_output_needs_a_tokenizer() -> None:
    scene = Scene(tokenizer=None, structured_output=StructuredOutput(json_object=True))
    with pytest.raises(InvalidRequestError, match=r"^structured_output: .* no tokenizer\.json$"):
        await scene.run()


@asynchronous
async def test_stop_strings_need_a_tokenizer() -> None:
    scene = Scene(tokenizer=None, stop=("a",))
    with pytest.raises(InvalidRequestError, match=r"^stop: .* no tokenizer\.json$"):
        await scene.run()
