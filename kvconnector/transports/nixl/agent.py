"""NixlAgent: the only importer of nixl. Typed, and every failure a TransferError.

What NIXL does and does not promise shapes this file: there is no cancel, its progress thread
burns a core, thread safety is off by default, errors are exceptions, and a bad address kills the
receiver. So one thread calls all of this, and addresses come from tables made here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.api.errors import ConfigError, TransferError
from kvconnector.layout import KVLayout


def _import_nixl() -> Any:
    # Read once, when UCX starts; what the operator has set stays.
    # UCX listens without authentication on every device it may use: loopback unless told otherwise.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        import nixl
        import nixl._api
    except ImportError as error:
        raise ConfigError(f"kv_connector: nixl cannot be imported here: {error}") from error
    return nixl


class NixlAgent:
    """One agent with its registered memory.

    Args:
        name: unique to this process start; a name that was ever used damages its peers' tables.
        layouts: of the ranges of memory that it registers.
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
            # The blocks of each are one contiguous range: one region, however many blocks.
            regions = np.array(
                [[at.base_address, at.num_blocks * at.block_bytes, at.device_id] for at in layouts],
                dtype=np.uint64,
            )
            self._agent.register_memory(self._agent.get_reg_descs(regions, memory_kind))
            self._memory_kind = memory_kind
        except self._errors as error:
            raise ConfigError(f"kv_connector: NIXL cannot start: {error}") from error

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Learn a peer.

        Args:
            name: that its metadata must be of; another peer's would replace that peer's, so what
                says that it is of somebody else does not reach NIXL at all.
        """
        own = name.encode()
        head = b"nixlSerDes|Agent" + len(own).to_bytes(8, "little") + own + b"|"
        if not metadata.startswith(head):
            raise TransferError(f"the metadata of {name} is of somebody else, or damaged")
        try:
            claimed: str = self._agent.add_remote_agent(metadata).decode(errors="replace")
            if claimed != name:
                raise TransferError(f"the metadata of {name} is of {claimed}")
        except self._errors as error:
            raise TransferError(f"NIXL cannot add the peer: {error}") from error

    def prepare(self, name: str, descriptors: npt.NDArray[np.uint64]) -> Any:
        """A table of ranges that writes are posted from or to, by index.

        Args:
            name: of the peer whose memory it is; empty for our own.
        """
        try:
            descs = self._agent.get_xfer_descs(descriptors, self._memory_kind)
            return self._agent.prep_xfer_dlist(name, descs)
        except self._errors as error:
            raise TransferError(f"NIXL cannot prepare a table: {error}") from error

    def release(self, table: Any) -> None:
        """Let go of a table; what was posted from it may still land."""
        with contextlib.suppress(*self._errors):
            table.release()

    def remove_peer(self, name: str, tables: Iterable[Any]) -> None:
        """Forget a peer and its tables; what was posted to it may still land."""
        try:
            for table in tables:
                table.release()
            self._agent.remove_remote_agent(name)
        except self._errors:  # a dead peer may refuse to be removed cleanly; it is gone anyway
            return

    def post_write(
        self,
        local_table: Any,
        local: npt.NDArray[np.int32],
        remote_table: Any,
        remote: npt.NDArray[np.int32],
    ) -> Any:
        """Post a one-sided write of ranges ``local[i]`` to ``remote[i]``; returns a handle.

        Neighbours in the order given that adjoin on both sides become one range. On one host this
        copies the bytes in the call (without the GIL).
        """
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", local_table, local, remote_table, remote
            )
            self._agent.transfer(handle)
        except self._errors as error:
            raise TransferError(f"NIXL write failed: {error}") from error
        return handle

    def is_done(self, handle: Any) -> bool:
        """Whether a posted write is complete at the peer; releases the handle when it is."""
        try:
            if self._agent.check_xfer_state(handle) != "DONE":
                return False
        except self._errors as error:
            with contextlib.suppress(*self._errors):
                handle.release()
            raise TransferError(f"NIXL write failed: {error}") from error
        handle.release()
        return True

    def notify(self, name: str, payload: bytes) -> None:
        """Send a short message to a peer."""
        try:
            self._agent.send_notif(name, payload)
        except self._errors as error:
            raise TransferError(f"NIXL message failed: {error}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that came in, each with its agent's name; drives NIXL's progress.

        Any process that reaches our port may connect, and under any name.
        """
        try:
            by_name: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransferError(f"NIXL cannot read messages: {error}") from error
        return [(name, payload) for name, payloads in by_name.items() for payload in payloads]

    def close(self, tables: Iterable[Any]) -> None:
        """Destroy the agent and our own tables; what it had posted stops."""
        for table in tables:
            table.release()
        del self._agent
