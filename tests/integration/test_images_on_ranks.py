"""An image that any rank fails to encode ends its requests alone, with one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from engine.engine import Engine
from engine.executors import rank_process
from engine.executors.rank_process import ENCODER, Start
from engine.executors.ranks import OtherRanks, RanksExecutor
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from engine.worker.worker import Worker
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.images.fake_images import file_of
from tests.unit.engine.test_images import request_of, run

# The tensor and pipeline parallel sizes, and whether steps run ahead.
KINDS = [(2, 1, False), (2, 1, True), (1, 2, True)]
GOOD, BAD = file_of([3, 5, 4]), file_of([3, 13, 4])


class ThreadRank:
    """A rank on a thread of the test, so that the test reaches the rank's encoder."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.messages, theirs = Pipe()
        self.beside, beside = Pipe()
        self.messages.send_bytes(ENCODER.encode(start))
        never = threading.Event().wait
        self._thread = threading.Thread(
            target=rank_process.serve, args=(theirs, beside, never), daemon=True
        )
        self._thread.start()

    def why_gone(self) -> str | None:
        return None

    def end_rank(self) -> None:
        self.messages.close()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the rank goes on after its messages end"


class Waves:
    """An encoder that makes embeddings from tokens alone, and raises at one token."""

    def __init__(self, width: int, raises_at: int | None = None) -> None:
        self._width, self.raises_at = width, raises_at

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        tokens = pixels["tokens"]  # [num_placeholders]
        if self.raises_at in tokens.tolist():
            raise RuntimeError("out of memory")
        return torch.cos(tokens[:, None].float() * torch.arange(self._width)).bfloat16().float()


@pytest.fixture(params=KINDS, ids=str)
def ranks(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Waves]]:
    """Return an engine on two ranks, and the encoder of the rank that does not lead."""
    tensor, stages, ahead = request.param
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_blocks=32,
        num_threads=1,
        block_size=4,
        executor="external_launcher",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        async_scheduling=ahead,
    )
    workers: list[Worker] = []

    def make_worker(*arguments: Any) -> Worker:
        workers.append(Worker(*arguments))
        return workers[-1]

    monkeypatch.setattr(rank_process, "Worker", make_worker)
    meeting = str(tmp_path)
    other = ThreadRank(Start(str(DEMO_MODEL), config, 1 - config.leader, meeting, 30))
    others = OtherRanks([other], lambda: None)
    device = torch.device("cpu")
    executor = RanksExecutor(DEMO_MODEL, config, others, device, meeting)
    width = executor.model_config.hidden_size
    waves = Waves(width)
    for worker, encoder in ((worker_of(executor), Waves(width)), (workers[0], waves)):
        model: Any = worker.runner._model
        model.vision = encoder
    engine = make_engine(DEMO_MODEL, config, executor=executor)
    try:
        yield engine, waves
    finally:
        engine.close()


def test_an_image_that_another_rank_cannot_encode_ends_its_request_alone(
    ranks: tuple[Engine, Waves],
) -> None:
    engine, encoder = ranks
    wanted = run(engine, request_of("first", [range(5), GOOD, range(5)]))["first"]
    encoder.raises_at = 13
    bad = [range(9), BAD, range(5)]
    found = run(
        engine,
        request_of("bad", bad),
        request_of("good", [range(5), GOOD, range(5)]),
        request_of("also bad", [range(7), BAD, range(5)]),
    )
    failures = {name: str(error) for name, error in engine.take_failures()}
    line = f"images[0]: rank {1 - engine.executor.config.leader} could not encode the image"
    assert failures == {"bad": line, "also bad": line}
    assert found == {"bad": [], "good": wanted, "also bad": []}
    encoder.raises_at = None
    again = run(engine, request_of("again", bad))["again"]
    assert len(again) == len(wanted), "no rank keeps a part of the failed encoding"
    assert run(engine, request_of("and again", bad))["and again"] == again
    assert not engine.take_failures()
