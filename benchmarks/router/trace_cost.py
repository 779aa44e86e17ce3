"""Measure what tracing costs a router: all requests are traced, or none, in turns.

This is the part "tracing" of `router_cost.py`. A collector on the other core receives the spans.
Requests have 64 output tokens, and 64 requests run at a time: first at the pace of an engine's
steps (5 ms), to compare the CPU time per request, and then at full speed, to compare the requests
per second. On a busy machine two rounds differ by more than tracing costs, so the calls for tracing
are also timed alone, and divided by the CPU time of a request.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from baton.api.outputs import FinishReason, Receipt
from baton.api.sampling_params import SamplingParams
from baton.link import wire
from baton.link.words import DecodeCommand
from baton.serving.access_log import AccessEntry
from baton.telemetry.trace_options import TraceOptions
from baton.telemetry.tracing import NO_TRACING, Tracing
from benchmarks.router.router_cost_parts import DECODE_RECEIPT, PREFILL_RECEIPT
from benchmarks.router.router_site import Site, in_turns, measure_requests, ratios, router_site
from benchmarks.runner.own_process import call_words, own_environment
from router.calls.call import Call, Terms
from router.calls.request_log import RequestLog
from router.request_spans import RequestSpans

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PACES_S = {"at an engine's pace": 0.005, "as fast as it can": 0.0}
FIGURES = ("requests_per_s", "cpu_us_per_request")
NUM_DRAWS = 4_000
MAX_TOKENS = 64
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
RECEIPT = Receipt(
    num_prompt_tokens=3,
    num_output_tokens=MAX_TOKENS,
    ttft_s=0.01,
    total_s=0.3,
    prefill_node="p0",
    decode_node="d0",
    prefill=PREFILL_RECEIPT,
    decode=DECODE_RECEIPT,
)
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def cost_when_off_us() -> float:
    """Return the us that the code for tracing takes in an untraced request with a trace header."""
    number = 200_000
    entry = AccessEntry()
    began = time.perf_counter()
    for _ in range(number):
        entry.join_trace(NO_TRACING, HEADER, "")
        time.perf_counter()  # the calls that `Following.note_admitted` makes
    return (time.perf_counter() - began) / number * 1e6


def cost_when_on_us(endpoint: str) -> float:
    """Return the us that tracing adds to a request: contexts, spans, messages, sending."""
    number = 10_000
    tracing = Tracing(TraceOptions(trace_endpoint=endpoint))
    assert tracing.sink is not None
    log = RequestLog()
    log.on_traced = RequestSpans("demo", tracing.sink).on_request_end
    cpu_s = {}
    for is_traced in (False, True):
        began = time.process_time()
        for index in range(number):
            trace = tracing.begin("") if is_traced else None
            call = Call(
                request_id=str(index),
                prompt_token_ids=[5, 6, 7],
                sampling_params=PARAMS,
                terms=Terms(received_at=time.perf_counter(), trace=trace),
                timeout_s=60,
            )
            with log.follow(call) as following:
                following.note_admitted()
                attempt = following.note_attempt("p0", "d0")
                for _ in range(2):
                    wire.command_to_proto(
                        DecodeCommand(
                            request_id=call.request_id,
                            epoch=1,
                            prompt_token_ids=call.prompt_token_ids,
                            sampling_params=PARAMS,
                            prefill_engine_id="p0",
                            timeout_s=60,
                            trace=attempt.trace,
                        )
                    ).SerializeToString()
                following.note_finished(FinishReason.LENGTH, RECEIPT)
            if index % 100 == 0:
                time.sleep(0.02)  # a pause between requests, in which the exporter sends
        if is_traced:
            tracing.close()
        cpu_s[is_traced] = time.process_time() - began
    assert tracing.counts() == (5 * number, 0)
    return (cpu_s[True] - cpu_s[False]) / number * 1e6


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """Yield the endpoint of a collector that accepts all spans without decoding them."""
    command = call_words("benchmarks.router.trace_cost:collect")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=own_environment()
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def collect() -> None:
    """Run a collector in this process; print its port."""
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service, method = EXPORT.strip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def measure_tracing(slices: int, num_requests: int, model: Path) -> dict[str, Any]:
    """Compare a router that traces all requests with a router that traces none, in turns."""

    async def requests_of(site: Site) -> Mapping[str, Any]:
        found = await measure_requests(site, num_requests=num_requests, max_tokens=MAX_TOKENS)
        return {name: found[name] for name in FIGURES}

    rows: dict[str, list[dict[str, Any]]] = {}
    over: dict[str, Any] = {}
    with collecting() as endpoint:
        for name, pace_s in PACES_S.items():
            with (
                router_site(model, pace_s) as off,
                router_site(model, pace_s, router_args=["--trace-endpoint", endpoint]) as on,
            ):
                rows[name] = await in_turns({"off": off, "on": on}, slices, requests_of)
            over[name] = {
                figure: {**ratios(rows[name], figure, "on", "off"), **interval(rows[name], figure)}
                for figure in FIGURES
            }
            print(name, over[name], flush=True)
        on_us = cost_when_on_us(endpoint)
    off_us = cost_when_off_us()
    request_us = min(
        statistics.median(row["cpu_us_per_request"] for row in these if row["subject"] == "off")
        for these in rows.values()
    )
    return {
        "on over off": over,
        "itself": {
            "request_us": round(request_us),
            "all sampled": {"us": round(on_us, 1), "share": round(on_us / request_us, 4)},
            "off": {"us": round(off_us, 2), "share": round(off_us / request_us, 5)},
        },
        "slices": rows,
    }


def interval(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[str, list[float]]:
    """Return the 95 % interval of the median of ratios, by a bootstrap over pairs of slices."""
    on, off = ([row[figure] for row in rows if row["subject"] == name] for name in ("on", "off"))
    found = [one / other for one, other in zip(on, off, strict=True)]
    drawn = random.Random(1)
    medians = sorted(
        statistics.median(drawn.choices(found, k=len(found))) for _ in range(NUM_DRAWS)
    )
    ends = medians[NUM_DRAWS * 25 // 1000], medians[NUM_DRAWS * 975 // 1000]
    return {"median_within": [round(end, 3) for end in ends]}
