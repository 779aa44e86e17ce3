"""An adapter for which one rank has too little memory is refused, and the ranks go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.adapters.digest import AdapterError
from baton.engine_config import EngineConfig
from engine.executors import rank_process
from engine.executors.rank_process import Start
from engine.executors.ranks import OtherRanks, RanksExecutor
from engine.executors.uniproc import worker_of
from engine.make_engine import make_engine
from engine.worker.worker import Worker
from tests.fakes.adapter_files import write_query_adapter
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.integration.test_images_on_ranks import ThreadRank


@pytest.mark.parametrize("where", ["_pieces", "_with_norms"])  # before and after ranks agree
@pytest.mark.parametrize("short", ["leader", "other"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 9 bytes")])
def test_an_adapter_without_memory_on_a_rank_is_refused_alone(
    where: str, short: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_blocks=32,
        num_threads=1,
        max_adapters=2,
        executor="external_launcher",
        tensor_parallel_size=2,
    )
    workers: list[Worker] = []

    def make_worker(*arguments: Any) -> Worker:
        workers.append(Worker(*arguments))
        return workers[-1]

    monkeypatch.setattr(rank_process, "Worker", make_worker)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    other = ThreadRank(Start(str(DEMO_MODEL), config, 1 - config.leader, str(meeting), 30))
    others = OtherRanks([other], lambda: None)
    executor = RanksExecutor(DEMO_MODEL, config, others, torch.device("cpu"), str(meeting))
    engine = make_engine(DEMO_MODEL, config, executor=executor)
    try:
        adapters = engine.adapters
        read = adapters.read(write_query_adapter(tmp_path, "adapter", seed=1))
        slots: Any = (worker_of(executor) if short == "leader" else workers[0])._adapters

        def fail(*_: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(slots, where, fail)
            with pytest.raises(AdapterError, match=r": does not fit in this machine's memory$"):
                adapters.load(read)
        assert adapters.views() == []
        executor.check_health()
        adapters.load(read)
        assert adapters.digests == (read.digest,)
        assert adapters.unload(read.digest)
        assert adapters.load_again(read.digest)  # the leader has packed it before
    finally:
        engine.close()
