"""Collective: what the ranks of one model say to each other while they compute it.

Every rank makes the same calls in the same order. Refuses to know: what the numbers are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """The ranks of one model, as one of them sees the others.

    Calls raise `CollectiveError` when another rank is gone, or says nothing for too long.

    Attributes:
        rank: of this one, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add what all ranks have, in place and to the same bits everywhere; returns ``tensor``."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[...]`` of each rank, of equal shapes -> ``[size, ...]`` on all of them."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Have on all ranks what ``source`` has, in place; returns ``tensor``."""
        ...

    def abort(self) -> None:
        """Let every call of every rank fail from now on; from any thread."""
        ...


class CollectiveError(RuntimeError):
    """Another rank is gone, or has said nothing for too long."""


class SingleRank:
    """The only rank there is: a ``Collective`` of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return it: it is the sum."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return it as the only one of its kind."""
        return tensor[None]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return it: it is what the source has."""
        return tensor

    def abort(self) -> None:
        """Do nothing: nobody waits."""


SINGLE_RANK = SingleRank()
