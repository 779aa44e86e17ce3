"""Opens a node's ends of the KV connector: the transports of all its ranks, and the digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType

import msgspec

from baton.access.tls import TlsFiles
from baton.api.errors import ConfigError
from kvconnector import KV_CONNECTORS
from kvconnector.block_digests import BlockDigests, digests_are_wanted
from kvconnector.layout import KVMemory
from kvconnector.ranks.messages import Open
from kvconnector.ranks.more_links import link_ranks
from kvconnector.ranks.transport import RanksTransport
from kvconnector.transports.base import NO_OPTIONS, KVTransport, TransportOptions
from kvconnector.transports.faults import FaultSpec, FaultyTransport
from node_runtime.node_engine import LoadedEngine
from node_runtime.options import NodeOptions, ProgramOptions

_Faults = FaultSpec | Callable[[], FaultSpec] | None
_RANK_SERVICE = "kvconnector.ranks.service:serve"


def open_transport(
    options: NodeOptions,
    loaded: LoadedEngine,
    faults: _Faults,
    *,
    kv_digests: bool,
) -> tuple[KVTransport, BlockDigests | None]:
    """Open the transport of each rank; raises ConfigError if the options do not allow it.

    Args:
        options: options of the node.
        loaded: the engine whose KV memory peers read or write.
        faults: transfer faults to inject; None: no faults.
        kv_digests: whether the receiver checks blocks by digests.
    """
    memory, engine_id = loaded.engine.kv_memory, loaded.engine_id
    start = Open(options.kv_connector, engine_id)
    # The other ranks open their transports at the same time.
    links = loaded.engine.executor.attach(_RANK_SERVICE, msgspec.msgpack.encode(start))
    end = _End(options, engine_id, memory, faults, options.kv_listen)
    return _open_end(end, links, has_digests=kv_digests)


def open_prefixes_transport(
    options: NodeOptions, loaded: LoadedEngine, engine_id: str, faults: _Faults
) -> tuple[KVTransport, BlockDigests | None]:
    """Open a second transport of each rank's KV memory; it carries cached prefixes.

    Args:
        engine_id: name of this end, from `fetch_end` or `share_end`.

    Raises ConfigError if this node has no prefix cache.
    """
    memory, executor = loaded.engine.kv_memory, loaded.engine.executor
    if loaded.engine.kv_cache_manager.hasher is None:
        raise ConfigError("fetch_prefixes: needs the prefix cache, which is switched off")
    connector = options.kv_connector
    links = link_ranks(lambda start: executor.attach(_RANK_SERVICE, start), connector, engine_id)
    end = _End(options, engine_id, memory, faults, _other_port(options.kv_listen))
    return _open_end(end, links, has_digests=digests_are_wanted(options.kv_digests, connector))


def open_encodings_transport(
    options: ProgramOptions,
    engine_id: str,
    memory: KVMemory,
    faults: _Faults,
    *,
    shares_host: bool,
    listen: str = "",
) -> tuple[KVTransport, BlockDigests | None]:
    """Open the transport of a memory for encodings, which has one rank; raises ConfigError.

    Args:
        options: options of the node.
        engine_id: name of this end, which no other end of any connector has.
        memory: the memory that peers read or write.
        faults: transfer faults to inject; None: no faults.
        shares_host: whether another end of this node listens at ``options.kv_listen``, so that this
            end needs another port of the same host.
        listen: ``host:port`` of this end; empty: ``options.kv_listen``, or a free port of its host.
    """
    if not listen:
        listen = _other_port(options.kv_listen) if shares_host else options.kv_listen
    has_digests = digests_are_wanted(options.kv_digests, options.kv_connector)
    return _open_end(_End(options, engine_id, memory, faults, listen), has_digests=has_digests)


@dataclass(frozen=True, slots=True)
class _End:
    """An end of the connector; see `open_encodings_transport` for the fields."""

    options: ProgramOptions
    engine_id: str
    memory: KVMemory
    faults: _Faults
    listen: str


def _open_end(
    end: _End, links: Mapping[int, Connection] = MappingProxyType({}), *, has_digests: bool
) -> tuple[KVTransport, BlockDigests | None]:
    """Open the leading rank's transport, joined with the other ranks' transports.

    Args:
        links: connections to the services of the other ranks, by rank.
    """
    transport: KVTransport = KV_CONNECTORS.load(end.options.kv_connector)(
        end.engine_id, end.memory, _transport_options(end.options, end.listen)
    )
    ranks = RanksTransport(transport, links) if links else None
    transport = ranks or transport
    if end.faults is not None:
        transport = FaultyTransport(transport, end.memory, end.faults)
    return transport, BlockDigests(end.memory, ranks) if has_digests else None


def _other_port(listen: str) -> str:
    """Return a free port of the host at which the node's first transport listens."""
    return f"{listen.rpartition(':')[0]}:0" if listen else ""


def _transport_options(options: ProgramOptions, listen: str) -> TransportOptions:
    return TransportOptions(
        listen=listen or NO_OPTIONS.listen,
        tls=TlsFiles(options.tls) if options.tls.verifies_clients else None,
    )
