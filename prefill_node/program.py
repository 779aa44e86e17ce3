"""Assembles a prefill node: the prefill loop over an engine and a KV sender."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.link.words import NodeEvent, NodeRole, PrefillCommand
from baton.text.grammar_trials import EarlyGrammars
from kvconnector.ends import Sender
from node_runtime.inbox import Inbox
from node_runtime.make_threads import NodeParts, make_threads
from node_runtime.node_program import NodeProgram
from prefill_node.node import PrefillNode
from prefill_node.options import PrefillOptions
from prefill_node.spans import PrefillTraces


def make_program(
    options: PrefillOptions,
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeProgram:
    """Load a prefill node and start its threads; see `make_threads`."""

    def make_node(parts: NodeParts) -> tuple[PrefillNode, Sender]:
        sender = Sender(
            parts.transport, on_event=parts.wake, on_death=parts.on_death, digests=parts.digests
        )
        sender.loop.start()
        node = PrefillNode(
            parts.engine,
            sender,
            parts.emit,
            options.push,
            traces=PrefillTraces(parts.spans, time.monotonic),
            inbox=Inbox(PrefillCommand, parts.engine, adapters=parts.adapters),
        )
        return node, sender

    return make_threads(NodeRole.PREFILL, options, make_node, emit, on_death, grammars)
