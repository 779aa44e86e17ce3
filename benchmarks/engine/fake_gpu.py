"""A pretended GPU, to time the host's work: all code above the CUDA driver is real.

Tensors are in host memory. Triton compiles for sm_90, and its own launch code calls a fake CUDA
driver that only counts launches (`fake_libcuda.c`). Matrix products, which a library would compute
on a GPU, return uninitialised memory. Refuses to know: what is measured, what kernels compute.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = Path(__file__).with_name("fake_libcuda.c")
CAPABILITY = (9, 0)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
_MAX_WATCHED = 8
# Operators that launch nothing on a GPU, because they only allocate memory or make a view.
_NOT_LAUNCHED = (  # beginnings of names
    "empty", "view", "slice", "select", "alias", "detach", "as_strided", "unsqueeze", "unbind",
    "transpose", "expand", "permute", "squeeze", "t.default", "split", "new_empty", "lift_fresh",
    "flatten", "reshape", "resolve_", "to.dtype_layout", "contiguous",
)  # fmt: skip


class FakeDriver:
    """A CUDA driver that only counts its calls; a process may have only one."""

    def __init__(self) -> None:
        assert os.environ.get("TRITON_INTERPRET", "0") != "1", "nothing is launched there"
        folder = Path(tempfile.mkdtemp(prefix="baton-fake-cuda-"))
        library = folder / "libcuda.so.1"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}",
             "-o", str(library), str(SOURCE)],
            check=True,
        )  # fmt: skip
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        # Triton's libraries find the fake driver by its name, because it is loaded already.
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_num_launches.restype = ctypes.c_uint64
        self._library.fake_num_pointer_queries.restype = ctypes.c_uint64
        self._library.fake_last_function.restype = ctypes.c_void_p
        self._library.fake_last_grid.restype = ctypes.POINTER(ctypes.c_uint)
        self._library.fake_last_parameters.restype = ctypes.POINTER(ctypes.c_uint64)
        self._activate()
        _keep_memory()
        # Triton 3.6 links the fake driver into each kernel's launcher, so the file is kept until
        # exit.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)

    @staticmethod
    def _activate() -> None:
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime.driver import driver

        fake = CudaDriver()
        fake.get_device_capability = lambda device: CAPABILITY
        fake.get_current_device = lambda: 0
        fake.get_current_stream = lambda device: 0
        driver.set_active(fake)

    @property
    def num_launches(self) -> int:
        return int(self._library.fake_num_launches())

    def watch(self, num_parameters: int) -> None:
        """Keep the first ``num_parameters`` parameters of each launch from now on."""
        self._library.fake_watch(num_parameters)

    @property
    def last_launch(self) -> tuple[int, list[int], list[int]]:
        """Return the last launch's function and grid, and 8 bytes of each kept parameter."""
        watched = self._library.fake_last_parameters()
        return (
            int(self._library.fake_last_function()),
            self._library.fake_last_grid()[:3],
            watched[:_MAX_WATCHED],
        )

    @property
    def num_pointer_queries(self) -> int:
        """Return how often the driver was asked for the properties of a tensor's address."""
        return int(self._library.fake_num_pointer_queries())


def _keep_memory() -> None:
    """Make the host's allocator keep freed memory, as a GPU's allocator does."""
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        libc.mallopt(option, value)


