"""AdapterTable: the LoRA adapters that an engine's worker has in memory, by digest.

    files --> cache of packed adapters --> worker's slots --> requests
              (bounded by bytes)           (bounded by number; least recently used ones are evicted)

Any thread may read, check and pack an adapter. Only loading an adapter into a slot blocks the
engine's steps.

An adapter in use is never evicted. An adapter being unloaded takes no new requests, and is dropped
when its last request ends. Refuses to know: names of adapters, tensors, how a layer applies an
adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from baton.adapters.digest import (
    AdapterDigest,
    AdapterError,
    AdapterMissingError,
    shorten_digest,
)
from baton.adapters.files import Adapter, AdapterFiles, read_adapter
from baton.api.errors import ConfigError, NotFoundError, OverloadedError
from engine.adapter_numbers import is_finite
from engine.executors.base import Executor

DEFAULT_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterView:
    """An adapter in memory, as operators see it.

    Attributes:
        num_bytes: size of the adapter's slot contents, summed over all ranks.
        is_pinned: whether the adapter is never evicted from its slot.
        is_leaving: whether the adapter takes no new requests, and is dropped when its last request
            ends.
    """

    digest: AdapterDigest
    num_bytes: int
    is_pinned: bool
    is_leaving: bool


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter whose packed weights are in memory, so that the worker can load it at once.

    Attributes:
        num_bytes: size of the adapter's weights as read, plus their size as packed for the worker.
    """

    adapter: Adapter
    num_bytes: int

    @property
    def digest(self) -> AdapterDigest:
        """Return the adapter's digest, which identifies its files."""
        return self.adapter.digest


@dataclass(slots=True)
class _Slot:
    num_bytes: int
    is_pinned: bool
    is_leaving: bool = False


