"""A client's channel to a router: reopened when certificates change, with TLS errors explained."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from baton.access.tls import TlsFiles, TlsMaterial, TlsOptions
from baton.access.tls_refusal import why_refused
from baton.api.errors import BatonError
from baton.client.messages import error_of, is_unreachable
from baton.serving import rpc
from baton.v1 import inference_pb2_grpc


class _Certificates:
    """The TLS files of a client, and their contents that the client's channel uses.

    Args:
        tls: TLS options; None: read from the environment.

    Raises:
        ConfigError: a TLS file cannot be used.
    """

    def __init__(self, tls: TlsOptions | None) -> None:
        self.options = TlsOptions.from_environment() if tls is None else tls
        self._files = TlsFiles(self.options) if self.options else None
        self.used = self._now()

    def _now(self) -> TlsMaterial | None:
        return self._files.current() if self._files else None

    def have_changed(self) -> bool:
        """Return whether the files changed since the last call; if so, use the new contents."""
        before, self.used = self.used, self._now()
        return self.used is not before


class SyncChannel:
    """A blocking channel, replaced by a new one when certificates change.

    gRPC cannot change the certificates of an open channel. The channel before the last change of
    certificates stays open for its running streams.

    Args:
        address: ``host:port`` of the router.
        tls: TLS options; None: read from the environment.

    Raises:
        ConfigError: a TLS file cannot be used.
    """

    def __init__(self, address: str, tls: TlsOptions | None) -> None:
        self._address = address
        self._certificates = _Certificates(tls)
        self._before: grpc.Channel | None = None
        self._open()

    def stub(self) -> Any:
        """Return the stub for the next call, on a new channel if certificates have changed."""
        if self._certificates.have_changed():
            if self._before is not None:
                self._before.close()
            self._before = self._channel
            self._open()
        return self._stub

    def error_of(self, error: grpc.RpcError) -> BatonError:
        """Return the exception for a failed call, with the reason if TLS failed."""
        why = ""
        if is_unreachable(error):
            why = why_refused(self._address, self._certificates.options)
        return error_of(error, self._address, why)

    def close(self) -> None:
        if self._before is not None:
            self._before.close()
        self._channel.close()

    def _open(self) -> None:
        self._channel = rpc.open_sync_channel(self._address, self._certificates.used)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated


class AsyncChannel:
    """A channel for asyncio; otherwise like `SyncChannel`."""

    def __init__(self, address: str, tls: TlsOptions | None) -> None:
        self._address = address
        self._certificates = _Certificates(tls)
        self._before: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def stub(self) -> Any:
        """Return the stub for the next call; must run on the loop's thread."""
        if self._certificates.have_changed():
            if self._before is not None:
                task = asyncio.ensure_future(self._before.close(None))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            self._before = self._channel
            self._open()
        return self._stub

    async def error_of(self, error: grpc.RpcError) -> BatonError:
        """Return the exception for a failed call, with the reason if TLS failed."""
        why = ""
        if is_unreachable(error):
            options = self._certificates.options
            why = await asyncio.to_thread(why_refused, self._address, options)
        return error_of(error, self._address, why)

    async def close(self) -> None:
        if self._before is not None:
            await self._before.close(None)
        await self._channel.close(None)

    def _open(self) -> None:
        self._channel = rpc.open_channel(self._address, self._certificates.used)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
