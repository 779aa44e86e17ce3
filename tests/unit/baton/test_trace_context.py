"""Unit tests of trace contexts: W3C's headers in and out, and who is sampled."""

from __future__ import annotations

import pytest

from baton.link.wire import command_from_proto, command_to_proto
from baton.link.words import DecodeCommand, PrefillCommand
from baton.serving.access_log import AccessEntry
from baton.telemetry.spans import MAX_STATE_CHARS, TraceContext, parse_traceparent
from baton.telemetry.trace_options import TraceOptions
from baton.telemetry.tracing import NO_TRACING, Tracing
from tests.fakes.router.router_scene import PARAMS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"


def test_a_header_is_read_and_written_as_w3c_has_it() -> None:
    context = parse_traceparent(HEADER, "vendor=x")
    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(PARENT), True, "vendor=x")
    assert context is not None
    assert context.traceparent == HEADER
    child = context.child()
    assert (child.trace_id, child.is_sampled, child.state) == (context.trace_id, True, "vendor=x")
    assert child.span_id != context.span_id
    unsampled = parse_traceparent(HEADER[:-2] + "00")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert unsampled.traceparent.endswith("-00")


@pytest.mark.parametrize(
    "header",
    [
        "",
        HEADER.upper(),
        HEADER + "\n",
        HEADER + "-more",  # of version 00 there is no more
        "ff" + HEADER[2:],
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-01",
        HEADER.replace("4b", "xx"),
        HEADER.replace("4", "\N{ARABIC-INDIC DIGIT FOUR}"),
    ],
)
def test_a_header_that_is_wrong_is_none(header: str) -> None:
    assert parse_traceparent(header) is None


def test_of_a_later_version_what_is_known_counts() -> None:
    assert parse_traceparent("01" + HEADER[2:] + "-more") == parse_traceparent(HEADER)


@pytest.mark.parametrize("state", ["x" * (MAX_STATE_CHARS + 1), "a=b\n", "a=\x7f"])
def test_a_state_that_is_too_long_or_not_printable_is_left_out(state: str) -> None:
    context = parse_traceparent(HEADER, state)
    assert context is not None
    assert context.state == ""


def tracing(ratio: float) -> Tracing:
    return Tracing(TraceOptions(trace_ratio=ratio), sink=lambda spans, zero_ns: None)


def test_who_is_sampled_follows_its_caller_and_else_the_ratio() -> None:
    for ratio in (0.0, 1.0):
        assert tracing(ratio).begin(HEADER) == parse_traceparent(HEADER)
        assert tracing(ratio).begin(HEADER[:-2] + "00") is None
    assert tracing(0.0).begin("") is None
    root = tracing(1.0).begin("not a header")
    assert root is not None
    assert (root.span_id, len(root.trace_id)) == (b"", 16)
    half = tracing(0.5)
    num_sampled = sum(half.begin("") is not None for _ in range(2000))
    assert 850 < num_sampled < 1150
    assert NO_TRACING.begin(HEADER) is None


def test_a_log_names_the_trace_whoever_decided_on_it() -> None:
    entry = AccessEntry()
    entry.join_trace(NO_TRACING, HEADER, "")
    assert (entry.trace_id, entry.trace) == (TRACE, None)
    entry.join_trace(tracing(1.0), "", "")
    assert entry.trace is not None
    assert entry.trace_id == entry.trace.trace_id.hex()
    entry.join_trace(tracing(0.0), "", "")
    assert not entry.trace_id
    assert (entry.trace is None) is True


def test_commands_carry_it_over_the_link() -> None:
    for trace in (None, parse_traceparent(HEADER, "a=b")):
        prefill = PrefillCommand(
            request_id="r",
            epoch=1,
            prompt_token_ids=[5],
            sampling_params=PARAMS,
            decode_engine_id="d",
            timeout_s=1.0,
            trace=trace,
        )
        decode = DecodeCommand(
            request_id="r",
            epoch=1,
            prompt_token_ids=[5],
            sampling_params=PARAMS,
            prefill_engine_id="p",
            timeout_s=1.0,
            trace=trace,
        )
        assert command_from_proto(command_to_proto(prefill)) == prefill
        assert command_from_proto(command_to_proto(decode)) == decode
    broken = command_to_proto(prefill)
    broken.prefill.traceparent = "nonsense"  # of a router that is wrong: it is not traced
    read = command_from_proto(broken)
    assert isinstance(read, PrefillCommand)
    assert read.trace is None
