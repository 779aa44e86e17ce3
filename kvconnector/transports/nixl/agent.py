"""NixlAgent: the only module that imports nixl. Typed; every failure is a TransferError.

NIXL shapes this file: writes cannot be cancelled, its progress thread burns a core, thread safety
is off by default, errors are exceptions, and a bad address kills the receiver. So one thread makes
all calls, and addresses come from tables made here.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.api.errors import ConfigError, TransferError
from kvconnector.layout import KVLayout

# Most released peers that NIXL still knows. A peer whose process has ended costs some kilobytes.
# Dropping a living peer leaves a TCP connection open on both sides.
MAX_RELEASED = 256
# Longest silence of a kept connection; after a network cut, it may be dead without an error.
ANSWER_TIMEOUT_S = 2.0


def _import_nixl() -> Any:
    # read once, when UCX starts; an operator's own settings stay
    # UCX listens without authentication on each device that it may use; hence loopback only.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        import nixl
        import nixl._api
    except ImportError as error:
        raise ConfigError(f"kv_connector: nixl cannot be imported here: {error}") from error
    return nixl


def _words(error: Exception) -> str:
    """Return NIXL's error, with UCX's reason if any, which NIXL's codes do not tell."""
    if "BACKEND" not in str(error):
        return str(error)
    return f"{error} (UCX's lines in this node's log say why; UCX_LOG_LEVEL=info: more of them)"


