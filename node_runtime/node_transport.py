"""Opens a node's ends of the KV connector: the transports of all its ranks, and the digests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.access.tls import TlsFiles
from kvconnector import KV_CONNECTORS
from kvconnector.block_digests import BlockDigests, digests_are_wanted
from kvconnector.layout import KVMemory
from kvconnector.ranks.messages import Open
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
    transport: KVTransport = KV_CONNECTORS.load(options.kv_connector)(
        engine_id, memory, _transport_options(options, options.kv_listen)
    )
    ranks = RanksTransport(transport, links) if links else None
    transport = ranks or transport
    if faults is not None:
        transport = FaultyTransport(transport, memory, faults)
    return transport, BlockDigests(memory, ranks) if kv_digests else None


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
        listen = options.kv_listen
        if shares_host and listen:
            listen = f"{listen.rpartition(':')[0]}:0"
    transport: KVTransport = KV_CONNECTORS.load(options.kv_connector)(
        engine_id, memory, _transport_options(options, listen)
    )
    if faults is not None:
        transport = FaultyTransport(transport, memory, faults)
    are_wanted = digests_are_wanted(options.kv_digests, options.kv_connector)
    return transport, BlockDigests(memory) if are_wanted else None


def _transport_options(options: ProgramOptions, listen: str) -> TransportOptions:
    return TransportOptions(
        listen=listen or NO_OPTIONS.listen,
        tls=TlsFiles(options.tls) if options.tls.verifies_clients else None,
    )
