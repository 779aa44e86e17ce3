"""NixlAgent: wraps NIXL's agent, and raises NIXL's failures as TransferError.

Only this module imports nixl. NIXL's writes cannot be cancelled, its progress thread uses a whole
core, thread safety is off by default, and a bad address crashes the receiver. So one thread makes
all calls, and addresses come only from tables that are made here.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.api.errors import ConfigError, TransferError
from kvconnector.layout import KVLayout
from kvconnector.transports.base import UNACKNOWLEDGED_S
from kvconnector.transports.nixl.fences import (
    ConnectionFences,
    RoundTrips,
    WorkerSockets,
    watched_sockets,
)

# Maximum number of released peers that NIXL keeps. A kept peer whose process has ended costs some
# kilobytes of memory. Dropping a living peer leaves a TCP connection open on both sides.
MAX_RELEASED = 256
# A reused connection counts as failed after this many seconds without a message. After a network
# failure, the connection may be dead without an error.
ANSWER_TIMEOUT_S = 2.0


def _import_nixl() -> Any:
    # UCX reads these variables once, at its start; values that an operator has set are kept. UCX
    # listens without authentication on each network device that it may use, so the default is the
    # loopback device only.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", f"{UNACKNOWLEDGED_S}s")
    # Without CONN_NB, connecting blocks the thread, and each failed attempt leaves a socket open.
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    # Between processes of one host, UCX copies this many bytes per system call. UCX's default of
    # 512 KiB needs more calls, which is slower.
    os.environ.setdefault("UCX_CMA_SEG_SIZE", "8m")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        import nixl
        import nixl._api
    except ImportError as error:
        raise ConfigError(f"kv_connector: nixl cannot be imported here: {error}") from error
    return nixl


def _epoll_instances() -> dict[int, list[int]]:
    """Return this process's epoll instances, each with the descriptors that it watches."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for place in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(place.readlink()) == "anon_inode:[eventpoll]":
                    lines = Path("/proc/self/fdinfo", place.name).read_text().splitlines()
                    watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
                    found[int(place.name)] = watched
    return found


def _find_descriptor(known: Container[int]) -> int | None:
    """Return the epoll instance of UCX's TCP sockets, which NIXL's API does not give.

    UCX makes an epoll instance for the sockets of each agent, and one for its own thread, which
    watches the instances of all agents of this process.

    Returns None if messages may use another device, such as InfiniBand. Messages never use shared
    memory here, because it does not show that a peer has ended.

    Args:
        known: descriptors of the epoll instances that existed before the agent was made.
    """
    devices = os.environ["UCX_NET_DEVICES"].split(",")
    has_tcp = {"all", "tcp"} & set(os.environ.get("UCX_TLS", "all").split(","))
    if not has_tcp or not all(Path("/sys/class/net", device).exists() for device in devices):
        return None
    instances = _epoll_instances()
    watched = set(itertools.chain.from_iterable(instances.values()))
    inner = [one for one in instances if one in watched and one not in known]
    return inner[0] if len(inner) == 1 else None


def _error_text(error: Exception) -> str:
    """Return NIXL's error as text; if UCX is the cause, say where UCX's reason is logged."""
    if "BACKEND" not in str(error):
        return str(error)
    return f"{error} (UCX's lines in this node's log say why; UCX_LOG_LEVEL=info adds lines)"


