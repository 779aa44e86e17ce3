"""Assembles an encode node from the encode loop, a vision encoder and a sender of encodings."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from baton.api.errors import ConfigError
from baton.checkpoint.model_folder import find_model_folder, weights_digest
from baton.checkpoint.model_identity import folder_identity
from baton.kv.encodings import num_units
from baton.link.words import REVISION, NodeEvent
from baton.media.layouts import layout_of
from baton.text.grammar_trials import EarlyGrammars
from baton.version import __version__
from encode_node.encoder import Encoder
from encode_node.node import EncodeNode
from encode_node.options import EncodeOptions
from encode_node.store import EncodingStore
from encode_node.threads import EncodeThreads, LoadedEncoder
from engine.images.pixel_maker import PixelMaker
from engine.worker.kv_cache import dtype_name
from kvconnector.block_digests import digests_are_wanted
from kvconnector.ends import Sender
from kvconnector.transports.fault_file import faults_of
from node_runtime.encodings.memory import EncodingMemory
from node_runtime.encodings.units import Units
from node_runtime.node_program import NodeProgram
from node_runtime.node_transport import open_encodings_transport


def make_program(
    options: EncodeOptions,
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeProgram:
    """Load an encode node and start its threads.

    Args:
        emit: takes events for the router; safe to call from any thread.
        on_death: called when the encoder or the connector cannot continue.
        grammars: not used, because an encode node compiles no grammars.

    Raises:
        ModelLoadError: the model's folder is missing or broken, or the model takes no images.
        ConfigError: an option does not fit the model or the machine.
    """
    folder = find_model_folder(options.model)
    missing = [name for name in ("transformers", "PIL") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"images: pip install 'baton-serve[images]' for {missing[0]}")
    layout = layout_of(folder)
    if layout is None:
        raise ConfigError(f"model: {options.model} reads text only, so there is nothing to encode")
    encoder = Encoder(folder, options.engine)
    pixels = PixelMaker(folder)
    pixels.start()
    units = Units(num_units(options.encoder_cache_tokens))
    loaded = LoadedEncoder(
        encoder=encoder,
        layout=layout,
        pixels=pixels,
        units=units,
        engine_id=f"{options.name}-{uuid.uuid4().hex[:8]}",
        compatibility=_compatibility(options, folder, encoder),
    )

    def join(wake: Callable[[], None]) -> tuple[EncodeNode, Sender]:
        memory = EncodingMemory(units.num_units, encoder.width, encoder.dtype)
        faults = faults_of(options.inject_faults, options.name)
        transport, digests = open_encodings_transport(
            options, loaded.engine_id, memory, faults, shares_host=False
        )
        sender = Sender(transport, on_event=wake, on_death=on_death, digests=digests)
        sender.loop.start()
        store = EncodingStore(units, memory)
        budget = options.max_num_encoder_input_tokens
        return EncodeNode(encoder.encode, store, pixels, sender, emit, budget), sender

    return EncodeThreads(options.name, loaded, join, on_death)


def _compatibility(options: EncodeOptions, folder: Path, encoder: Encoder) -> dict[str, str]:
    """Return the properties that must be equal on the prefill nodes that get encodings."""
    identity = folder_identity(folder)
    if "weights" not in identity:
        identity["weights"] = weights_digest(folder)
    has_digests = digests_are_wanted(options.kv_digests, options.kv_connector)
    entries = {
        **identity,
        "dtype": dtype_name(encoder.dtype),
        "images": "on",
        "kv_connector": options.kv_connector,
        "kv_digests": "on" if has_digests else "off",
        "version": __version__,
    }
    return {**entries, REVISION: options.revision} if options.revision else entries
