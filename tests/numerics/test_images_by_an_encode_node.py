"""Tests of prompts with an encode node: one process's tokens, also if the node stands still."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from baton.engine_config import EngineConfig
from baton.kv.encodings import RECEIVER_ENDING
from baton.link.words import EncodeCommand, NodeEvent, PeerUpdate
from decode_node.options import DecodeOptions
from encode_node.encoder import Encoder
from encode_node.node import EncodeNode
from encode_node.store import EncodingStore
from engine import LLM
from engine.core.images.image_plan import PixelArray
from engine.core.images.prompt_images import ImagePixels
from engine.worker.device_choice import choose_packer
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.in_memory import InMemoryTransport
from models import load_model
from models.vision.specs import encoding_width
from node_runtime.encodings.memory import EncodingMemory
from node_runtime.encodings.units import Units
from prefill_node.arrivals import Arrivals
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.fakes.images.inline_pixels import InlinePixels, decode_inline
from tests.numerics.test_images_in_a_split_system import (
    GREEDY,
    NUM_BLOCKS,
    Expanded,
    checkpoint,
    expected,
    kv_by,
    llm,
    preprocessor,
    prompts,
    tokens_of,
)
from tests.numerics.vision_checkpoints import VisionCheckpoint

__all__ = ["checkpoint", "llm", "prompts"]  # fixtures

E = "e-of-the-split-system"


class WithEncodeNode(Cluster):
    """A prefill and a decode node, and an encode node with the checkpoint's encoder."""

    def __init__(self, model: VisionCheckpoint, *arguments: Any, **options: Any) -> None:
        super().__init__(model.folder, *arguments, **options)
        config = EngineConfig(dtype="float32", device="cpu", num_threads=1)
        encoder = Encoder(model.folder, config)
        of_engine = self.p.engine.model_config
        assert of_engine.vision is not None
        assert encoder.width == encoding_width(of_engine.vision, of_engine.hidden_size)
        source, target = (EncodingMemory(128, encoder.width, encoder.dtype) for _ in range(2))
        self.encodings = Receiver(
            InMemoryTransport(f"p-of-{E}{RECEIVER_ENDING}", target), _ignore, _die, self.clock
        )
        self.units = Units(128)
        self.p.side_work.arrivals = Arrivals(
            self.p.engine.features, target, self.units, self.encodings, 5.0, self.clock
        )
        self.e_sender = Sender(InMemoryTransport(E, source), _ignore, _die, self.clock)
        self.events = list[NodeEvent]()
        self.e = EncodeNode(
            encoder.encode,
            EncodingStore(Units(128), source),
            InlinePixels(preprocessor(model.folder).pixels),
            self.e_sender,
            self.events.append,
            budget_tokens=64,
            clock=self.clock,
        )
        self.e_stands_still = False
        self.e.submit(PeerUpdate(f"p-of-{E}", self.encodings.describe()))
        self.p.side_work.arrivals.incoming.add_peer(self.e_sender.peer_info)

    def step(self, engine_id: str) -> None:
        super().step(engine_id)
        if engine_id == "p" and self.p.side_work.arrivals is not None:  # the encode node is made
            self.encodings.loop.round()
            if not self.e_stands_still:
                self.e.step()
                self.e_sender.loop.round()

    def place_with_encodings(self, name: str, prompt: Expanded) -> None:
        token_ids, images = prompt
        self.place(name, 1, token_ids, GREEDY, images=images, encode_engine_id=E)
        self.e.submit(
            EncodeCommand(
                request_id=name,
                epoch=1,
                prefill_engine_id=f"p-of-{E}",
                timeout_s=100.0,
                images=images,
            )
        )


def _ignore() -> None: ...


def _die(error: Exception) -> None:
    raise error


def test_encodings_of_another_node_give_the_same_tokens(
    checkpoint: VisionCheckpoint, llm: LLM, prompts: list[Expanded]
) -> None:
    cluster = WithEncodeNode(
        checkpoint,
        kv_by(llm, prompts),
        NUM_BLOCKS,
        options=DecodeOptions(local_prefill_threshold=8),
        preemption="hand-back",
        engine_options={"dtype": "float32", "num_threads": 1},
    )
    for engine in (cluster.p.engine, cluster.d.engine):
        decode_inline(engine, preprocessor(checkpoint.folder))
    cluster.settle()
    for index, prompt in enumerate(prompts):
        cluster.place_with_encodings(f"r{index}", prompt)
    cluster.settle()
    wanted = [expected(llm, prompt) for prompt in prompts]
    assert [tokens_of(cluster, f"r{index}") for index in range(5)] == wanted
    metrics = cluster.p.engine.metrics()
    assert (metrics.images_encoded_total, metrics.encodings_received_total) == (0, 10)
    assert cluster.e.counts.images_encoded == 10
    # The encode node stands still: the prefill node encodes.
    cluster.p.engine.block_pool.reset_prefix_cache()
    cluster.p.engine.features.forget_cached()
    cluster.d.engine.block_pool.reset_prefix_cache()
    cluster.e_stands_still = True
    cluster.place_with_encodings("again", prompts[3])
    cluster.step("p")
    beat = cluster.p.beat()
    assert (beat.num_waiting, beat.num_waiting_for_encodings) == (1, 1)
    assert beat.num_decoding_images == 0
    encodings = cluster.p.ledger().encodings
    assert encodings is not None
    assert encodings.num_blocks == 128
    cluster.settle()
    assert cluster.p.beat().num_waiting_for_encodings == 0
    assert tokens_of(cluster, "again") == wanted[3]
    assert cluster.p.engine.metrics().images_encoded_total == 3
    assert cluster.p.side_work.arrivals is not None
    cluster.e_stands_still = False
    cluster.settle()
    assert cluster.p.side_work.arrivals.incoming.num_transfers == 0
    assert cluster.units.num_free == cluster.units.num_units
    assert cluster.p.engine.block_pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_an_encode_node_encodes_as_a_prefill_node_with_any_weights(
    checkpoint: VisionCheckpoint, prompts: list[Expanded], weights: str
) -> None:
    cpu, images = torch.device("cpu"), prompts[1][1]
    config = EngineConfig(dtype="float32", device="cpu", num_threads=1)
    encoder = Encoder(checkpoint.folder, config)
    config = dataclasses.replace(config, weights=weights)
    whole = load_model(
        checkpoint.folder,
        dtype=torch.float32,
        device=cpu,
        max_model_len=100,
        packer=choose_packer(config, cpu, torch.float32),
        images=True,
    )
    arrays = preprocessor(checkpoint.folder).pixels(images[0].data)
    pixels = ImagePixels(
        tuple(PixelArray(name, a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items())
    )
    assert whole.vision is not None
    with torch.inference_mode():
        wanted = whole.vision.encode({name: torch.from_numpy(a) for name, a in arrays.items()})
    assert torch.equal(encoder.encode(pixels), wanted)
