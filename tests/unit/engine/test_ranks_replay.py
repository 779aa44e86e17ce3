"""Unit tests of captured decode steps on several ranks: all ranks go on from the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine_config import EngineConfig
from engine.sampling.step_sampler import LaunchedStep, StepSampler
from engine.worker.cuda_graphs import Replays, reason_against_graphs
from engine.worker.extras.rank_tokens import RankTokens
from engine.worker.graph_capture import drop_unless_on_all_ranks
from engine.worker.inputs.prepared_step import ReplayStep
from engine.worker.model_runner import ModelRunner
from models.parallel.group import Ranks, SingleRank

CPU = torch.device("cpu")
DRAWN = (8, 9)


class Wire(SingleRank):
    """One of two ranks, whose tensors the other rank receives in order."""

    size = 2

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank, self.sent = rank, sent

    def send(self, tensor: Tensor, to: int) -> None:
        self.sent.append(tensor)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.sent.pop(0))


class FakeGraphs:
    """Stands in for a captured step: samples token 7 in both rows."""

    def __init__(self, last_tokens: Tensor) -> None:
        self._last_tokens = last_tokens
        self.read: list[int] = []
        self.corrected: list[int] | None = None

    def replay(self, staged: ReplayStep) -> tuple[Tensor, Tensor]:
        self.read = self._last_tokens.tolist()
        return torch.zeros(2, 4), torch.tensor([7, 7])

    def correct(self, staged: ReplayStep, token_ids: Tensor) -> None:
        self.corrected = token_ids.tolist()


class Runner(ModelRunner):
    """A rank's runner with a captured step and no model."""

    def __init__(self, rank: int, sent: list[Tensor], *, sends_tokens: bool) -> None:
        group = Wire(rank, sent)
        self.group = group
        self._exchange = RankTokens(Ranks(group, group), are_sent=sends_tokens)
        self._device = CPU
        self.extras: Any = SimpleNamespace(draft=lambda launched, hidden, hooks: launched)
        last_tokens = torch.zeros(2, dtype=torch.int64)
        self._input_batch: Any = SimpleNamespace(last_tokens=last_tokens)
        self._model: Any = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self._sampler = StepSampler(samples_on_device=True, rejects=False)
        self._sampled = deque([torch.zeros(2, dtype=torch.int64)])
        self.graphs = FakeGraphs(last_tokens)
        self.decode_graphs: Any = SimpleNamespace(graphs=self.graphs)

    def _sample_on_host(self, *arguments: Any) -> tuple[LaunchedStep, Tensor]:
        assert self._exchange.leads, "only the leader has the grammars' masks"
        launched = self._launched_step(arguments[0], None, {}, 0.0)
        return launched, torch.tensor(DRAWN)


def step(*, needs_host: bool) -> ReplayStep:
    sampling: Any = SimpleNamespace(needs_host=needs_host, draft_token_ids=())
    return ReplayStep(sampling, 0, 2, 2, 1)


def two_ranks(*, sends_tokens: bool) -> tuple[Runner, Runner]:
    sent: list[Tensor] = []
    return Runner(0, sent, sends_tokens=sends_tokens), Runner(1, sent, sends_tokens=sends_tokens)


def test_a_replay_reads_the_tokens_that_the_leader_sampled_in_an_eager_step() -> None:
    leader, other = two_ranks(sends_tokens=True)
    leader._exchange.send(torch.tensor([5]))
    other._exchange.expect(torch.tensor([1]), other._input_batch.last_tokens)
    other.launch(step(needs_host=False))
    assert other.graphs.read == [0, 5]


@pytest.mark.parametrize("sends_tokens", [True, False])
def test_tokens_drawn_on_the_host_are_the_leaders_on_every_rank(sends_tokens: bool) -> None:
    leader, other = two_ranks(sends_tokens=sends_tokens)
    for rank in (leader, other):
        rank.launch(step(needs_host=True))
    assert leader.graphs.corrected == [*DRAWN]
    # Without tokens sent ahead, the next plan names them.
    assert other.graphs.corrected == ([*DRAWN] if sends_tokens else None)


def test_tokens_sampled_within_the_graph_are_not_sent() -> None:
    leader, other = two_ranks(sends_tokens=True)
    for rank in (leader, other):
        rank.launch(step(needs_host=False))
        assert rank.graphs.corrected is None
    assert not leader.group.sent


def test_stages_capture_no_steps() -> None:
    config = EngineConfig(pipeline_parallel_size=2)
    found = reason_against_graphs(config, torch.device("cuda"), ("triton",))
    assert found == "only the last stage computes logits"


class Flags(SingleRank):
    """A group whose ranks say whether each has graphs."""

    def __init__(self, flags: Sequence[bool]) -> None:
        self.size, self._flags = len(flags), flags

    def all_gather(self, tensor: Tensor) -> Tensor:
        assert bool(tensor) is self._flags[0]
        return torch.tensor(self._flags)[:, None].to(tensor.dtype)


@pytest.mark.parametrize(
    ("flags", "kept"), [((True,), True), ((True, True), True), ((True, False), False)]
)
def test_graphs_are_used_by_all_ranks_or_none(flags: tuple[bool, ...], kept: bool) -> None:
    replays = Replays[Any]()
    replays.graphs = object()
    group = Flags(flags)
    drop_unless_on_all_ranks(replays, Ranks(group, group), CPU)
    assert (replays.graphs is not None) is kept
