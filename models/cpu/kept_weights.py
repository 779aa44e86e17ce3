"""Files of packed weights for CPUs, which all processes of a machine map.

The first process packs the weights, writes the file and maps it. Other processes only map the file,
so all processes share one copy in memory. Refuses to know: how weights are packed, where the file
is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.checkpoint.weights_cache import ALIGNMENT, CacheEntry, PackedFile
from baton.kernel_library.ahead import cpu_features
from baton.kernel_library.build import find_sources
from baton.kernel_library.compilers import BuildError
from baton_kernels import Groups, PackedWeight, WeightFormat

_HUGE_PAGE, _POPULATE_READ = 14, 22  # advice for madvise(2); populating exists since Linux 5.14
_OWN_CODE = ("models", "baton_kernels", "baton.checkpoint")

# A model's packed weights and plain tensors, by the names that `CpuPacker` gives them.
Kept = Mapping[str, PackedWeight | Tensor]


@functools.cache
def machine_key() -> str:
    """Return a digest of all that packed weights depend on besides the checkpoint.

    The digest covers the CPU's features, Baton's code and the version of torch.
    """
    digest = hashlib.sha256()
    parts = (platform.machine(), *sorted(cpu_features()), torch.__version__)
    digest.update(repr(parts).encode())
    for path in (*_python_sources(), *_c_sources()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _python_sources() -> Iterator[Path]:
    for package in _OWN_CODE:
        spec = find_spec(package)
        for folder in sorted(() if spec is None else spec.submodule_search_locations or ()):
            yield from sorted(Path(folder).rglob("*.py"))


def _c_sources() -> Sequence[Path]:
    try:
        return find_sources()
    except BuildError:  # without C sources there are no kernels that need packed weights
        return ()


def write_kept(entry: CacheEntry, kept: Kept, more: Mapping[str, int]) -> None:
    """Write packed weights to the file of a cache entry.

    Args:
        entry: the cache entry.
        kept: the weights, by name.
        more: further numbers to store in the file, by name.

    Raises WeightsCacheError if the weights cannot be written.
    """
    contents: list[tuple[int, memoryview]] = []
    end = 0

    def place(tensor: Tensor) -> dict[str, Any]:
        nonlocal end
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        contents.append((begin, memoryview(content.numpy())))  # type: ignore[arg-type]  # numpy's stubs
        end = begin + content.nbytes
        name = str(tensor.dtype).removeprefix("torch.")
        return {"at": begin, "dtype": name, "shape": list(tensor.shape)}

    def describe(weight: PackedWeight | Tensor) -> dict[str, Any]:
        if isinstance(weight, Tensor):
            return {"tensor": place(weight)}
        assert weight.bias is None, "biases are not packed"
        groups = () if weight.groups is None else weight.groups.tensors
        tensors = (weight.panels, weight.scales, *groups)
        return {
            "format": weight.format.value,
            "sizes": [weight.group_size, weight.out_features, weight.in_features],
            "flags": [weight.is_e2m1, weight.has_fine_inputs],
            "tensors": [None if one is None else place(one) for one in tensors],
        }

    weights = {name: describe(weight) for name, weight in kept.items()}
    entry.write(contents, {"weights": weights, "more": dict(more)})


def read_kept(file: PackedFile) -> tuple[Kept, Mapping[str, int]]:
    """Map a file's weights; return the weights, and the numbers that `write_kept` added."""
    content = _as_tensor(file)

    def tensor(place: Mapping[str, Any] | None) -> Tensor | None:
        if place is None:
            return None
        dtype, shape, begin = getattr(torch, place["dtype"]), place["shape"], place["at"]
        size = dtype.itemsize * functools.reduce(int.__mul__, shape, 1)
        return content[begin : begin + size].view(dtype).view(shape)

    def weight(found: Mapping[str, Any]) -> PackedWeight | Tensor:
        if "tensor" in found:
            plain = tensor(found["tensor"])
            assert plain is not None
            return plain
        panels, scales, *groups = map(tensor, found["tensors"])
        assert panels is not None
        group_size, out_features, in_features = found["sizes"]
        is_e2m1, has_fine_inputs = found["flags"]
        of_groups = Groups(*groups) if groups and groups[0] is not None else None  # type: ignore[arg-type]
        return PackedWeight(
            format=WeightFormat(found["format"]),
            panels=panels,
            scales=scales,
            groups=of_groups,
            group_size=group_size,
            bias=None,
            out_features=out_features,
            in_features=in_features,
            is_e2m1=is_e2m1,
            has_fine_inputs=has_fine_inputs,
        )

    return {name: weight(one) for name, one in file.index["weights"].items()}, file.index["more"]


def _as_tensor(file: PackedFile) -> Tensor:
    """Return a mapped file's bytes as one tensor; load all pages into memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        content = torch.frombuffer(file.content, dtype=torch.uint8)
    with contextlib.suppress(AttributeError):  # the C library may lack madvise
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        size = -(-content.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for advice in (_HUGE_PAGE, _POPULATE_READ):  # a failure does no harm
            madvise(content.data_ptr(), size, advice)
    return content
