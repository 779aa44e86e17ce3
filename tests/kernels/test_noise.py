"""Tests that the Triton sampler's noise is Gumbel noise up to roundings, and within its bound."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from baton_kernels.triton.sampling.kernels import gumbel, gumbel_bound, mixed, ordered
from engine.sampling.gumbel import gumbel as gumbel_on_cpu
from engine.sampling.gumbel import noise_hashes
from engine.sampling.philox import counter_words
from tests.kernels.conftest import DEVICE

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(hashes_ptr, noise_ptr, bounds_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise and bound of each hash."""
    index = tl.arange(0, BLOCK)
    hashes = tl.load(hashes_ptr + index).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + index, gumbel(hashes))
    tl.store(bounds_ptr + index, gumbel_bound(hashes))


@triton.jit  # type: ignore[untyped-decorator]
def hash_kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hashes of the first token ids under one key."""
    key0 = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, mixed(key0, key1, index).to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def ordered_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of floats."""
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, ordered(tl.load(x_ptr + index)).to(tl.int64))


def test_noise_and_its_bound_at_both_ends_and_in_between() -> None:
    powers = 2 ** np.arange(32, dtype=np.uint64)
    edges = np.concatenate((powers - 1, powers, powers + 1, 2**32 - powers, 2**32 - 1 - powers))
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**32, BLOCK, dtype=np.uint64)
    # Around 1 / 16 the noise is computed another way.
    hashes[: len(edges)] = edges % 2**32
    hashes[len(edges) : len(edges) + 64] = 2**28 - 32 + np.arange(64)
    words = hashes.astype(np.uint32)
    noise, bounds = torch.empty(2, BLOCK, device=DEVICE)
    noise_kernel[1,](torch.from_numpy(words.view(np.int32)).to(DEVICE), noise, bounds, BLOCK=BLOCK)
    exact = gumbel_on_cpu(words)
    np.testing.assert_allclose(noise.cpu().numpy(), exact, rtol=3e-7, atol=2e-6)
    assert (bounds.cpu().numpy() >= exact - 1e-5).all()
    large = (exact > 3) & (words > 100)  # below, it makes more of the half that is added
    assert (bounds.cpu().numpy()[large] <= exact[large] + 0.09).all()


def test_hashes_are_the_cpu_samplers_bit_for_bit() -> None:
    for keys in counter_words(np.arange(3, dtype=np.uint64), np.arange(3)):
        out = torch.empty(BLOCK, dtype=torch.int32, device=DEVICE)
        hash_kernel[1,](torch.from_numpy(keys.view(np.int32)).to(DEVICE), out, BLOCK=BLOCK)
        found = out.cpu().numpy().view(np.uint32)
        assert np.array_equal(found, noise_hashes(keys, np.arange(BLOCK)))


def test_keys_order_as_floats_do() -> None:
    finite = torch.randn(121) * 10.0 ** torch.randint(-38, 38, (121,))
    special = [-torch.inf, torch.inf, 0.0, -0.0, 1e-45, -1e-45, 1.0]
    x = torch.cat((finite, torch.tensor(special))).to(DEVICE)
    out = torch.empty(len(x), dtype=torch.int64, device=DEVICE)
    ordered_kernel[1,](x, out, BLOCK=128)
    assert len(x) == 128
    assert torch.equal(out[:, None] < out, x[:, None] < x)
    assert torch.equal(out[:, None] == out, x[:, None] == x)
