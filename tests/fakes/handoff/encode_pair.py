"""A real encode node and the real arrivals of a prefill node, over one process's memory.

Time moves by hand, and the KV I/O loops run on the caller's thread. Refuses to know: what is
asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.images import PromptImage
from baton.api.sampling_params import SamplingParams
from baton.kv.encodings import RECEIVER_ENDING
from baton.link.words import (
    CancelCommand,
    EncodeCommand,
    NodeEvent,
    PeerUpdate,
    PrefillCommand,
)
from encode_node.node import EncodeNode
from encode_node.store import EncodingStore
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.core.request import Request
from kvconnector.block_digests import BlockDigests
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.in_memory import InMemoryTransport
from node_runtime.encodings.memory import EncodingMemory
from node_runtime.encodings.units import Units
from prefill_node.arrivals import Arrivals, PromptWait
from tests.fakes.images.fake_images import PLACEHOLDER, images_of, pixels_of
from tests.fakes.time.virtual_clock import VirtualClock

WIDTH, TIMEOUT_S, ROUND_S = 4, 5.0, 0.05
_numbers = itertools.count()  # an engine id is never used twice


class MadePixels:
    """Decodes files at once; ``bad`` files have an error."""

    def __init__(self) -> None:
        self.done: list[tuple[PromptImages, BatonError | None]] = []

    def submit(self, images: PromptImages) -> None:
        (file,) = images.files.values()
        error = InvalidRequestError("image", "broken") if file == b"bad" else None
        if error is None:
            images.pixels = {images.spans[0].digest: pixels_of(file)}
        self.done.append((images, error))

    def take_ready(self) -> list[tuple[PromptImages, BatonError | None]]:
        done, self.done = self.done, []
        return done


class GoesOn:
    """Stands for the engine; notes the prompts that go on."""

    def __init__(self) -> None:
        self.prompts: list[PromptImages] = []

    def use_encodings(self, images: PromptImages) -> None:
        images.awaits_encodings = False
        self.prompts.append(images)


def encoding_of_file(pixels: ImagePixels) -> Tensor:
    """Return one row per token of a fake image; a negative token is NaN."""
    (array,) = pixels.arrays
    tokens = torch.frombuffer(bytearray(array.data), dtype=torch.int64).float()
    rows = tokens[:, None] + torch.arange(WIDTH) / 10
    return rows.masked_fill(tokens[:, None] < 0, torch.nan)


class EncodePair:
    """The two nodes, and what a test does with them."""

    def __init__(self, num_units: int = 4, *, digests: bool = True) -> None:
        number = next(_numbers)
        self.clock, self.engine, self.events = VirtualClock(), GoesOn(), list[NodeEvent]()
        self.e, self.p = f"e{number}", f"p{number}"
        source, target = (EncodingMemory(num_units, WIDTH, torch.float32) for _ in range(2))
        self.source, self.target = source, target
        self.sender = Sender(
            InMemoryTransport(self.e, source),
            on_event=lambda: None,
            on_death=_die,
            clock=self.clock,
            digests=BlockDigests(source) if digests else None,
        )
        self.receiver = Receiver(
            InMemoryTransport(self.p + RECEIVER_ENDING, target),
            on_event=lambda: None,
            on_death=_die,
            clock=self.clock,
            digests=BlockDigests(target) if digests else None,
        )
        self.pixels, self.num_encoded = MadePixels(), 0
        self.node = EncodeNode(
            self._encode,
            EncodingStore(Units(num_units), source),
            self.pixels,
            self.sender,
            self.events.append,
            budget_tokens=64,
            clock=self.clock,
        )
        self.units = Units(num_units)
        self.arrivals = Arrivals(
            self.engine, target, self.units, self.receiver, TIMEOUT_S, self.clock
        )
        self.stopped: set[str] = set()  # "e" or "p": a process that stands still

    def _encode(self, pixels: ImagePixels) -> Tensor:
        self.num_encoded += 1
        return encoding_of_file(pixels)

    def meet(self) -> None:
        """Introduce the nodes, and wait until they are connected."""
        self.node.submit(PeerUpdate(self.p, self.receiver.describe()))
        self.arrivals.incoming.add_peer(self.sender.peer_info)
        self.run()

    def run(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        for _ in range(round(seconds / ROUND_S)):
            self.clock.advance(ROUND_S)
            if "e" not in self.stopped:
                self.node.step()
                self.sender.loop.round()
            if "p" not in self.stopped:
                self.arrivals.step()
                self.receiver.loop.round()

    def expect(
        self,
        name: str,
        images: Sequence[PromptImage],
        token_ids: Sequence[int],
        epoch: int = 1,
        expected_s: float = 0.0,
    ) -> tuple[PromptImages, PromptWait | None]:
        """Let the prefill node expect all encodings of a prompt."""
        prompt = images_of(images, token_ids)
        request = Request.create(
            name,
            list(token_ids),
            SamplingParams(max_tokens=1),
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=1000,
            images=prompt,
        )
        command = PrefillCommand(
            request_id=name,
            epoch=epoch,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1),
            timeout_s=60.0,
            images=tuple(images),
            decode_engine_id="",
            encode_engine_ids=(self.e,) * len(images),
            encode_wait_s=expected_s,
        )
        return prompt, self.arrivals.expect(request, command, self.clock())

    def order(self, name: str, images: Sequence[PromptImage], epoch: int = 1) -> None:
        """Command the encode node to encode a prompt's images."""
        self.node.submit(
            EncodeCommand(
                request_id=name,
                epoch=epoch,
                prefill_engine_id=self.p,
                timeout_s=60.0,
                images=tuple(images),
            )
        )

    def cancel(self, name: str, epoch: int = 1) -> None:
        """Cancel a request on both nodes."""
        self.node.submit(CancelCommand(name, epoch))
        self.arrivals.cancel(name, epoch)

    def assert_at_rest(self) -> None:
        """Assert that no unit is held but for kept encodings, and that all have owners."""
        for ledger in (self.node.ledger(), self.arrivals.ledger()):
            assert not ledger.orphans
            assert not ledger.overdrawn
        assert self.units.num_free == self.units.num_units
        store = self.node.store
        assert store.units.num_free == store.units.num_units - len(store.kept_units())
        assert not self.node.requests()
        assert self.arrivals.incoming.num_transfers == 0


def rows_of(received: Mapping[bytes, ImagePixels], digest: bytes) -> list[list[float]]:
    """Return a received encoding's numbers."""
    (array,) = received[digest].arrays
    numbers = torch.frombuffer(bytearray(array.data), dtype=torch.float32)
    rows: list[list[float]] = numbers.reshape(array.shape).tolist()
    return rows


def _die(error: Exception) -> None:
    raise error


__all__ = ["PLACEHOLDER", "EncodePair", "encoding_of_file", "rows_of"]
