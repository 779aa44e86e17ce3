"""Launches a Triton kernel without asking Triton every time which of its variants that takes.

Triton looks at every argument of every launch, by its name: 20 us of Python for a kernel that runs
for 3. What it looks for is little, and most of it is the same for as long as a model lives:

    constants   a `Launcher` is made once for them
    numbers     strides and sizes, by value; those that Triton does not look at may change freely
    tensors     their dtypes, and whether each address is a multiple of 16

Numbers and tensors are looked at in each launch here too, so tensors may move. The variant that
they lead to is found by one look-up; a new one is found, and compiled, by Triton itself.
Refuses to know: what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes; what Triton takes for aligned
_MAX_INT32 = 2**31 - 1
_runtime = knobs.runtime


class Launcher:
    """One kernel with its constants, to be made once and kept.

    Args:
        kernel: the ``@triton.jit`` function, whose arguments are pointers first, then numbers,
            then constants.
        options: Triton's, such as ``num_warps``, and the kernel's constants, by name.
    """

    def __init__(self, kernel: Any, **options: int | float | bool | str | None) -> None:
        self._kernel = kernel
        self._options = options
        self._is_compiled = isinstance(kernel, JITFunction)  # else it is interpreted
        self._variants: dict[tuple[object, ...], _Variant] = {}
        self._numbers: _Numbers | None = None

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float] = (),
    ) -> None:
        """Launch it on the current device and stream.

        Args:
            grid: programs, one to three numbers.
            tensors: the kernel's pointers, in its order; None where it has a branch for that.
            numbers: its other arguments that are no constants, in its order.
        """
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        if not self._is_compiled or enter.calls or leave.calls:  # a profiler wants to be told
            self._kernel[grid](*tensors, *numbers, **self._options)
            return
        active = driver.active
        device = active.get_current_device()
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._numbers is None:
            self._numbers = _Numbers(self._kernel, len(tensors), len(numbers))
        key = (
            device,
            reduce(or_, addresses) % _ALIGNMENT == 0
            or tuple([address % _ALIGNMENT == 0 for address in addresses]),
            *[tensor if tensor is None else tensor.dtype for tensor in tensors],
            *self._numbers.key(numbers),
        )
        variant = self._variants.get(key)
        if variant is None:
            compiled = self._kernel[grid](*tensors, *numbers, **self._options)
            self._variants[key] = _Variant.of(compiled, self._options, len(tensors) + len(numbers))
            return
        # As JITFunction.run ends; what is a constant, None as well, is left out by what it calls.
        variant.run(
            *_three(grid), active.get_current_stream(device), variant.function, variant.metadata,
            None, None, None, *addresses, *numbers, *variant.tail,
        )  # fmt: skip


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return grid if len(grid) == 3 else (*grid, 1, 1)[:3]


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a key leads to."""

    run: Callable[..., None]
    function: int
    metadata: object
    tail: tuple[object, ...]  # the constants behind the numbers, in the kernel's order

    @classmethod
    def of(cls, compiled: Any, options: Mapping[str, object], num_before: int) -> _Variant:
        names = compiled.src.fn.arg_names[num_before:]
        tail = tuple([options[name] for name in names])
        return cls(compiled.run, compiled.function, compiled.packed_metadata, tail)


class _Numbers:
    """Which of a kernel's numbers Triton looks at."""

    def __init__(self, kernel: JITFunction[Any], first: int, count: int) -> None:
        params = kernel.params[first : first + count]
        self._free = [place for place, param in enumerate(params) if param.do_not_specialize]
        self._fixed = [place for place, param in enumerate(params) if not param.do_not_specialize]

    def key(self, numbers: Sequence[int | float]) -> list[int | float | bool]:
        """Key the arguments it looks at, and of the others whether they need more than 32 bits.

        It looks at less than the value; but these are a model's, so there are few of them.
        """
        fixed = [numbers[place] for place in self._fixed]
        return fixed + [numbers[place] > _MAX_INT32 for place in self._free]