class AdapterTable:
    """The adapters of one engine. Used by the engine's thread, except `read` and `digests`.

    Args:
        executor: runs the model with the adapters.
        max_adapters: maximum number of adapters in memory; 0: adapters are disabled.
        cache_bytes: maximum number of bytes of read and packed adapters that are kept; None: the
            default.
        in_use: returns the digests of the adapters that open requests and the steps in flight use.

    Attributes:
        is_suspended: whether no adapter can be loaded now, because the engine sleeps and its
            weights are dropped.
    """

    def __init__(
        self,
        executor: Executor,
        max_adapters: int,
        cache_bytes: int | None,
        in_use: Callable[[], Collection[str]],
    ) -> None:
        self._executor, self._max_adapters, self._in_use = executor, max_adapters, in_use
        self.is_suspended = False
        # Both dicts begin with the least recently used adapter.
        self._slots: OrderedDict[AdapterDigest, _Slot] = OrderedDict()
        self._read: OrderedDict[AdapterDigest, ReadAdapter] = OrderedDict()
        self._cache_bytes = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes

    @property
    def has_slots(self) -> bool:
        """Return whether this engine was started with slots for adapters."""
        return self._max_adapters > 0

    @property
    def digests(self) -> tuple[AdapterDigest, ...]:
        """Return the digests of adapters that take requests; safe from any thread."""
        return tuple(digest for digest, slot in list(self._slots.items()) if not slot.is_leaving)

    def takes_requests(self, digest: AdapterDigest) -> bool:
        """Return whether an adapter is in memory and takes requests."""
        slot = self._slots.get(digest)
        return slot is not None and not slot.is_leaving

    def has_read(self, digest: AdapterDigest) -> bool:
        """Return whether an adapter's packed weights are cached, as `load_again` requires."""
        return digest in self._slots or digest in self._read

    def is_pinned(self, digest: AdapterDigest) -> bool:
        """Return whether an adapter is in memory and keeps its slot."""
        slot = self._slots.get(digest)
        return slot is not None and slot.is_pinned

    def can_have(self, digest: AdapterDigest) -> bool:
        """Return whether an adapter has a slot, or may get a slot that is free or not pinned."""
        slots = self._slots
        is_full = len(slots) >= self._max_adapters
        return digest in slots or not (is_full and all(one.is_pinned for one in slots.values()))

    def views(self) -> list[AdapterView]:
        """Return all adapters in memory, the least recently used one first."""
        return [
            AdapterView(
                digest=digest,
                num_bytes=slot.num_bytes,
                is_pinned=slot.is_pinned,
                is_leaving=slot.is_leaving,
            )
            for digest, slot in self._slots.items()
        ]

    def read(self, folder: Path, digest: AdapterDigest = "") -> ReadAdapter:
        """Read an adapter's files, check that they fit the model, and pack their weights.

        Safe from any thread.

        Args:
            digest: the digest that the files must have; empty: any digest is accepted.

        Raises:
            AdapterError: a file is malformed, has another digest, or does not fit this model.
            ConfigError: this engine takes no adapters.
        """
        self._refuse_without_slots()
        with self._executor.keep_cores():  # other nodes must not compute on the cores used here
            adapter = read_adapter(folder, self._check, is_finite)
            if digest and adapter.digest != digest:
                raise AdapterError(f"{folder}: has the digest {adapter.digest}, not {digest}")
            packed_bytes = self._executor.pack_adapter(adapter)
        return ReadAdapter(adapter, adapter.files.num_bytes + packed_bytes)

    def load_again(
        self, digest: AdapterDigest, *, pinned: bool = False, kept: Collection[str] = ()
    ) -> bool:
        """Load an adapter from its cached weights; return False if they are not cached.

        Raises OverloadedError if every adapter in memory is in use or pinned.
        """
        if digest in self._slots:
            self._keep(digest, pinned=pinned)
        elif digest in self._read:
            self.load(self._read[digest], pinned=pinned, kept=kept)
        else:
            return False
        return True

    def load(self, read: ReadAdapter, *, pinned: bool = False, kept: Collection[str] = ()) -> None:
        """Load an adapter into a slot; if all are taken, evict the least recently used adapter.

        Args:
            pinned: whether the adapter is never evicted.
            kept: digests of adapters that must not be evicted, although no request uses them.

        Raises:
            ConfigError: this engine takes no adapters.
            OverloadedError: every adapter in memory is in use or pinned.
        """
        self._refuse_without_slots()
        digest = read.digest
        if digest not in self._slots:
            self._make_room({*self._in_use(), *kept})
            self._slots[digest] = _Slot(self._load(read.adapter), pinned)
        self._keep(digest, pinned=pinned)
        self.remember(read)

    def unload(self, digest: AdapterDigest) -> bool:
        """Unload an adapter now, or once its last request ends; return whether it is unloaded now.

        Raises NotFoundError if the adapter is not in memory.
        """
        slot = self._slots.get(digest)
        if slot is None:
            raise NotFoundError(f"adapter: {digest} is not loaded here")
        slot.is_leaving = True
        self.settle()
        return digest not in self._slots

    def settle(self) -> None:
        """Drop the adapters that `unload` marked as leaving and that no request uses any more."""
        if not any(slot.is_leaving for slot in self._slots.values()):
            return
        in_use = self._in_use()
        for digest, slot in list(self._slots.items()):
            if slot.is_leaving and digest not in in_use:
                self._drop(digest)

    def acquire(self, digest: AdapterDigest) -> None:
        """Mark an adapter as just used, because a new request uses it; empty: the base model.

        Raises AdapterMissingError if the adapter is not in memory here; another node may have it.
        """
        if not digest:
            return
        if not self.takes_requests(digest):
            raise AdapterMissingError(f"adapter: {shorten_digest(digest)} is not loaded here")
        self._slots.move_to_end(digest)

    def clear(self) -> None:
        """Drop all adapters, pinned ones too, and the cache; call while no request is open.

        An adapter that is needed later must be read from its files again.
        """
        for digest in list(self._slots):
            self._drop(digest)
        self._read.clear()

    def remember(self, read: ReadAdapter) -> None:
        """Cache an adapter's weights; drop the least recently used ones beyond ``cache_bytes``."""
        self._read[read.digest] = read
        self._read.move_to_end(read.digest)
        num_bytes = sum(one.num_bytes for one in self._read.values())
        while num_bytes > self._cache_bytes:
            _, forgotten = self._read.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def _load(self, adapter: Adapter) -> int:
        """Load an adapter on all ranks or on none; return its size in bytes, summed over ranks."""
        try:
            return sum(self._executor.collective_rpc("load_adapter", (adapter,)))
        except AdapterError:
            self._executor.collective_rpc("unload_adapter", (adapter.digest,))
            raise

    def _check(self, files: AdapterFiles) -> None:
        self._executor.check_adapter(files)

    def _refuse_without_slots(self) -> None:
        if not self.has_slots:
            raise ConfigError("max_adapters: is 0, so no adapter can be loaded; must be 1 or more")
        if self.is_suspended:
            raise OverloadedError("adapter: cannot be loaded while the engine sleeps")

    def _keep(self, digest: AdapterDigest, *, pinned: bool) -> None:
        slot = self._slots[digest]
        slot.is_pinned, slot.is_leaving = pinned, False
        self._slots.move_to_end(digest)

    def _make_room(self, in_use: Collection[str]) -> None:
        """Unload the least recently used adapter that may be evicted, if no slot is free."""
        if len(self._slots) < self._max_adapters:
            return
        for digest, slot in self._slots.items():
            if not slot.is_pinned and digest not in in_use:
                self._drop(digest)
                return
        raise OverloadedError(
            f"max_adapters: all {self._max_adapters} adapters are pinned or in use"
        )

    def _drop(self, digest: AdapterDigest) -> None:
        self._executor.collective_rpc("unload_adapter", (digest,))
        del self._slots[digest]
