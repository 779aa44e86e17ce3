"""Opens the ends of the KV connector at which a node receives and sends cached prefixes."""

from __future__ import annotations

from baton.kv.prefixes import fetch_end, share_end
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.fault_file import faults_of
from node_runtime.make_threads import NodeParts
from node_runtime.node_transport import open_prefixes_transport
from node_runtime.options import NodeOptions
from node_runtime.prefixes.fetches import Fetches
from node_runtime.prefixes.prefixes import Prefixes
from node_runtime.prefixes.shares import Shares


def make_prefixes(
    options: NodeOptions, parts: NodeParts
) -> tuple[Prefixes, Receiver | None, Sender | None]:
    """Open the node's ends that send and receive prefixes, if the options ask for them."""
    if not options.fetch_prefixes:
        return Prefixes(), None, None
    fetches, receiver = _make_fetches(options, parts)
    shares, sender = _make_shares(options, parts)
    return Prefixes(fetches, shares), receiver, sender


def _make_fetches(options: NodeOptions, parts: NodeParts) -> tuple[Fetches, Receiver]:
    faults = faults_of(options.inject_faults, options.name)
    end_id = fetch_end(parts.engine_id)
    transport, digests = open_prefixes_transport(options, parts.loaded, end_id, faults)
    receiver = Receiver(transport, on_event=parts.wake, on_death=parts.on_death, digests=digests)
    receiver.loop.start()
    return Fetches(parts.engine, receiver, options.fetch_timeout_s), receiver


def _make_shares(options: NodeOptions, parts: NodeParts) -> tuple[Shares, Sender]:
    faults = faults_of(options.inject_faults, options.name)
    end_id = share_end(parts.engine_id)
    transport, digests = open_prefixes_transport(options, parts.loaded, end_id, faults)
    sender = Sender(transport, on_event=parts.wake, on_death=parts.on_death, digests=digests)
    sender.loop.start()
    return Shares(parts.engine, sender), sender
