"""Unit tests of prepare and launch: a prepared step runs elsewhere, whatever befalls requests."""

from __future__ import annotations

import threading

from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.engine import Engine
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.8, logprobs=2),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, min_tokens=3),
    SamplingParams(temperature=0.9, top_k=9, prompt_logprobs=1),
]


def start() -> tuple[Engine, list[Request]]:
    engine = make_engine(
        DEMO_MODEL, EngineConfig(device="cpu", num_threads=1, kv_cache_bytes=2**24)
    )
    requests = [
        Request.create(
            str(index),
            [5 + index] * 9,
            params,
            seed=index,
            eos_token_ids=engine.eos_token_ids,
            max_model_len=engine.max_model_len,
        )
        for index, params in enumerate(PARAMS)
    ]
    for request in requests:
        engine.add_request(request)
    return engine, requests


def on_a_thread(engine: Engine, scheduled: SchedulerOutput, meanwhile: list[Request]) -> object:
    """Prepare here, change the requests for the worse, run there."""
    prepared = worker_of(engine.executor).runner.prepare(engine._scheduler.plan(scheduled)[0])
    saved = [(r.token_ids, r.block_ids, r.num_computed_tokens) for r in meanwhile]
    for request in meanwhile:
        request.token_ids, request.block_ids, request.num_computed_tokens = [0] * 30, [], 17
    outputs: list[ModelRunnerOutput] = []
    thread = threading.Thread(
        target=lambda: outputs.append(worker_of(engine.executor).runner.launch(prepared).wait())
    )
    thread.start()
    thread.join()
    for request, (token_ids, block_ids, num_computed_tokens) in zip(meanwhile, saved, strict=True):
        request.token_ids, request.block_ids = token_ids, block_ids
        request.num_computed_tokens = num_computed_tokens
    return outputs[0]


def test_launch_on_another_thread_reads_no_request() -> None:
    (plain, _), (other, requests) = start(), start()
    for _ in range(4):
        scheduled, again = plain._scheduler.schedule(), other._scheduler.schedule()
        expected = worker_of(plain.executor).runner.execute(plain._scheduler.plan(scheduled)[0])
        found = on_a_thread(other, again, requests)
        assert found == expected
        plain._scheduler.update(scheduled, expected)
        other._scheduler.update(again, expected)
    assert all(request.num_output_tokens == 4 for request in requests)