class Timeline:
    """The busy and idle times of a device on which each step takes ``step_s`` seconds.

    Attributes:
        step_s: seconds that the device needs for one step.
        idle_s: seconds that the device waited between steps, in total.
        busy_s: seconds that the device computed, in total.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.idle_s = self.busy_s = 0.0
        self._ends_at = 0.0

    def launch(self) -> None:
        now = time.perf_counter()
        if self._ends_at:
            self.idle_s += max(now - self._ends_at, 0.0)
        self._ends_at = max(now, self._ends_at) + self.step_s
        self.busy_s += self.step_s

    def start_over(self) -> None:
        self.idle_s = self.busy_s = self._ends_at = 0.0

    @property
    def idle_share(self) -> float:
        return self.idle_s / (self.idle_s + self.busy_s)

    def record_event(self) -> _Event:
        return _Event(self._ends_at)


class _Event:
    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at

    def synchronize(self) -> None:
        """Wait until the device is idle, without the GIL, as a real driver does."""
        left = self._ends_at - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def query(self) -> bool:
        return time.perf_counter() >= self._ends_at


class _Device:
    """A torch device that claims to be a GPU, though its tensors are in host memory."""

    type, index = "cuda", 0


class FakeGPU:
    """The fake driver, and changes to torch so that the engine behaves as with a GPU.

    Attributes:
        driver: counts launches of Triton's kernels.
        timeline: the device's busy times.
        num_copies: number of copies between host and device so far.
        num_products: number of matrix products so far; each counts as one launch.
    """

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.timeline = Timeline(0.0)
        self.device = _Device()
        self.num_copies = self.num_products = 0
        self._install()

    def _install(self) -> None:
        import baton_kernels
        import engine.sampling.step_sampler
        import engine.worker.cuda_graphs
        import engine.worker.worker
        from baton_kernels import dispatch
        from engine.sampling import device_sampling

        triton_ops = dispatch._triton_ops
        baton_kernels.ops_for = lambda tensor: triton_ops()  # type: ignore[attr-defined]
        torch.nn.functional.linear = self._linear  # type: ignore[assignment]
        torch.cuda.current_stream = lambda device=None: self.timeline  # type: ignore
        torch.cuda.set_device = lambda device: None
        to, copy = Tensor.to, Tensor.copy_

        def counted_to(tensor: Tensor, device: Any, *arguments: Any, **options: Any) -> Tensor:
            if device is not self.device:
                return to(tensor, device, *arguments, **options)
            self.num_copies += 1
            return tensor.clone()

        def counted_copy(tensor: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
            self.num_copies += non_blocking
            return copy(tensor, other)

        Tensor.to, Tensor.copy_ = counted_to, counted_copy  # type: ignore
        Tensor.pin_memory = lambda tensor: tensor  # type: ignore
        # Kernels compute nothing here, so sampled token ids are arbitrary, and would be invalid
        # indices.
        vars(engine.worker.worker)["check_numbers"] = lambda *given: None
        for module in (engine.sampling.step_sampler, engine.worker.cuda_graphs):
            module.sample_on_device = (  # type: ignore[attr-defined]
                lambda *tensors: _cleared(device_sampling.sample_on_device(*tensors))
            )

    def move(self, runner: Any) -> None:
        """Move a model runner from the CPU to this device."""
        runner._device = runner._input_batch.device = self.device
        runner._input_batch._on_gpu = True

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return a graph replay that only takes the device's time (`engine.worker.cuda_graphs`)."""
        return self.timeline.launch

    def capture_pieces(
        self, body: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]]:
        """Return a fake replay for each piece of a step (`engine.worker.chunks.chunk_graphs`)."""
        pieces = [self.timeline.launch]
        body(lambda: pieces.append(self.timeline.launch))
        return pieces

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Replace a library's matrix product: only allocate memory for the result."""
        self.num_products += 1
        return x.new_empty((*x.shape[:-1], len(weight)))

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Count this thread's launches and copies during the ``with`` block."""
        found: dict[str, int] = {}
        launches, copies = self.driver.num_launches, self.num_copies
        products = self.num_products
        with _Operators() as operators:
            yield found
        found["triton launches"] = self.driver.num_launches - launches
        found["copies"] = self.num_copies - copies
        found["products"] = self.num_products - products
        found["other launches"] = len(operators.launched) - found["copies"]


def _cleared(tensor: Tensor) -> Tensor:
    """Fill a tensor with zeros without a launch, and return the tensor."""
    tensor.numpy().fill(0)
    return tensor


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch mode that lists the called operators that would launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(_NOT_LAUNCHED):
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


__all__ = ["FakeDriver", "FakeGPU", "Timeline"]
