"""OpenImages: the bytes of image files that a router holds for its open requests.

A request holds its files until it ends, because a further attempt sends them again. Thousands of
requests may wait while nodes are full, and images are much larger than prompts of text.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton.api.errors import OverloadedError
from baton.api.images import PromptImage


class OpenImages:
    """Bounds the bytes of open image files. Belongs to one event loop.

    Args:
        max_bytes: maximum number of bytes of all callers; one caller may have half of them. A
            single request is never refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()  # bytes by caller
        # Images that were freed, perhaps on another thread.
        self._freed: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all open files."""
        while self._freed:
            caller, num_bytes = self._freed.popleft()
            self._add(caller, -num_bytes)
        return self._num_bytes.total()

    @contextmanager
    def reading(self, num_bytes: int, caller: str) -> Iterator[None]:
        """Count the files of a request while the request is read.

        Raises OverloadedError if open requests have too many bytes already.
        """
        num_open, num_own = self.num_bytes, self._num_bytes[caller]
        limits = (num_open, self.max_bytes), (num_own, self.max_bytes // 2)
        for found, limit in limits:
            if found and found + num_bytes > limit:
                raise OverloadedError(
                    f"images of open requests have {found} bytes, and {limit} are the limit "
                    "(max_open_image_bytes; half of it for one tenant)"
                )
        self._add(caller, num_bytes)
        try:
            yield
        finally:
            self._add(caller, -num_bytes)

    def hold(self, images: Iterable[PromptImage], caller: str) -> None:
        """Count images until they are freed."""
        for image in images:
            self._add(caller, len(image.data))
            freed = (caller, len(image.data))
            weakref.finalize(image, self._freed.append, freed).atexit = False

    def _add(self, caller: str, num_bytes: int) -> None:
        self._num_bytes[caller] += num_bytes
        if not self._num_bytes[caller]:
            del self._num_bytes[caller]
