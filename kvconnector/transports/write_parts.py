"""WriteParts: one write that consists of several posted writes, to or from several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.api.errors import TransferError
from kvconnector.transports.base import PendingWrite


class WriteParts:
    """A write that was posted in several parts; a `PendingWrite`.

    If a part fails, the error is raised only once no part is in flight, because callers reuse the
    blocks after an error.
    """

    def __init__(self, parts: list[PendingWrite], problem: str = "") -> None:
        self._parts = parts
        self._problem = problem

    def is_done(self) -> bool:
        """Return whether all parts are complete; raise TransferError if one has failed."""
        left = []
        for part in self._parts:
            try:
                if not part.is_done():
                    left.append(part)
            except TransferError as error:
                self._problem = self._problem or str(error)
        self._parts = left
        if left:
            return False
        if self._problem:
            raise TransferError(self._problem)
        return True


def post_all(posts: Iterable[Callable[[], PendingWrite]]) -> PendingWrite:
    """Post the parts of a write one after another, up to the first failure.

    Raises TransferError if the first part cannot be posted.
    """
    parts: list[PendingWrite] = []
    for post in posts:
        try:
            parts.append(post())
        except TransferError as error:
            if not parts:
                raise
            return WriteParts(parts, str(error))
    return parts[0] if len(parts) == 1 else WriteParts(parts)
