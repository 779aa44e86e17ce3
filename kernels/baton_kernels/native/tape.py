"""Tape: a sequence of native calls that is recorded once, and replayed by one call.

A small op takes less time than its call from Python. Like a CUDA graph, a tape holds addresses, and
replays work on the same memory: callers overwrite the inputs before each run. Refuses to know:
models, the meaning of calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton_kernels.native.library import TapeEntry

# The functions of torch that are allowed while a tape is recorded: none computes or copies.
_HARMLESS = {
    "aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided",
    "aten::new_empty_strided", "aten::view", "aten::_unsafe_view", "aten::slice", "aten::select",
    "aten::as_strided", "aten::alias", "aten::detach", "aten::unsqueeze", "aten::squeeze",
    "aten::permute", "aten::expand", "aten::transpose", "aten::t", "aten::_reshape_alias",
    "aten::split",
}  # fmt: skip


_RANK_IS_GONE = 2  # as GONE in ranks.c
_NO_ROW = 3  # as in linear.h
Result = TypeVar("Result")


class TapeError(Exception):
    """A tape cannot replay a function of torch; the message is the function's name."""


def check(code: int) -> None:
    """Raise the error that a native call's result stands for; 0 is success."""
    if code == _RANK_IS_GONE:
        raise ConnectionAbortedError("another rank is gone, or has said nothing for too long")
    if code == _NO_ROW:
        raise IndexError("a row that the weight does not have")
    if code:
        raise MemoryError("no memory for packed rows or tiles of attention")


class Tape:
    """The recorded native calls in order, and all memory that they read and write."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._calls: list[tuple[Any, ctypes.Structure]] = []
        self._kept: list[Tensor | ctypes.Array[Any]] = []
        self._entries: ctypes.Array[TapeEntry] | None = None

    def add(
        self,
        function: Any,
        call: ctypes.Structure,
        owners: tuple[Tensor | ctypes.Array[Any] | None, ...],
    ) -> None:
        """Add a call to the tape.

        Args:
            function: the C function.
            call: the function's argument.
            owners: objects that own the memory to which the call's addresses point.
        """
        self._calls.append((function, call))
        self._kept.extend(owner for owner in owners if owner is not None)

    def run(self) -> None:
        """Repeat all calls; raises the errors of `check`."""
        if self._entries is None:
            entries = (
                TapeEntry(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(call))
                for function, call in self._calls
            )
            self._entries = (TapeEntry * len(self._calls))(*entries)
        check(self._library.baton_run_tape(len(self._entries), self._entries))


class Recorder(threading.local):
    """The tape that the current thread is recording; None: it is not recording."""

    tape: Tape | None = None

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Enter a context in which this thread's native calls are recorded on ``tape``.

        Raises:
            TapeError: torch computed something inside the context.
        """
        assert self.tape is None, "a tape is recorded already"
        self.tape = tape
        try:
            with _NativeOnly():  # type: ignore[no-untyped-call]
                yield
        finally:
            self.tape = None


class _NativeOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch mode in which torch may only allocate tensors and make views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise the first op would import torch's compiler for a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.name in _HARMLESS:
            return func(*args, **(kwargs or {}))
        # In inference mode, composite ops (such as flatten) are not yet divided into simple ops.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise TapeError(func._schema.name)
        return result


def record(
    recorder: Recorder, library: ctypes.CDLL, compute: Callable[[], Result]
) -> tuple[Tape, Result]:
    """Run a computation once, and return a tape that replays it.

    Returns:
        The tape, and the result: tensors that every run of the tape overwrites.

    Raises:
        TapeError: torch computed a part of the result.
    """
    tape = Tape(library)
    with recorder.recording(tape):
        result = compute()
    return tape, result


__all__ = ["Recorder", "Tape", "TapeError", "check", "record"]
