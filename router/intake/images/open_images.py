"""OpenImages: limits the bytes of image files that a router holds for its open requests.

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
    """Counts and limits the bytes of image files of open requests. Belongs to one event loop.

    Args:
        max_bytes: maximum number of bytes over all callers; one caller may have half of them. A
            caller's only request is never refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()  # bytes that are held, by caller
        # Callers and bytes of images that were freed, perhaps on another thread.
        self._freed: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Number of bytes of image files that are held now."""
        while self._freed:
            caller, num_bytes = self._freed.popleft()
            self._add(caller, -num_bytes)
        return self._num_bytes.total()

    @contextmanager
    def reading(self, num_bytes: int, caller: str) -> Iterator[None]:
        """Count the files of a request while the request is being read.

        Raises OverloadedError if open requests already hold too many bytes.
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
        """Count the files of images until the images are freed."""
        for image in images:
            self._add(caller, len(image.data))
            freed = (caller, len(image.data))
            weakref.finalize(image, self._freed.append, freed).atexit = False

    def _add(self, caller: str, num_bytes: int) -> None:
        self._num_bytes[caller] += num_bytes
        if not self._num_bytes[caller]:
            del self._num_bytes[caller]