class NixlAgent:
    """NIXL's agent of this process, with the memory that it has registered.

    When told to forget a peer, NIXL does not close the peer's connection. So a released peer is
    kept instead, and found again by name and metadata. A name belongs to one process start, so
    NIXL's data about the peer stays true. Nothing is written to a released peer, as its tables are
    gone.

    Args:
        name: name of the agent; new at each process start, as a reused name damages peers' tables.
        layouts: layouts of the memory ranges to register.
        memory_kind: "DRAM" or "VRAM".
    """

    def __init__(self, name: str, layouts: Sequence[KVLayout], memory_kind: str) -> None:
        nixl = _import_nixl()
        self._errors: tuple[type[Exception], ...] = tuple(
            value
            for key, value in vars(nixl._bindings).items()
            if key.startswith("nixl") and key.endswith("Error") and isinstance(value, type)
        )
        api = nixl._api
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = api.nixl_agent(name, config)
            # A layout's blocks are one contiguous range: one region, whatever their number.
            regions = np.array(
                [[at.base_address, at.num_blocks * at.block_bytes, at.device_id] for at in layouts],
                dtype=np.uint64,
            )
            self._agent.register_memory(self._agent.get_reg_descs(regions, memory_kind))
            self._memory_kind = memory_kind
            self._peers: dict[str, bytes] = {}  # peers that NIXL knows: name -> metadata
            self._released: OrderedDict[str, None] = OrderedDict()  # names, oldest first
            self._failed: set[str] = set()  # names whose connection failed
            # Names of peers taken up again and not heard since -> when they were taken up.
            self._resumed: dict[str, float] = {}
        except self._errors as error:
            raise ConfigError(f"kv_connector: NIXL cannot start: {_words(error)}") from error

    def metadata(self) -> bytes:
        """Return the agent's metadata, which a peer needs for `add_peer`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    @property
    def num_peers(self) -> int:
        """Return the number of peers that NIXL knows, released peers included."""
        return len(self._peers)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Add a peer, or take up a released peer again.

        Args:
            name: name that the metadata must have. NIXL must not see metadata with another name,
                which would replace another peer's metadata.

        Raises:
            TransferError: the metadata is of another peer, or NIXL refuses it.
        """
        if self._peers.get(name) == metadata and name not in self._failed:
            if name in self._released:
                del self._released[name]
                self._resumed[name] = time.monotonic()
            return
        own = name.encode()
        head = b"nixlSerDes|Agent" + len(own).to_bytes(8, "little") + own + b"|"
        if not metadata.startswith(head):
            raise TransferError(f"the metadata of {name} is damaged, or another agent's")
        self._forget(name)
        try:
            claimed: str = self._agent.add_remote_agent(metadata).decode(errors="replace")
            if claimed != name:
                raise TransferError(f"the metadata of {name} names {claimed}")
        except self._errors as error:
            raise TransferError(f"NIXL cannot add the peer: {_words(error)}") from error
        self._peers[name] = metadata

    def release_peer(self, name: str, tables: Iterable[Any]) -> None:
        """Release a peer's tables; keep the peer until newer peers displace it.

        Writes posted to the peer may still land. A peer whose connection failed is forgotten.
        """
        for table in tables:
            self.release(table)
        if name not in self._peers:
            return
        self._released[name] = None
        self._released.move_to_end(name)
        if name in self._failed:
            self._forget(name)
        while len(self._released) > MAX_RELEASED:
            self._forget(next(iter(self._released)))

    def _forget(self, name: str) -> None:
        """Let NIXL forget a peer; harmless if NIXL does not know the peer."""
        self._released.pop(name, None)
        self._resumed.pop(name, None)
        self._failed.discard(name)
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(*self._errors):  # fails for a dead peer, which does not matter
                self._agent.remove_remote_agent(name)

    def prepare(self, name: str, descriptors: npt.NDArray[np.uint64]) -> Any:
        """Make a table of memory ranges, which writes refer to by index.

        Args:
            name: the peer whose memory it is; empty: this process.
        """
        try:
            descs = self._agent.get_xfer_descs(descriptors, self._memory_kind)
            return self._agent.prep_xfer_dlist(name, descs)
        except self._errors as error:
            raise TransferError(f"NIXL cannot prepare a table: {_words(error)}") from error

    def release(self, table: Any) -> None:
        """Release a table; writes posted from it may still arrive."""
        with contextlib.suppress(*self._errors):
            table.release()

    def post_write(
        self,
        name: str,
        local_table: Any,
        local: npt.NDArray[np.int32],
        remote_table: Any,
        remote: npt.NDArray[np.int32],
    ) -> Any:
        """Post a one-sided write of ranges ``local[i]`` to ``remote[i]``; return a handle.

        Args:
            name: peer whose memory the remote table covers.

        Raises:
            TransferError: NIXL refuses the write.

        Consecutive pairs that are adjacent on both sides become one range. On one host, the call
        itself copies the bytes (without the GIL).
        """
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", local_table, local, remote_table, remote
            )
            self._agent.transfer(handle)
        except self._errors as error:
            self._failed.add(name)
            raise TransferError(f"NIXL write failed: {_words(error)}") from error
        return handle

    def is_done(self, name: str, handle: Any) -> bool:
        """Return whether a write posted to a peer is complete; if so, release the handle."""
        try:
            if self._agent.check_xfer_state(handle) != "DONE":
                return False
        except self._errors as error:
            self._failed.add(name)
            with contextlib.suppress(*self._errors):
                handle.release()
            raise TransferError(f"NIXL write failed: {_words(error)}") from error
        handle.release()
        return True

    def notify(self, name: str, payload: bytes) -> None:
        """Send a short message to a peer; raises TransferError."""
        resumed_at = self._resumed.get(name)
        if resumed_at is not None and time.monotonic() - resumed_at >= ANSWER_TIMEOUT_S:
            self._failed.add(name)
            raise TransferError(f"{name} does not answer over the connection that was kept")
        try:
            self._agent.send_notif(name, payload)
        except self._errors as error:
            self._failed.add(name)
            raise TransferError(f"NIXL message failed: {_words(error)}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return arrived messages, each with its agent's name; drives NIXL's progress.

        Any process that reaches our port may connect, under any name.
        """
        try:
            by_name: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransferError(f"NIXL cannot read messages: {_words(error)}") from error
        if by_name and self._resumed:
            for name in self._resumed.keys() & by_name.keys():
                self._note_first_message(name)
        return [(name, payload) for name, payloads in by_name.items() for payload in payloads]

    def _note_first_message(self, name: str) -> None:
        """Trust a kept connection if its peer is heard soon; otherwise, replace the connection.

        A peer that is heard late got no answer over our connection, and has replaced its own.
        """
        if time.monotonic() - self._resumed[name] < ANSWER_TIMEOUT_S / 2:
            del self._resumed[name]
        else:
            self._resumed[name] = -math.inf

    def close(self, tables: Iterable[Any]) -> None:
        """Destroy the agent and our own tables; posted writes stop."""
        for table in tables:
            table.release()
        del self._agent
