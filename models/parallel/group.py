"""Collective and Ranks: how the ranks (processes) of one model communicate while they compute.

Every rank must make the same calls in the same order. Refuses to know: what is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


class Collective(Protocol):
    """The ranks of one model that compute together, from the view of one of them.

    All calls raise `CollectiveError` if another rank is gone, or does not respond in time.

    Attributes:
        rank: this rank's number, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place and with equal bits on all; return ``tensor``."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: ``[size, ...]``; all have equal shapes."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of rank ``source`` into ``tensor`` on all ranks; return ``tensor``."""
        ...

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending ``tensor`` to rank ``to``; nobody may write to ``tensor`` afterwards."""
        ...

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Wait for a tensor of rank ``source``, write it into ``tensor``; return ``tensor``."""
        ...

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        ...


class PointToPoint(Protocol):
    """The part of a `Collective` that carries tensors from one rank to another."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Implement `Collective.send`."""
        ...

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Implement `Collective.receive`."""
        ...

    def abort(self) -> None:
        """Implement `Collective.abort`."""
        ...


@runtime_checkable
class StoppedOnDevice(Protocol):
    """A `Collective` whose calls end on a GPU, so the host learns later that one was stopped."""

    def raise_if_stopped(self) -> None:
        """Raise `CollectiveError` if a call was stopped, so its result is meaningless."""
        ...


class CollectiveError(RuntimeError):
    """Another rank is gone, or did not respond in time."""


class SingleRank:
    """A ``Collective`` of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which is the sum over one rank."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as ``[1, ...]``."""
        return tensor[None]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return ``tensor``, since this rank is the source."""
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Raise AssertionError: a single rank has no other rank to send to."""
        raise AssertionError("a single rank has no peer to send to")

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Raise AssertionError: a single rank has no other rank to receive from."""
        raise AssertionError("a single rank has no peer to receive from")

    def abort(self) -> None:
        """Do nothing, since no other rank waits."""


SINGLE_RANK = SingleRank()


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a model, as one rank sees them; each pipeline stage has a group of ranks.

        stage 0: ranks 0 1  ──  stage 1: ranks 2 3      the first rank of the last stage is the
                                                        leader: it samples, in the engine's process

    Attributes:
        everyone: all ranks, stage by stage.
        group: the ranks of this rank's stage.
        stage_layers: number of layers of each stage; empty: all stages have equal numbers.
        expert_parallel: whether a stage's ranks have whole experts: ``auto``, ``on`` or ``off``.
        point_to_point: sends hidden states from each stage to the next; None: ``everyone`` does.
    """

    everyone: Collective = SINGLE_RANK
    group: Collective = SINGLE_RANK
    stage_layers: tuple[int, ...] = ()
    expert_parallel: str = "auto"
    point_to_point: PointToPoint | None = None

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.everyone.size // self.group.size

    @property
    def stage(self) -> int:
        """Return the index of this rank's stage."""
        return self.everyone.rank // self.group.size

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank's stage is the first, which reads token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank's stage is the last, which computes logits."""
        return self.stage == self.num_stages - 1

    @property
    def leader(self) -> int:
        """Return the number of the leader, the rank that samples."""
        return self.everyone.size - self.group.size

    @property
    def leads(self) -> bool:
        """Return whether this rank is the leader."""
        return self.everyone.rank == self.leader

    def raise_if_stopped(self) -> None:
        """Raise CollectiveError if a sum on this rank's GPU was stopped, so results are wrong."""
        if isinstance(self.group, StoppedOnDevice):
            self.group.raise_if_stopped()

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        ways = (self.group, self.everyone, self.point_to_point)
        for one in {id(one): one for one in ways if one is not None}.values():
            one.abort()

    def pass_on(self, hidden: Tensor) -> None:
        """Send this stage's hidden states to the next stage."""
        (self.point_to_point or self.everyone).send(hidden, self.everyone.rank + self.group.size)

    def take_over(self, hidden: Tensor) -> Tensor:
        """Receive the previous stage's hidden states into ``hidden``."""
        return (self.point_to_point or self.everyone).receive(
            hidden, self.everyone.rank - self.group.size
        )


ALONE = Ranks()