class NixlAgent:
    """The NIXL agent of this process, with the memory that it has registered.

    NIXL does not close a peer's connection when it forgets the peer. So this class keeps a released
    peer, and uses it again if a peer with the same name and metadata is added. A name belongs to
    one start of the peer's process, so NIXL's data about the peer stays valid. Nothing can be
    written to a released peer, because the tables of its memory are released.

    Args:
        name: name of the agent; new at each start of the process, because a reused name damages the
            tables of its peers.
        layouts: layouts of the memory ranges to register.
        memory_kind: "DRAM" or "VRAM".

    Attributes:
        descriptor: becomes readable when bytes arrive over UCX's TCP sockets, which also carry the
            messages between processes on one host; None if it was not found.
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
            known = set(_epoll_instances())
            self._agent = api.nixl_agent(name, config)
            self.descriptor = _find_descriptor(known)
            sockets = WorkerSockets(self._sockets)
            self._fences, self._round_trips = ConnectionFences(sockets), RoundTrips(sockets)
            # A layout's blocks are one contiguous range, so they are registered as one region.
            regions = np.array(
                [[at.base_address, at.num_blocks * at.block_bytes, at.device_id] for at in layouts],
                dtype=np.uint64,
            )
            self._agent.register_memory(self._agent.get_reg_descs(regions, memory_kind))
            self._memory_kind = memory_kind
            self._peers: dict[str, bytes] = {}  # peers that NIXL knows: name -> metadata
            # Names of released peers, oldest first
            self._released: OrderedDict[str, None] = OrderedDict()
            self._failed: set[str] = set()  # names of peers whose connection failed
            # Peers that were released and added again, and have sent nothing since, with the time
            # at which they were added again
            self._resumed: dict[str, float] = {}
        except self._errors as error:
            raise ConfigError(f"kv_connector: NIXL cannot start: {_error_text(error)}") from error

    def metadata(self) -> bytes:
        """Return the agent's metadata, which a peer passes to `add_peer`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    @property
    def num_peers(self) -> int:
        """Return the number of peers that NIXL knows, including released peers."""
        return len(self._peers)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Add a peer, or reuse a released peer.

        Args:
            name: name that the metadata must contain. Metadata with another peer's name would
                replace NIXL's data about that peer.

        Raises:
            TransferError: the metadata contains another name, or NIXL refuses the metadata.
        """
        if self._peers.get(name) == metadata and name not in self._failed:
            if name in self._released:
                del self._released[name]
                self._resumed[name] = time.monotonic()
            return
        own = name.encode()
        head = b"nixlSerDes|Agent" + len(own).to_bytes(8, "little") + own + b"|"
        if not metadata.startswith(head):
            raise TransferError(f"the metadata of {name} is damaged, or belongs to another agent")
        self._forget(name)
        try:
            claimed: str = self._agent.add_remote_agent(metadata).decode(errors="replace")
            if claimed != name:
                raise TransferError(f"the metadata of {name} contains the name {claimed}")
        except self._errors as error:
            raise TransferError(f"NIXL cannot add the peer: {_error_text(error)}") from error
        self._peers[name] = metadata

    def release_peer(self, name: str, tables: Iterable[Any]) -> None:
        """Release a peer's tables; NIXL keeps the peer until ``MAX_RELEASED`` newer ones are kept.

        Posted writes may still reach the peer. A peer whose connection has failed is not kept.
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
        """Make NIXL forget a peer; do nothing if NIXL does not know the peer."""
        self._released.pop(name, None)
        self._resumed.pop(name, None)
        self._failed.discard(name)
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(*self._errors):  # fails for a dead peer, without harm
                self._agent.remove_remote_agent(name)

    def prepare(self, name: str, descriptors: npt.NDArray[np.uint64]) -> Any:
        """Make a table of memory ranges; `post_write` refers to its ranges by index.

        Args:
            name: the peer that owns the memory; empty: this process.
        """
        try:
            descs = self._agent.get_xfer_descs(descriptors, self._memory_kind)
            return self._agent.prep_xfer_dlist(name, descs)
        except self._errors as error:
            raise TransferError(f"NIXL cannot prepare a table: {_error_text(error)}") from error

    def release(self, table: Any) -> None:
        """Release a table of memory ranges; writes posted from it may still arrive."""
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
        """Post a one-sided write of the ranges ``local[i]`` to ``remote[i]``; return a handle.

        Args:
            name: the peer whose memory the remote table covers.

        Raises:
            TransferError: NIXL refuses the write.

        NIXL merges consecutive ranges that are adjacent in both memories. If the peer is on the
        same host, this call itself copies the bytes (without the GIL).
        """
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", local_table, local, remote_table, remote
            )
            self._agent.transfer(handle)
        except self._errors as error:
            self._failed.add(name)
            raise TransferError(f"NIXL write failed: {_error_text(error)}") from error
        return handle

    def is_done(self, name: str, handle: Any) -> bool:
        """Return whether a write to a peer is complete; if it is, release the handle."""
        try:
            if self._agent.check_xfer_state(handle) != "DONE":
                return False
        except self._errors as error:
            self._failed.add(name)
            with contextlib.suppress(*self._errors):
                handle.release()
            raise TransferError(f"NIXL write failed: {_error_text(error)}") from error
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
            raise TransferError(f"NIXL message failed: {_error_text(error)}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return arrived messages with their agents' names. Also lets NIXL make progress.

        The names are not proved: any process that reaches this agent's port can use any name.
        """
        try:
            by_name: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransferError(f"NIXL cannot read messages: {_error_text(error)}") from error
        self._fences.note_read(by_name, self._peers)
        if by_name and self._resumed:
            for name in self._resumed.keys() & by_name.keys():
                self._note_first_message(name)
        return [(name, payload) for name, payloads in by_name.items() for payload in payloads]

    def is_cut_off(self, name: str, metadata: bytes) -> bool:
        """Return whether no write of a peer on another machine can arrive any more (`fences.py`).

        Args:
            metadata: the peer's metadata. The peer must write to no other agent of this node.

        Returns False if the peer's writes may arrive by other ways than TCP.
        """
        if self.descriptor is None or self._memory_kind != "DRAM":
            return False
        others = [known for other, known in self._peers.items() if other != name]
        try:
            return self._fences.is_closed(name, metadata, others)
        except (OSError, ValueError):  # /proc is hidden
            return False

    def round_trip_s(self, metadata: bytes) -> float:
        """Return the shortest recent round trip to a peer over TCP; 0.0: unknown.

        Args:
            metadata: the peer's metadata.
        """
        try:
            return self._round_trips.find(metadata)
        except (OSError, ValueError):  # /proc is hidden
            return 0.0

    def _sockets(self) -> dict[int, int]:
        return {} if self.descriptor is None else watched_sockets(self.descriptor)

    def _note_first_message(self, name: str) -> None:
        """Keep a reused connection if its peer sends a message soon; otherwise, replace it.

        A peer whose first message comes late got no answer over the old connection, and has already
        replaced the connection on its side.
        """
        if time.monotonic() - self._resumed[name] < ANSWER_TIMEOUT_S / 2:
            del self._resumed[name]
        else:
            self._resumed[name] = -math.inf

    def close(self, tables: Iterable[Any]) -> None:
        """Destroy the agent and the tables of its own memory; posted writes stop."""
        for table in tables:
            table.release()
        del self._agent
