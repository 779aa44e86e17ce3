"""Measures one system with two loads: a single reader, and then several readers at once."""

from __future__ import annotations

import asyncio
import os
import platform
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from baton.kernel_library.ahead import INSTRUCTION_SETS, cpu_features
from baton.kernel_library.state import find_kernels
from baton.processes.cores import usable_cores
from baton.processes.free_address import free_address
from loadtest.drills.site import UpOptions, started
from loadtest.load.generate import Lengths
from loadtest.plan import ClosedLoop, LoadPlan
from loadtest.quick.memory_speed import read_bytes_per_s
from loadtest.run import RunResult
from loadtest.session import Session
from loadtest.targets import open_target
from loadtest.targets.base import TargetError, TargetOptions

NUM_READERS = 8
INPUT_TOKENS, OUTPUT_TOKENS = 512, 64  # output tokens of a request in the load with one reader
SHORT_INPUT_TOKENS = 128  # prompt tokens of each request in the load with several readers
_DRAIN_TIMEOUT_S = 120.0  # seconds after the last sending at which requests are given up
# Maximum number of seconds of lag of the load generator, which shares the machine with the server
_MAX_LAG_S = 0.05
_METRICS_TIMEOUT_S = 10.0
_READ_COUNTERS = ("baton_weight_read_bytes_total", "baton_kv_read_bytes_total")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which this command has started the measured system.

    Attributes:
        instruction_set: CPU instruction set that the native kernels use; empty: there are no native
            kernels.
        no_kernels: why native kernels are missing; empty: they are not missing.
        kernels_advice: what the user can do about missing native kernels; empty: nothing.
        read_bytes_per_s: memory bandwidth when all cores read at once.
        load_average: the machine's load average over the minute before the start.
    """

    num_cores: int
    instruction_set: str
    no_kernels: str
    read_bytes_per_s: float
    load_average: float
    kernels_advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Figures of one load: medians over its requests; None: unknown.

    Attributes:
        output_tokens_per_s: output tokens per second of all readers together.
        token_s: seconds between two output tokens of one reader.
        prompt_tokens_per_s: a request's prompt tokens divided by its time to the first output
            token.
        handoff_s: seconds from the end of a prefill until the decode node has all KV.
        read_bytes_per_s: bytes of weights and KV that the decode node read while decoding.
        kept_up: whether the load generator sent and received in time.
    """

    num_readers: int
    num_requests: int
    num_failed: int
    error: str
    output_tokens_per_s: float
    token_s: float | None
    ttft_s: float | None
    prompt_tokens_per_s: float | None
    handoff_s: float | None
    read_bytes_per_s: float | None
    kept_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickResult:
    """All results of a quick benchmark.

    Attributes:
        model: model of the system that was started; empty: a running system was measured.
        machine: this machine; None: a running system was measured, which may be on another machine.
        start_s: seconds from the command until all nodes were ready.
    """

    model: str
    target: dict[str, str]
    machine: Machine | None
    start_s: float | None
    one: Speed
    many: Speed


async def measure_new(
    options: UpOptions, name: str, part_s: float, stop: asyncio.Event, tell: Tell
) -> QuickResult | None:
    """Start a system on this machine, measure it, and stop it; None if stopped early.

    Args:
        name: the model's name, as reports show it.
        part_s: seconds of each of the two loads.
        stop: ends the measurement early when it is set.
        tell: called with each line about the progress.

    Raises:
        BatonError: the system does not start, or does not answer.
    """
    tell("reading memory")
    machine = await asyncio.to_thread(look_at_machine)
    page = free_address()
    begun_at = time.monotonic()
    tell(f"starting a router, a prefill and a decode node: {name}")
    watched = (*options.decode_args, "--metrics-listen", page)
    own = UpOptions(
        model=options.model,
        router_args=options.router_args,
        node_args=options.node_args,
        decode_args=watched,
        lend_cores=True,
    )
    async with started(own, stop) as (site, address):
        start_s = time.monotonic() - begun_at
        access = TargetOptions(url=f"grpc://{address}", api_key=site.admin_token)
        measured = await _measure(access, part_s, stop, tell, page, site.admin_token)
    if measured is None:
        return None
    one, many, target = measured
    return QuickResult(
        model=name, target=target, machine=machine, start_s=start_s, one=one, many=many
    )


async def measure_running(
    access: TargetOptions, part_s: float, stop: asyncio.Event, tell: Tell
) -> QuickResult | None:
    """Measure a system that is running already; see `measure_new`."""
    measured = await _measure(access, part_s, stop, tell)
    if measured is None:
        return None
    one, many, target = measured
    return QuickResult(model="", target=target, machine=None, start_s=None, one=one, many=many)


