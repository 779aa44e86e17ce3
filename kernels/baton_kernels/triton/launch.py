"""Launches Triton kernels without Triton's slow search for the compiled variant.

Triton inspects every argument of every launch by name: 20 us of Python for a kernel that runs 3 us.
Only these determine the variant, and most never change while a model is loaded:

    constants   a `Launcher` is made once for them
    numbers     strides and sizes, by value; those that Triton does not specialize on may change
    tensors     their dtypes, and whether each address is a multiple of 16 bytes

A `Launcher` finds the variant by one look-up of numbers and tensors; Triton compiles new variants.
All layers of a step have the same shapes, so an op binds numbers and grid to a `Launch`, which
checks only addresses. The op keeps the `Launch` for other tensors of these shapes. Refuses to know:
what a kernel computes.
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

_ALIGNMENT = 16  # alignment in bytes for which Triton compiles aligned accesses
_MAX_INT32 = 2**31 - 1
_runtime = knobs.runtime
# Function, grid, arguments before the addresses, arguments after, and whether addresses are one
# tuple.
_Ready = tuple[Callable[..., None], tuple[int, ...], tuple[object, ...], tuple[object, ...], bool]

# Maximum number of launches cached per op, one per shape; shapes change with every prompt.
NUM_KEPT = 512


class Launcher:
    """One kernel with its constants; made once and kept.

    Args:
        kernel: the ``@triton.jit`` function, whose arguments are pointers, then numbers, then
            constants.
        options: Triton's options, such as ``num_warps``, and the kernel's constants, by name.
    """

    def __init__(self, kernel: Any, **options: int | float | bool | str | None) -> None:
        self._kernel = kernel
        self._options = options
        # without a GPU, the kernel is interpreted
        self.is_compiled = isinstance(kernel, JITFunction)
        self._variants: dict[tuple[object, ...], _Variant] = {}
        self._numbers: _Numbers | None = None

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float] = (),
    ) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            grid: numbers of programs, one to three.
            tensors: the kernel's pointers, in order; None for optional pointers that are not used.
            numbers: the kernel's numbers, in order.
        """
        Launch(self, grid, numbers)(*tensors)

    def through_triton(
        self, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: Sequence[float]
    ) -> Any:
        """Launch through Triton itself; return the variant that it compiled."""
        return self._kernel[grid](*tensors, *numbers, **self._options)

    def key(
        self,
        device: int,
        alignment: object,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float],
    ) -> tuple[object, ...]:
        """Return the key under which a compiled variant is cached."""
        if self._numbers is None:
            self._numbers = _Numbers(self._kernel, len(tensors), len(numbers))
        return (
            device,
            alignment,
            *[tensor if tensor is None else tensor.dtype for tensor in tensors],
            *self._numbers.key(numbers),
        )

    def known(self, key: tuple[object, ...]) -> _Variant | None:
        """Return the compiled variant of a key, or None."""
        return self._variants.get(key)

    def remember(self, key: tuple[object, ...], compiled: Any, num_arguments: int) -> None:
        """Cache a variant that Triton compiled, with its number of varying arguments."""
        self._variants[key] = _Variant.of(compiled, self._options, num_arguments)


