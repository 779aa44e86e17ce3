"""One suite for every attention backend: each must mean what the reference op means."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import Tensor

from baton.api.errors import ConfigError
from baton_kernels import FP8, reference
from baton_kernels.attention import (
    ATTENTION_BACKENDS,
    LARGEST_TRITON_HEAD,
    choose_attention_backend,
)
from baton_kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionOptions
from baton_kernels.dispatch import native_ops
from tests.numerics.paged import make_cache, make_metadata, make_tables

pytestmark = pytest.mark.medium

PROMPT = ([7], [7])
CHUNK = ([5], [23])
DECODES = ([1, 1, 1, 1, 1], [1, 16, 17, 40, 17])
FAR_APART = ([1, 1, 1, 1], [700, 3, 5, 1300])
MIXED = ([1, 6, 0, 1, 4, 1], [9, 6, 0, 30, 21, 1])


@dataclass(frozen=True, slots=True)
class Step:
    """One attention call: its inputs and what must come out."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view
    metadata: AttentionMetadata
    window: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def run(self, backend: AttentionBackend) -> Tensor:
        backend.plan(self.metadata)
        return self.run_layer(backend)

    def run_layer(self, backend: AttentionBackend) -> Tensor:
        return backend.run(
            self.query,
            self.kv_cache,
            self.metadata,
            AttentionOptions(
                scale=0.25, sliding_window=self.window, soft_cap=self.soft_cap, sinks=self.sinks
            ),
        )

    def expected(self) -> Tensor:
        return reference.paged_attention(
            self.query,
            self.kv_cache,
            self.metadata.block_table,
            self.metadata.query_lens,
            self.metadata.seq_lens_host,
            scale=0.25,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            row_ends=self.metadata.row_ends,
        )


