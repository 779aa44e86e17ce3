"""EncoderCache: which encodings of images the workers keep, and which requests need them.

    held    some request has tokens of the image to compute
    free    kept for later requests; the least recently used one is evicted first

Refuses to know: tensors, steps, pixel values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

Holder = tuple[str, int]  # (request id, position in the prompt of the image's first token)


class EncoderCache:
    """The workers' encodings, by digest. Only the scheduler changes this object.

    Args:
        num_tokens: maximum number of tokens (embedding rows) of all encodings together.

    Attributes:
        num_tokens: the argument, unchanged.
        num_used: number of tokens of all kept encodings.
        num_held: number of tokens of the held encodings.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_used = 0
        self.num_held = 0
        self._sizes: dict[bytes, int] = {}
        # Holders of each held encoding, by digest
        self._holders: dict[bytes, set[Holder]] = {}
        # For each request id: the digests of the encodings that the request holds, each with its
        # holder.
        self._held_by: dict[str, set[tuple[bytes, Holder]]] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __contains__(self, digest: bytes) -> bool:
        """Return whether an image's encoding is kept."""
        return digest in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the digests of all kept encodings."""
        return iter(self._sizes)

    def is_held(self, digest: bytes) -> bool:
        """Return whether some request needs an encoding."""
        return digest in self._holders

    def size_of(self, digest: bytes) -> int:
        """Return the number of tokens of a kept encoding."""
        return self._sizes[digest]

    def has_room(self, num_tokens: int, kept: Iterable[bytes] = ()) -> bool:
        """Return whether ``num_tokens`` more tokens fit once free encodings are evicted.

        Args:
            kept: digests of encodings that must not be evicted.
        """
        num_kept = sum(self._sizes[digest] for digest in set(kept) if digest in self._free)
        return self.num_held + num_kept + num_tokens <= self.num_tokens

    def hold(self, digest: bytes, holder: Holder) -> bool:
        """Hold a kept encoding for a request; return False if the encoding is not in the cache."""
        if digest not in self._sizes:
            return False
        if digest in self._free:
            del self._free[digest]
            self.num_held += self._sizes[digest]
        self._holders.setdefault(digest, set()).add(holder)
        self._held_by.setdefault(holder[0], set()).add((digest, holder))
        return True

    def add(self, digest: bytes, num_tokens: int, holder: Holder) -> list[bytes]:
        """Add a new encoding, held by a request; return the encodings that are evicted for it.

        Call only if `has_room` returned True.
        """
        assert digest not in self._sizes
        leaving: list[bytes] = []
        while self.num_used + num_tokens > self.num_tokens:
            oldest, _ = self._free.popitem(last=False)
            self.num_used -= self._sizes.pop(oldest)
            leaving.append(oldest)
        self._sizes[digest] = num_tokens
        self._free[digest] = None
        self.num_used += num_tokens
        self.hold(digest, holder)
        return leaving

    def release(self, digest: bytes, holder: Holder) -> None:
        """Release the encoding of an image, because a request has computed the image's tokens."""
        holders = self._holders.get(digest)
        if holders is None or holder not in holders:  # the request has left the batch meanwhile
            return
        holders.remove(holder)
        held = self._held_by[holder[0]]
        held.remove((digest, holder))
        if not held:
            del self._held_by[holder[0]]
        if not holders:
            del self._holders[digest]
            self.num_held -= self._sizes[digest]
            self._free[digest] = None

    def release_all(self, request_id: str) -> None:
        """Release all encodings that a request holds, because it has left the batch."""
        for digest, holder in list(self._held_by.get(request_id, ())):
            self.release(digest, holder)

    def remove(self, digest: bytes) -> None:
        """Drop an encoding that the workers failed to make.

        The caller must end the requests that hold the encoding.
        """
        if digest not in self._sizes:
            return
        for holder in list(self._holders.get(digest, ())):
            self.release(digest, holder)
        del self._free[digest]
        self.num_used -= self._sizes.pop(digest)

    def check(self) -> None:
        """Assert the invariants; for tests and debug runs."""
        assert self.num_used == sum(self._sizes.values()) <= self.num_tokens
        assert set(self._free) | set(self._holders) == set(self._sizes)
        assert not set(self._free) & set(self._holders)
        assert self.num_held == sum(self._sizes[digest] for digest in self._holders)
        assert all(self._holders.values())
        by_digest = {(d, holder) for d, holders in self._holders.items() for holder in holders}
        by_request = {pair for pairs in self._held_by.values() for pair in pairs}
        assert by_digest == by_request
        assert all(
            holder[0] == name for name, pairs in self._held_by.items() for _, holder in pairs
        )
