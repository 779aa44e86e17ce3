"""Unit tests of a request's spans at the router: their contents, for every kind of request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from baton.api.errors import BatonError
from baton.api.outputs import FinishReason
from baton.link.words import DecodeCommand, PrefillCommand
from baton.telemetry.spans import Span, SpanKind, TraceContext, parse_traceparent
from router.calls.recovery.retry_budget import RetryOptions
from router.request_spans import RequestSpans
from tests.fakes.router.nodes import failure, token, token_1
from tests.fakes.router.router_scene import Scene, asynchronous

RETRIES = RetryOptions(
    max_attempts=3, pair_timeout_s=0.2, return_timeout_s=0.2, first_pause_s=0.001
)
CALLER = parse_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


class Traced:
    """A scene whose calls are traced.

    Attributes:
        spans: spans of all ended calls.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.spans: list[Span] = []
        scene.dispatcher.log.on_traced = RequestSpans("demo", self._take).on_request_end

    def _take(self, spans: Sequence[Span], zero_ns: int) -> None:
        self.spans += spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def check(self) -> None:
        """One root, which the caller's span is the parent of; all else is in it, end to end."""
        (root,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        assert CALLER is not None
        assert root.parent_id == CALLER.span_id
        parts = [span for span in self.spans if span is not root]
        for span in parts:
            assert span.parent_id == root.context.span_id
            assert span.context.trace_id == CALLER.trace_id
            assert root.begin_s <= span.begin_s <= span.end_s <= root.end_s
        # Nothing between them is left out: each begins where the one before it ends.
        assert parts[0].begin_s == 0
        assert all(one.end_s == two.begin_s for one, two in pairwise(parts))


@asynchronous
async def test_the_parts_of_a_request_follow_one_another_and_its_commands_name_its_attempt() -> (
    None
):
    traced = Traced(scene := Scene())
    await scene.call(trace=CALLER)
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch))
    scene.decode.say(token("a", 1, 12, epoch=scene.epoch))
    scene.decode.say(token("a", 2, 13, epoch=scene.epoch, finish=FinishReason.LENGTH))
    await scene.end()
    traced.check()
    assert [span.name for span in traced.spans] == [
        "text_completion demo", "router.accept", "router.queue", "router.place", "router.attempt",
    ]  # fmt: skip
    (attempt,) = traced.named("router.attempt")
    assert scene.prefill.of(PrefillCommand)[0].trace == attempt.context
    assert scene.decode.of(DecodeCommand)[0].trace == attempt.context
    assert attempt.attributes == {"baton.prefill_node": "p0", "baton.decode_node": "d0"}
    receipt = scene.outputs[-1].receipt
    assert receipt is not None
    assert attempt.begin_s == receipt.router_queue_s  # the same moment
    request = traced.spans[0]
    assert request.events == (("first token", receipt.ttft_s),)
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert not any("prompt" in key and "token" not in key for key in request.attributes)


@pytest.mark.parametrize(
    ("code", "how"), [("UNAVAILABLE", "retry of"), ("PREEMPTED", "moved from")]
)
def test_another_attempt_is_linked_to_the_one_before(code: str, how: str) -> None:
    asyncio.run(_fail_once(code, how))


async def _fail_once(code: str, how: str) -> None:
    traced = Traced(scene := Scene(options=RETRIES, num_decode=2))
    await scene.call(trace=CALLER)
    first = next(hand for hand in scene.decodes if hand.of(DecodeCommand))
    first.say(failure("a", code, "it broke", epoch=scene.epoch))
    while len(scene.prefill.of(PrefillCommand)) < 2:  # noqa: ASYNC110  # its end is a time
        await asyncio.sleep(0.001)
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch, finish=FinishReason.STOP))
    await scene.end()
    traced.check()
    before, after = traced.named("router.attempt")
    assert (before.error, before.attributes["error.type"]) == ("it broke", code)
    assert after.links == ((before.context, how),)
    assert after.error == ""
    assert len(traced.named("router.place")) == 2


@asynchronous
async def test_a_request_that_fails_says_why_and_for_how_long_it_looked_for_nodes() -> None:
    traced = Traced(scene := Scene())
    await scene.call(trace=CALLER)
    scene.prefill.say(failure("a", "RESOURCE_EXHAUSTED", "full", epoch=scene.epoch))
    with pytest.raises(BatonError, match="full"):
        await scene.end()
    traced.check()
    assert traced.spans[0].error == "full"
    assert traced.spans[0].attributes["error.type"] == "RESOURCE_EXHAUSTED"


@asynchronous
async def test_what_is_not_traced_makes_no_span_and_asks_for_none() -> None:
    traced = Traced(scene := Scene())
    await scene.call()
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch, finish=FinishReason.STOP))
    await scene.end()
    assert traced.spans == []
    assert scene.prefill.of(PrefillCommand)[0].trace is None


def test_attribute_names_are_those_of_the_conventions() -> None:
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for key, value in vars(names).items() if key.startswith("GEN_AI")}
    used = asyncio.run(_attributes_of_a_request())
    assert {name for name in used if name.startswith("gen_ai.")} <= known
    assert {name.split(".")[0] for name in used} <= {"gen_ai", "baton", "error"}


async def _attributes_of_a_request() -> set[str]:
    traced = Traced(scene := Scene())
    await scene.call(trace=TraceContext(bytes(16)))
    scene.prefill.say(token_1("a", 11, epoch=scene.epoch, finish=FinishReason.STOP))
    await scene.end()
    return {key for span in traced.spans for key in span.attributes}
