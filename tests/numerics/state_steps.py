"""Steps of requests with states: texts cut into chunks and segments, slots, and ops to compute.

Refuses to know: which ops are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from baton_kernels import StateMetadata

# A module of ops, arguments that have a row for each token, states -> results.
Run = Callable[[Any, Sequence[Tensor], Tensor, StateMetadata], Tensor]
NAN = float("nan")
# Of one text: the borders of its segments by step, [[0, 3, 4], [4, 9]] being two steps.
Cuts = list[list[int]]


def make_state_metadata(
    segments: Sequence[Sequence[tuple[int, int, int]]], padding: int = 0
) -> StateMetadata:
    """Describe a step.

    Args:
        segments: ``(tokens, read slot, write slot)`` by request and segment.
        padding: tokens behind the last segment.
    """
    flat = [segment for request in segments for segment in request]
    lens = tuple(length for length, _, _ in flat)
    return StateMetadata(
        num_segments=len(flat),
        num_tokens=sum(lens) + padding,
        segment_start_loc=_int32([0, *accumulate(lens)]),
        read_slots=_int32([slot for _, slot, _ in flat]),
        write_slots=_int32([slot for _, _, slot in flat]),
        request_start_loc=_int32([0, *accumulate(map(len, segments))]),
        segment_lens=lens,
    )


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def on_device(metadata: StateMetadata, device: torch.device | str) -> StateMetadata:
    """Move a step's tensors to where its states are."""
    return replace(
        metadata,
        segment_start_loc=metadata.segment_start_loc.to(device),
        read_slots=metadata.read_slots.to(device),
        write_slots=metadata.write_slots.to(device),
        request_start_loc=metadata.request_start_loc.to(device),
    )


def random_cuts(length: int, seed: int) -> Cuts:
    """Cut a text into steps of segments, anywhere."""
    draw = random.Random(seed)
    inner = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(1, 8))))
    borders = [0, *inner, length]
    steps: Cuts = [[0]]
    for border in borders[1:]:
        steps[-1].append(border)
        if draw.random() < 0.5 and border != length:
            steps.append([border])
    return steps


def steps_of(
    cuts: Sequence[Cuts], padding: int = 0
) -> tuple[list[tuple[StateMetadata, list[tuple[int, int, int]]]], int]:
    """Lay out the steps in which texts are computed together, each segment with a slot of its own.

    A text that has no more steps than others is no longer there in the last ones.

    Returns:
        For each step its metadata and, of each request in it, ``(text, begin, end)``; and the
        number of slots. Slot 0 is nobody's.
    """
    next_slot, last = 1, [-1] * len(cuts)
    steps = []
    for number in range(max(map(len, cuts))):
        requests, chunks = [], []
        for text, of_text in enumerate(cuts):
            if number >= len(of_text):
                continue
            borders, segments = of_text[number], []
            for begin, end in pairwise(borders):
                segments.append((end - begin, last[text], next_slot))
                last[text] = next_slot
                next_slot += 1
            requests.append(segments)
            chunks.append((text, borders[0], borders[-1]))
        steps.append((make_state_metadata(requests, padding), chunks))
    return steps, next_slot


class Case:
    """An op of some module of ops, its inputs by token, and the shape of a state."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        large: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype, self._device = dtype, device
        makers = {
            "conv": self._conv,
            "gated conv": self._gated_conv,
            "scan": self._scan,
            "delta": self._delta,
        }
        self.state_dtype = torch.float32
        self.run: Run
        makers[name](*((70, 3) if large else (5, 2)))

    def rows(self, num_tokens: int) -> list[Tensor]:
        """Draw the inputs of tokens, in rows that are farther apart than they are long."""
        return [self._draw(num_tokens, *shape) for shape in self.shapes]

    def _draw(self, num_tokens: int, *shape: int) -> Tensor:
        size = int(torch.Size(shape).numel())
        wide = torch.randn(num_tokens, size + 3).to(self._device, self.dtype)
        return wide[:, :size].view(num_tokens, *shape)

    def _weights(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self._device, self.dtype)

    def _conv(self, size: int, groups: int) -> None:
        self.shapes: list[tuple[int, ...]] = [(size,)]
        self.state_shape: tuple[int, ...] = (size, groups)
        self.state_dtype = self.dtype
        weight, bias = self._weights(size, groups + 1), self._weights(size)
        self.run = lambda ops, rows, states, metadata: ops.causal_conv(
            rows[0], weight, bias, states, metadata, has_silu=True
        )

    def _gated_conv(self, size: int, groups: int) -> None:
        self.shapes, self.state_shape = [(size,)] * 3, (size, groups)
        self.state_dtype = self.dtype
        weight = self._weights(size, groups + 1)
        self.run = lambda ops, rows, states, metadata: ops.causal_conv(
            *(rows[0], weight, None, states, metadata),
            has_silu=False,
            in_gate=rows[1],
            out_gate=rows[2],
        )

    def _scan(self, size: int, groups: int) -> None:
        heads, state_dim = 2 * groups, size + 9
        self.shapes = [(heads, size), (heads,), (groups, state_dim), (groups, state_dim)]
        self.state_shape = (heads, state_dim, size)
        constants = (self._weights(heads), self._weights(heads), self._weights(heads))
        self.run = lambda ops, rows, states, metadata: ops.selective_scan(
            *rows, *constants, states, metadata
        )

    def _delta(self, size: int, groups: int) -> None:
        heads, key_dim = 2 * groups, size - 3
        self.shapes = [(groups, key_dim), (groups, key_dim), (heads, size), (heads,), (heads,)]
        self.state_shape = (heads, key_dim, size)
        constants = (self._weights(heads), self._weights(heads))
        self.run = lambda ops, rows, states, metadata: ops.gated_delta_rule(
            *rows, *constants, states, metadata
        )

    def compute(
        self, ops: Any, texts: Sequence[Sequence[Tensor]], cuts: Sequence[Cuts], padding: int = 0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute texts cut so; return each one's results and the state behind it.

        Slots are a part of a larger cache, as in the pool, and hold what is no number before.
        """
        steps, num_slots = steps_of(cuts, padding)
        shape = (num_slots, 2, *self.state_shape)
        pool = torch.full(shape, NAN, dtype=self.state_dtype, device=self._device)
        states, last = pool[:, 1], dict[int, Tensor]()
        found: list[list[Tensor]] = [[] for _ in texts]
        for metadata, chunks in steps:
            inputs = []
            for place, shape in enumerate(self.shapes):
                parts = [texts[text][place][begin:end] for text, begin, end in chunks]
                behind = torch.full((padding, *shape), NAN, dtype=self.dtype, device=self._device)
                inputs.append(torch.cat([*parts, behind]))
            out = self.run(ops, inputs, states, on_device(metadata, self._device))
            assert not out[len(out) - padding :].any()
            rows = torch.split(out[: len(out) - padding], [end - begin for _, begin, end in chunks])
            for (text, _, _), of_text in zip(chunks, rows, strict=True):
                found[text].append(of_text)
            for request, (text, _, _) in enumerate(chunks):
                segment = int(metadata.request_start_loc[request + 1]) - 1
                last[text] = states[int(metadata.write_slots[segment])].clone()
        assert pool[:, 0].isnan().all()
        assert states[0].isnan().all()
        return [torch.cat(parts) for parts in found], [last[text] for text in range(len(texts))]
