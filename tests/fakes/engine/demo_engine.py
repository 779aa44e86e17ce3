"""A small engine over the demo model, and one request's answer."""

from __future__ import annotations

from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from engine.core.request import Request
from engine.engine import Engine
from engine.make_engine import make_engine
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


def load_demo(**options: Any) -> Engine:
    """Load the demo model on a CPU with 32 blocks and one thread."""
    return make_engine(
        DEMO_MODEL, EngineConfig(device="cpu", num_blocks=32, num_threads=1, **options)
    )


def answer(engine: Engine) -> list[int]:
    """Return eight tokens behind a prompt of forty, computed to the end of all requests."""
    params = SamplingParams(max_tokens=8, temperature=0)
    engine.add_request(
        Request.create(
            "a", [*range(5, 45)], params, seed=0, eos_token_ids=frozenset(), max_model_len=99
        )
    )
    tokens: list[int] = []
    while engine.requests:
        for output in engine.step().outputs:
            tokens += output.token_ids
    return tokens
