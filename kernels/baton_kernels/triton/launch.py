"""Launches Triton kernels without Triton's slow search for the compiled variant.

Triton inspects every argument of every launch by name: 20 us of Python for a kernel that runs 3 us.
Only the following determine which compiled variant to launch, and most never change while a model
is loaded:

    constants   a `Launcher` is made once for each set of constants
    numbers     the values of strides and sizes, except those that Triton does not specialize on
    tensors     their dtypes, and whether each address is a multiple of 16 bytes

A `Launcher` looks up the variant by numbers and tensors; if there is none yet, Triton compiles it.
All layers of a step have equal shapes, so an op binds numbers and grid to a `Launch`, whose calls
check only addresses. The op keeps the `Launch` for all tensors of these shapes.

In a step, each kernel needs the results of the kernel before. With a usual launch, a kernel's
programs start when the kernel before has ended and its results are in memory. With a dependent
launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; compute
capability 9.0), programs start earlier, and `wait_for_kernel_before` blocks them before their first
load or store. No GPU has run a dependent launch of Baton's kernels yet, so none is used
(`DEPENDENT_LAUNCHES`); `python -m benchmarks gpu_first` measures them. Refuses to know: what a
kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # addresses that are multiples of this get faster code
_MAX_INT32 = 2**31 - 1
_runtime = knobs.runtime
# What a launch needs: function, grid, arguments before the addresses, arguments after them, and
# whether the addresses are passed as one tuple.
_Ready = tuple[Callable[..., None], tuple[int, ...], tuple[object, ...], tuple[object, ...], bool]

DEPENDENT_LAUNCHES = False
_DEPENDENT_CAPABILITY = (9, 0)

# Maximum number of launches that an op keeps, one per shape; every prompt has other shapes.
NUM_KEPT = 512


class Launcher:
    """A kernel with its constants, which finds the compiled variant for each launch.

    Args:
        kernel: the ``@triton.jit`` function, whose arguments are pointers, then numbers, then
            constants.
        options: Triton's options, such as ``num_warps``, and the kernel's constants, by name.
    """

    def __init__(self, kernel: Any, **options: int | float | bool | str | None) -> None:
        self._kernel = kernel
        self._options = options
        # False without a GPU: the kernel is interpreted
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
            grid: number of programs in each dimension, one to three.
            tensors: the kernel's pointer arguments, in order; None for unused optional pointers.
            numbers: the kernel's numbers (strides and sizes), in order.
        """
        Launch(self, grid, numbers)(*tensors)

    def through_triton(
        self, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: Sequence[float]
    ) -> Any:
        """Launch by Triton's own launcher; return the compiled variant that it used."""
        return self._kernel[grid](*tensors, *numbers, **self._options)

    def key(
        self,
        device: int,
        alignment: object,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float],
    ) -> tuple[object, ...]:
        """Return the key of the compiled variant for these arguments."""
        if self._numbers is None:
            self._numbers = _Numbers(self._kernel, len(tensors), len(numbers))
        return (
            device,
            alignment,
            *[tensor if tensor is None else tensor.dtype for tensor in tensors],
            *self._numbers.key(numbers),
        )

    def known(self, key: tuple[object, ...]) -> _Variant | None:
        """Return the compiled variant with this key; None: there is none yet."""
        return self._variants.get(key)

    def remember(self, key: tuple[object, ...], compiled: Any, num_arguments: int) -> None:
        """Keep a variant that Triton compiled.

        Args:
            key: the variant's key.
            compiled: what Triton returned.
            num_arguments: number of pointers and numbers, which come before the constants.
        """
        self._variants[key] = _Variant.of(compiled, self._options, num_arguments)


class Launch:
    """A kernel with constants, numbers and grid, which is called with tensors only.

    Args:
        launcher: the kernel's launcher.
        grid: number of programs in each dimension, one to three.
        numbers: the kernel's numbers (strides and sizes), in order.
    """

    __slots__ = ("_grid", "_launcher", "_numbers", "_ready")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, ...], numbers: Sequence[int | float] = ()
    ) -> None:
        self._launcher, self._grid, self._numbers = launcher, _three(grid), tuple(numbers)
        # what a launch needs, by device and alignment of the addresses
        self._ready: dict[tuple[int, object], _Ready] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            tensors: the kernel's pointer arguments, in order; None for unused optional pointers.
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
        # This is what JITFunction.run does at its end; the C function takes no constants and no
        # None.
        run, grid, middle, behind, takes_one = ready
        stream = active.get_current_stream(device)
        if takes_one:
            run(*grid, stream, *middle, (*addresses, *behind))
        else:
            run(*grid, stream, *middle, *addresses, *behind)

    def _find(
        self, device: int, alignment: object, tensors: Sequence[Tensor | None]
    ) -> _Ready | None:
        """Return what a launch needs; or launch with Triton's own launcher, and return None.

        Triton's own launcher is needed if no variant for these arguments is compiled yet.
        """
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
    """Bind a kernel to a grid and numbers; if the grid is empty, calls do nothing."""
    return Launch(launcher, grid, numbers) if all(grid) else _launch_nothing


def _launch_nothing(*tensors: Tensor | None) -> None:
    """Do nothing, because the grid is empty."""


@triton.jit
def wait_for_kernel_before(PDL: tl.constexpr):
    """Let the next kernel start its programs, and wait until the kernel before has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent_options() -> dict[str, bool]:
    """Return a launcher's options for a kernel with the constant ``PDL``."""
    is_possible = (
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= _DEPENDENT_CAPABILITY
    )
    is_used = DEPENDENT_LAUNCHES and is_possible
    return {"PDL": True, "launch_pdl": True} if is_used else {"PDL": False}


def row_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the distance between adjacent rows of a tensor ``[..., size]``; None: it varies."""
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
    """A compiled variant of a kernel, and its constants."""

    run: Any
    function: int
    metadata: object
    tail: tuple[object, ...]  # the constants, in the order of the kernel's arguments

    @classmethod
    def of(cls, compiled: Any, options: Mapping[str, object], num_before: int) -> _Variant:
        names = compiled.src.fn.arg_names[num_before:]
        tail = tuple([options[name] for name in names])
        return cls(compiled.run, compiled.function, compiled.packed_metadata, tail)

    def entry(self) -> tuple[Callable[..., None], tuple[object, ...], bool]:
        """Return the function that launches the variant, and how to call it.

        The second result is the arguments between stream and addresses, the third whether addresses
        are passed as one tuple. Triton 3.7's launcher checks in each call whether the kernel needs
        scratch memory, and then calls a C function. Baton's kernels need none, so the C function is
        returned; for other releases of Triton, the launcher is returned.
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
    """Finds the values of the integer arguments on which Triton specializes a kernel.

    These values are part of the key of a compiled kernel.
    """

    def __init__(self, kernel: JITFunction[Any], first: int, count: int) -> None:
        params = kernel.params[first : first + count]
        self._free = [place for place, param in enumerate(params) if param.do_not_specialize]
        self._fixed = [place for place, param in enumerate(params) if not param.do_not_specialize]

    def key(self, numbers: Sequence[int | float]) -> list[int | float | bool]:
        """Return the specialized numbers, and for each other number whether it exceeds 32 bits.

        Triton uses only some properties of specialized numbers, but keys have the values. There are
        few keys nevertheless, because these numbers are sizes of the model.
        """
        fixed = [numbers[place] for place in self._fixed]
        return fixed + [numbers[place] > _MAX_INT32 for place in self._free]
