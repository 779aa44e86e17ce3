"""Assembles a prefill node from the prefill loop, an engine and a KV sender."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from baton.kv.encodings import RECEIVER_ENDING, num_units
from baton.link.words import NodeEvent, NodeRole, PrefillCommand
from baton.text.grammar_trials import EarlyGrammars
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.fault_file import faults_of
from models.vision.specs import encoding_width
from node_runtime.encodings.memory import EncodingMemory
from node_runtime.encodings.units import Units
from node_runtime.inbox import Inbox
from node_runtime.make_threads import NodeParts, make_threads
from node_runtime.node_program import NodeProgram
from node_runtime.node_transport import open_encodings_transport
from node_runtime.prefixes.make_ends import make_prefixes
from node_runtime.threads import ConnectorEnds
from prefill_node.arrivals import Arrivals
from prefill_node.jobs import Jobs
from prefill_node.node import PrefillNode
from prefill_node.options import PrefillOptions
from prefill_node.spans import PrefillTraces
from prefill_node.supplies import Supplies


def make_program(
    options: PrefillOptions,
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeProgram:
    """Load a prefill node and start its threads; see `make_threads` for arguments and errors."""

    def make_node(parts: NodeParts) -> tuple[PrefillNode, ConnectorEnds]:
        sender = Sender(
            parts.transport, on_event=parts.wake, on_death=parts.on_death, digests=parts.digests
        )
        sender.loop.start()
        arrivals, receiver = None, None
        if options.encode_nodes and parts.engine.features.images.are_taken:
            arrivals, receiver = _make_arrivals(options, parts)
        prefixes, fetcher, sharer = make_prefixes(options, parts)
        traces = PrefillTraces(parts.spans, time.monotonic)
        node = PrefillNode(
            parts.engine,
            sender,
            parts.emit,
            options.push,
            inbox=Inbox(PrefillCommand, parts.engine, adapters=parts.adapters),
            jobs=Jobs(time.monotonic, traces, Supplies(arrivals, prefixes)),
        )
        return node, ConnectorEnds(sender, receiver, fetcher, sharer)

    return make_threads(NodeRole.PREFILL, options, make_node, emit, on_death, grammars)


def _make_arrivals(options: PrefillOptions, parts: NodeParts) -> tuple[Arrivals, Receiver]:
    """Open the memory into which encode nodes write, and the connector's receiving end."""
    model = parts.engine.model_config
    assert model.vision is not None, "the engine takes images"
    units = Units(num_units(options.engine.encoder_cache_tokens))
    width = encoding_width(model.vision, model.hidden_size)
    memory = EncodingMemory(units.num_units, width, getattr(torch, parts.engine.dtype))
    transport, digests = open_encodings_transport(
        options,
        parts.engine_id + RECEIVER_ENDING,
        memory,
        faults_of(options.inject_faults, options.name),
        shares_host=True,
        listen=options.encodings_listen,
    )
    receiver = Receiver(transport, on_event=parts.wake, on_death=parts.on_death, digests=digests)
    receiver.loop.start()
    return Arrivals(
        parts.engine.features, memory, units, receiver, options.encode_timeout_s
    ), receiver