def make_step(
    lens: tuple[list[int], list[int]],
    *,
    block_size: int = 16,
    head_dim: int = 24,
    num_kv_heads: int = 2,
    ratio: int = 2,
    window: int | None = None,
    num_padding: int = 0,
    seed: int = 0,
) -> Step:
    """A step with these (query_lens, seq_lens) over a cache that is NaN wherever unused."""
    torch.manual_seed(seed)
    query_lens, seq_lens = lens
    num_blocks = sum(-(-seq_len // block_size) for seq_len in seq_lens) + 3
    table = make_tables(seq_lens, block_size, num_blocks, seed)
    cache = make_cache(num_blocks, 3, num_kv_heads, block_size, head_dim)[:, 1]
    everything = make_metadata(seq_lens, seq_lens, table, block_size).slot_mapping
    key, value = torch.randn(2, len(everything), num_kv_heads, head_dim)
    reference.store_kv(key, value, cache, everything)
    metadata = make_metadata(query_lens, seq_lens, table, block_size, num_padding)
    query = torch.randn(metadata.num_tokens, num_kv_heads * ratio, head_dim)
    return Step(query, cache, metadata, window)


# These have no float32, and run on a GPU only: test_library_attention.py has stand-ins, and the GPU
# suite compares the libraries that are installed. "sdpa" is "cpu".
WITH_LIBRARY = (
    *("sdpa", "flash_attn", "flashinfer"),
    *("sdpa_triton", "flash_triton", "flashinfer_triton"),
)
# tests/kernels/test_latents.py compares it: it takes no keys and values.
OVER_LATENTS = ("triton_latents",)
NAMES = [name for name in ATTENTION_BACKENDS.names() if name not in WITH_LIBRARY + OVER_LATENTS]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    is_triton = request.param in ("triton", "triton_invariant")
    device = "cuda" if is_triton and torch.cuda.is_available() else "cpu"
    with torch.device(device):
        yield ATTENTION_BACKENDS.load(request.param)()


@pytest.mark.parametrize("window", [None, 4, 1000])
@pytest.mark.parametrize("lens", [PROMPT, CHUNK, DECODES, FAR_APART, MIXED])
def test_equals_reference(
    backend: AttentionBackend, lens: tuple[list[int], list[int]], window: int | None
) -> None:
    step = make_step(lens, window=window)
    torch.testing.assert_close(step.run(backend), step.expected())


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize(("num_kv_heads", "ratio"), [(3, 1), (2, 3), (1, 8)])
def test_any_shape(
    backend: AttentionBackend, block_size: int, head_dim: int, num_kv_heads: int, ratio: int
) -> None:
    step = make_step(
        MIXED, block_size=block_size, head_dim=head_dim, num_kv_heads=num_kv_heads, ratio=ratio
    )
    torch.testing.assert_close(step.run(backend), step.expected())


def test_tokens_of_an_image_see_each_other(backend: AttentionBackend) -> None:
    """Tokens see to the end of their image; text between images sees up to itself."""
    if "Triton" in type(backend).__name__:
        pytest.skip("backends for GPUs do not take ends of rows")
    for lens, window in ((([700, 300, 1], [700, 410, 9]), None), (([90, 30, 1], [90, 230, 9]), 50)):
        step = make_step(lens, window=window, ratio=3)
        ends = []
        for query_len, seq_len in zip(*lens, strict=True):
            own = torch.arange(seq_len - query_len, seq_len) + 1
            of_image = -(-own // 40) * 40  # images of 40 tokens, but text in every third place
            ends.append(torch.where(of_image // 40 % 3 == 0, own, of_image.clamp(max=seq_len)))
        seeing = replace(step.metadata, row_ends=torch.cat(ends).to(torch.int32))
        seeing_step = replace(step, metadata=seeing)
        found = seeing_step.run(backend)
        torch.testing.assert_close(found, seeing_step.expected())
        assert not torch.allclose(found, step.expected(), atol=1e-3)


def test_padding_tokens_come_back_as_zeros(backend: AttentionBackend) -> None:
    step = make_step(MIXED, num_padding=3)
    out = step.run(backend)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    torch.testing.assert_close(out, step.expected())


def test_bfloat16_stays_close_to_float32(backend: AttentionBackend) -> None:
    step = make_step(MIXED)
    if os.environ.get("TRITON_INTERPRET") and "Triton" in type(backend).__name__:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    rounded = Step(step.query.bfloat16(), step.kv_cache.bfloat16(), step.metadata, step.window)
    out = rounded.run(backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), step.expected(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lens", [PROMPT, CHUNK, DECODES, MIXED])
def test_a_cache_of_float8_means_the_numbers_in_it(
    backend: AttentionBackend, lens: tuple[list[int], list[int]], window: int | None
) -> None:
    step = make_step(lens, window=window)
    assert backend.reason_against_fp8(step.kv_cache.device) is None
    # Triton's interpreter makes zeros of the smallest numbers of float8.
    cache = torch.where(step.kv_cache.abs() < 2**-6, 0, step.kv_cache).to(FP8)
    out = Step(step.query, cache, step.metadata, window).run(backend)
    expected = Step(step.query, cache.float(), step.metadata, window).expected()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("lens", [DECODES, MIXED])
def test_a_request_does_not_depend_on_its_neighbours(
    backend: AttentionBackend, lens: tuple[list[int], list[int]]
) -> None:
    step = make_step(lens)
    together = step.run(backend)
    for index, (query_len, seq_len) in enumerate(zip(*lens, strict=True)):
        if not query_len:
            continue
        first = int(step.metadata.query_start_loc[index])
        rows = slice(first, first + query_len)
        table = step.metadata.block_table[index : index + 1]
        alone = make_metadata([query_len], [seq_len], table, step.kv_cache.shape[3])
        out = Step(step.query[rows], step.kv_cache, alone, step.window).run(backend)
        torch.testing.assert_close(out, together[rows])


def test_one_plan_serves_layers_with_and_without_a_window(backend: AttentionBackend) -> None:
    step = make_step(MIXED)
    narrow = Step(step.query, step.kv_cache, step.metadata, window=3)
    first = step.run(backend)
    torch.testing.assert_close(narrow.run_layer(backend), narrow.expected())
    assert torch.equal(step.run_layer(backend), first)


def test_steps_and_block_sizes_may_change(backend: AttentionBackend) -> None:
    for lens, block_size in ((FAR_APART, 16), (PROMPT, 16), (CHUNK, 4), (MIXED, 4)):
        step = make_step(lens, block_size=block_size)
        torch.testing.assert_close(step.run(backend), step.expected())


def test_works_inside_and_outside_inference_mode(backend: AttentionBackend) -> None:
    step = make_step(MIXED)
    with torch.inference_mode():
        inside = step.run(backend)
    assert torch.equal(inside.clone(), step.run(backend))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lens", [PROMPT, CHUNK, DECODES, MIXED])
def test_soft_cap(
    backend: AttentionBackend, lens: tuple[list[int], list[int]], window: int | None
) -> None:
    step = make_step(lens, window=window)
    capped = Step(step.query, step.kv_cache, step.metadata, window, soft_cap=0.7)
    torch.testing.assert_close(capped.run(backend), capped.expected())
    assert not torch.allclose(capped.expected(), step.expected())


def test_what_has_no_company() -> None:
    assert choose_attention_backend("cpu", invariant=True)[0] == "native"
    assert choose_attention_backend("cpu", latent=True, invariant=True)[0] == "native"
    pytest.importorskip("triton")
    assert choose_attention_backend("cuda:0", invariant=True, half=True)[0] == "triton_invariant"
    assert choose_attention_backend("cuda:0", "triton_invariant")[0] == "triton_invariant"
    for device, name in (("cpu", "reference"), ("cuda:0", "triton")):
        with pytest.raises(ConfigError, match=r"^attention_backend: must be "):
            choose_attention_backend(device, name, invariant=True)


def test_choice_and_override() -> None:
    expected = "native" if native_ops() else "cpu"
    assert choose_attention_backend("cpu", None)[0] == expected
    assert choose_attention_backend(torch.device("cuda", 0), None)[0] == "triton"
    assert choose_attention_backend("xpu") == (
        "reference",
        "no faster backend for 'xpu' is registered",
    )
    assert choose_attention_backend("cpu", "reference") == ("reference", "asked for by the user")
    with pytest.raises(ConfigError, match="unknown attention backend 'nope'"):
        choose_attention_backend("cpu", "nope")


def test_heads_that_triton_cannot_compute_go_to_the_reference() -> None:
    tile_sizes = pytest.importorskip("baton_kernels.triton.tile_sizes")
    assert max(tile_sizes._DECODE) == max(tile_sizes._VARLEN) == LARGEST_TRITON_HEAD
    assert choose_attention_backend("cuda:0", head_dim=512)[0] == "triton"
    assert choose_attention_backend("cuda:0", head_dim=576) == (
        "reference",
        "heads have 576 numbers, and triton takes 512",
    )
    assert choose_attention_backend("cuda:0", "reference", head_dim=576)[0] == "reference"
    problem = "triton takes heads of at most 512 numbers, got 576; reference takes any"
    with pytest.raises(ConfigError, match=f"^attention_backend: {problem}$"):
        choose_attention_backend("cuda:0", "triton", head_dim=576)


def test_latents_have_a_backend_of_their_own() -> None:
    assert choose_attention_backend("cuda:0", latent=True)[0] == "triton_latents"
    assert choose_attention_backend("cuda:0", "triton", latent=True)[0] == "triton_latents"
    assert choose_attention_backend("cpu", latent=True)[0] == choose_attention_backend("cpu")[0]
    with pytest.raises(ConfigError, match="triton_latents takes latents"):
        choose_attention_backend("cuda:0", "triton_latents")
    with pytest.raises(ConfigError, match=r"does not take latents|not installed"):
        choose_attention_backend("cuda:0", "flash_attn", latent=True)


def test_without_triton_the_reference_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "triton")
    assert choose_attention_backend("cuda:0") == ("reference", "triton is not installed")
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose_attention_backend("cuda:0", "triton")


def test_fp8_goes_to_a_backend_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention_backend("cpu", fp8=True) == choose_attention_backend("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_attention_backend("cuda:0", fp8=True)[0] == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    name, reason = choose_attention_backend("cuda:0", fp8=True)
    assert name == "reference"
    assert reason == (
        "the KV cache is fp8, and triton: float8 needs a GPU of compute capability 8.9 or newer"
    )
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: fp8 with triton: float8 needs a GPU"):
        choose_attention_backend("cuda:0", "triton", fp8=True)


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these seem not to be installed, whether they are or not."""
    find_spec = importlib.util.find_spec
    hidden = frozenset(modules)

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in hidden else find_spec(name, package)

    monkeypatch.setattr("baton_kernels.attention.find_spec", find)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (9, None), (None, 0.7)])
@pytest.mark.parametrize("lens", [CHUNK, FAR_APART, MIXED])
def test_sinks(
    backend: AttentionBackend,
    lens: tuple[list[int], list[int]],
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Far below all scores a sink changes nothing; far above it takes all weight."""
    plain = make_step(lens, window=window)
    sinks = torch.tensor([0.5, -100.0, 200.0, 2.0])  # of each head
    step = Step(plain.query, plain.kv_cache, plain.metadata, window, soft_cap, sinks)
    out = step.run(backend)
    torch.testing.assert_close(out, step.expected())
    without = Step(plain.query, plain.kv_cache, plain.metadata, window, soft_cap).expected()
    torch.testing.assert_close(out[:, 1], without[:, 1])
    torch.testing.assert_close(out[:, 2], torch.zeros_like(out[:, 2]))
    assert not torch.allclose(out[:, 0], without[:, 0])