def look_at_machine() -> Machine:
    """Describe this machine, and measure its memory bandwidth."""
    load_average = os.getloadavg()[0]
    kernels = find_kernels()
    has = cpu_features()
    sets = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]
    best = next((one.name for one in sets if has.issuperset(one.needs)), "")
    return Machine(
        num_cores=len(usable_cores()),
        instruction_set=kernels.instruction_set or best,
        no_kernels="they are off" if kernels.is_off else kernels.problem,
        read_bytes_per_s=read_bytes_per_s(),
        load_average=load_average,
        kernels_advice=kernels.advice,
    )


async def _measure(
    access: TargetOptions,
    part_s: float,
    stop: asyncio.Event,
    tell: Tell,
    page: str = "",
    token: str = "",
) -> tuple[Speed, Speed, dict[str, str]] | None:
    """Play both loads; return None if stopped early. Raises TargetError if the first request fails.

    Args:
        page: URL of the decode node's metrics page; empty: unknown.
        token: bearer token of the metrics page; empty: none is needed.
    """
    target = await open_target(access)
    try:
        session = Session(target, stop)
        # The first request is not measured, because it is slower than later requests. If it is
        # refused, all would be refused.
        first = await session.play(_plan(1, INPUT_TOKENS, num_requests=1))
        for kind, message in first.summary.error_examples.items():
            raise TargetError(kind, message)
        tell(f"one reader, {part_s:.0f} s: prompts of {INPUT_TOKENS} tokens")
        before = await _read_bytes(page, token)
        one = await session.play(_plan(1, INPUT_TOKENS, duration_s=part_s))
        after = await _read_bytes(page, token)
        num_bytes = None if before is None or after is None else after - before
        tell(f"{NUM_READERS} readers, {part_s:.0f} s: prompts of {SHORT_INPUT_TOKENS} tokens")
        many = await session.play(_plan(NUM_READERS, SHORT_INPUT_TOKENS, duration_s=part_s))
        if stop.is_set():
            return None
        alone = speed_of(one, INPUT_TOKENS, num_bytes)
        return alone, speed_of(many, SHORT_INPUT_TOKENS), target.describe()
    finally:
        await target.close()


def _plan(
    num_readers: int,
    input_tokens: int,
    *,
    duration_s: float | None = None,
    num_requests: int | None = None,
) -> LoadPlan:
    return LoadPlan(
        load=ClosedLoop(concurrency=num_readers),
        input_lengths=Lengths(input_tokens),
        output_lengths=Lengths(OUTPUT_TOKENS),
        duration_s=duration_s,
        num_requests=num_requests,
        drain_timeout_s=_DRAIN_TIMEOUT_S,
        max_lag_s=_MAX_LAG_S,
        seed=time.time_ns() % 2**31,  # a running system must not have cached the prompts
    )


def speed_of(result: RunResult, input_tokens: int, num_bytes: float | None = None) -> Speed:
    """Return the figures of a run as `Speed`.

    Args:
        input_tokens: length of the run's prompts in tokens.
        num_bytes: bytes of weights and KV that the decode node read during the run; None: unknown.
    """
    summary, latencies = result.summary, result.summary.latencies
    medians = {name: values.p50 for name, values in latencies.items()}
    load = result.plan.load
    assert isinstance(load, ClosedLoop)
    ttft_s = medians.get("ttft_s")
    times = [record.frame_times_s for record in result.records if record.frame_times_s]
    decoding_s = sum(one[-1] - one[0] for one in times)
    return Speed(
        num_readers=load.concurrency,
        num_requests=summary.num_requests,
        num_failed=sum(summary.errors.values()),
        error=next(iter(summary.error_examples.values()), ""),
        output_tokens_per_s=summary.output_tokens_per_s,
        token_s=medians.get("tpot_s"),
        ttft_s=ttft_s,
        prompt_tokens_per_s=input_tokens / ttft_s if ttft_s else None,
        handoff_s=medians.get("exposed_transfer_s"),
        read_bytes_per_s=num_bytes / decoding_s if num_bytes and decoding_s else None,
        kept_up=summary.lag.kept_up,
    )


async def _read_bytes(page: str, token: str) -> float | None:
    """Return the bytes that a node has read so far, from its metrics page; None: unknown."""
    return await asyncio.to_thread(_fetch_read_bytes, page, token) if page else None


def _fetch_read_bytes(page: str, token: str) -> float | None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{page}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_METRICS_TIMEOUT_S) as response:
            lines = response.read().decode("utf-8").splitlines()
    except OSError:  # without metrics, the share of the memory bandwidth stays unknown
        return None
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(_READ_COUNTERS)]
    return sum(map(float, found)) if found else None