class Launch:
    """A kernel with constants, numbers and grid; a call adds only the tensors' addresses.

    Args:
        launcher: the kernel's launcher.
        grid: numbers of programs, one to three.
        numbers: the kernel's numbers, in order.
    """

    __slots__ = ("_grid", "_launcher", "_numbers", "_ready")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, ...], numbers: Sequence[int | float] = ()
    ) -> None:
        self._launcher, self._grid, self._numbers = launcher, _three(grid), tuple(numbers)
        # By device and alignment: the function, and the arguments before and after the addresses.
        self._ready: dict[tuple[int, object], _Ready] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            tensors: the kernel's pointers, in order; None for optional pointers that are not used.
                All calls must have equal dtypes, and None in the same positions.
        """
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        # a profiler hook is installed
        if not self._launcher.is_compiled or enter.calls or leave.calls:
            self._launcher.through_triton(self._grid, tensors, self._numbers)
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        alignment: object = reduce(or_, addresses) % _ALIGNMENT == 0
        if not alignment:
            alignment = tuple([address % _ALIGNMENT == 0 for address in addresses])
        active = driver.active
        device = active.get_current_device()
        ready = self._ready.get((device, alignment))
        if ready is None:
            ready = self._find(device, alignment, tensors)
            if ready is None:
                return
        # As at the end of JITFunction.run; the C function takes neither constants nor None.
        run, grid, middle, behind, takes_one = ready
        stream = active.get_current_stream(device)
        if takes_one:
            run(*grid, stream, *middle, (*addresses, *behind))
        else:
            run(*grid, stream, *middle, *addresses, *behind)

    def _find(
        self, device: int, alignment: object, tensors: Sequence[Tensor | None]
    ) -> _Ready | None:
        """Return the cached variant; without one, launch through Triton and return None."""
        launcher, numbers = self._launcher, self._numbers
        key = launcher.key(device, alignment, tensors, numbers)
        variant = launcher.known(key)
        if variant is None:
            compiled = launcher.through_triton(self._grid, tensors, numbers)
            launcher.remember(key, compiled, len(tensors) + len(numbers))
            return None
        run, middle, takes_one = variant.entry()
        ready = run, self._grid, middle, (*numbers, *variant.tail), takes_one
        self._ready[device, alignment] = ready
        return ready


def bind(
    launcher: Launcher, grid: tuple[int, ...], numbers: Sequence[int | float] = ()
) -> Callable[..., None]:
    """Bind a kernel to a step's grid and numbers; for an empty grid, return a no-op."""
    return Launch(launcher, grid, numbers) if all(grid) else _launch_nothing


def _launch_nothing(*tensors: Tensor | None) -> None:
    """Do nothing, because the grid is empty."""


def row_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the distance between rows of a tensor ``[..., size]``; None: distances differ."""
    size = expected = shape[-1]
    if stride[-1] != 1 and size != 1:
        return None
    for length, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if length != 1 and step != expected:
            return stride[0] if len(shape) == 2 else None
        expected *= length
    return size


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return grid if len(grid) == 3 else (*grid, 1, 1)[:3]


@dataclass(frozen=True, slots=True)
class _Variant:
    """A compiled kernel and its constants."""

    run: Any
    function: int
    metadata: object
    tail: tuple[object, ...]  # constants after the numbers, in the kernel's order

    @classmethod
    def of(cls, compiled: Any, options: Mapping[str, object], num_before: int) -> _Variant:
        names = compiled.src.fn.arg_names[num_before:]
        tail = tuple([options[name] for name in names])
        return cls(compiled.run, compiled.function, compiled.packed_metadata, tail)

    def entry(self) -> tuple[Callable[..., None], tuple[object, ...], bool]:
        """Return a function, its arguments between stream and addresses, and whether addresses are
        a tuple.

        Triton 3.7's launcher asks in each call whether the kernel needs scratch memory, and then
        calls a C function. Our kernels need none, so the C function is called directly. For other
        releases, the launcher is called.
        """
        run, no_hooks = self.run, (None, None, None)
        names = ("launch", "arg_annotations", "kernel_signature", "launch_pdl")
        if all(hasattr(run, name) for name in names) and not (
            run.global_scratch_size or run.profile_scratch_size
        ):
            how = (run.launch_cooperative_grid, run.launch_pdl, self.metadata, *no_hooks)
            types = (run.arg_annotations, run.kernel_signature)
            return run.launch, (self.function, *how, None, None, *types), True
        return run, (self.function, self.metadata, *no_hooks), False


class _Numbers:
    """The arguments (strides and sizes) on whose values Triton specializes a kernel."""

    def __init__(self, kernel: JITFunction[Any], first: int, count: int) -> None:
        params = kernel.params[first : first + count]
        self._free = [place for place, param in enumerate(params) if param.do_not_specialize]
        self._fixed = [place for place, param in enumerate(params) if not param.do_not_specialize]

    def key(self, numbers: Sequence[int | float]) -> list[int | float | bool]:
        """Return a key of the specialized numbers, and of other numbers that exceed 32 bits.

        The key has the values themselves, although Triton uses only some of their properties:
        values are a model's sizes, so there are few keys.
        """
        fixed = [numbers[place] for place in self._fixed]
        return fixed + [numbers[place] > _MAX_INT32 for place in self._free]
