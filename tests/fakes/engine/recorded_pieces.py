"""What stands in for CUDA graphs by pieces on a CPU: operators and kernels, recorded and run again.

Like a graph, a piece knows addresses and nothing else: what it computes again goes to the same
memory, and whatever Python decided while it was recorded stays decided.
Refuses to know: models, steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from baton_kernels.triton.launch import Launcher

Piece = list[Callable[[], object]]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that adds every operator to the newest piece."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        found = call()
        if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            self._pieces[-1].append(functools.partial(_compute_into, call, results))
        return found


def _compute_into(call: Callable[[], Any], results: Sequence[Tensor]) -> None:
    again = [leaf for leaf in tree_leaves(call()) if isinstance(leaf, Tensor)]
    for result, new in zip(results, again, strict=True):
        if result.data_ptr() != new.data_ptr():
            result.copy_(new)


class RecordedPieces:
    """`chunk_graphs.CapturePieces` over Triton's interpreter.

    Attributes:
        num_pieces: number of recorded pieces.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_pieces = 0
        self._recording: list[Piece] | None = None
        launch = Launcher.through_triton

        def record(launcher: Launcher, *arguments: Any) -> Any:
            call = functools.partial(launch, launcher, *arguments)
            if self._recording is not None:
                self._recording[-1].append(call)
            with _disable_current_modes():  # what the interpreter does with torch is no operator
                return call()

        monkeypatch.setattr(Launcher, "through_triton", record)

    def __call__(self, body: Callable[[Callable[[], None]], None]) -> Sequence[Callable[[], None]]:
        """Record a body; compute it once before, as on a GPU."""
        body(lambda: None)
        pieces: list[Piece] = [[]]
        self._recording = pieces
        try:
            with _Operators(pieces):
                body(lambda: pieces.append([]))
        finally:
            self._recording = None
        self.num_pieces += len(pieces)
        return [functools.partial(_run, piece) for piece in pieces]


@torch.inference_mode()
def _run(piece: Piece) -> None:
    for call in piece:
        call()
