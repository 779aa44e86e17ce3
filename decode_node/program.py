"""Assembles a decode node from the decode loop, an engine and a KV receiver."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.link.words import DecodeCommand, NodeEvent, NodeRole
from baton.text.grammar_trials import EarlyGrammars
from decode_node.jobs import DecodeTraces
from decode_node.node import DecodeNode
from decode_node.options import DecodeNodeOptions
from kvconnector.ends import Receiver
from node_runtime.inbox import Inbox
from node_runtime.make_threads import NodeParts, make_threads
from node_runtime.node_program import NodeProgram
from node_runtime.prefixes.make_ends import make_prefixes
from node_runtime.threads import ConnectorEnds


def make_program(
    options: DecodeNodeOptions,
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeProgram:
    """Load a decode node and start its threads; see `make_threads` for arguments and errors."""

    def make_node(parts: NodeParts) -> tuple[DecodeNode, ConnectorEnds]:
        receiver = Receiver(
            parts.transport, on_event=parts.wake, on_death=parts.on_death, digests=parts.digests
        )
        receiver.loop.start()
        prefixes, fetcher, sharer = make_prefixes(options, parts)
        node = DecodeNode(
            parts.engine,
            receiver,
            parts.emit,
            options.decode,
            traces=DecodeTraces(parts.spans, time.monotonic),
            inbox=Inbox(DecodeCommand, parts.engine, adapters=parts.adapters),
            side_work=prefixes,
        )
        return node, ConnectorEnds(receiver, fetches=fetcher, shares=sharer)

    return make_threads(NodeRole.DECODE, options, make_node, emit, on_death, grammars)
