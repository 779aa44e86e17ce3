"""Contract of backends over attention libraries: their arguments mean what the reference op means.

No library runs without a GPU, so stand-ins take their place here (tests/fakes/attention). The GPU
suite runs the libraries that are installed there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from baton.api.errors import ConfigError
from baton_kernels.attention import (
    ATTENTION_BACKENDS,
    choose_attention_backend,
    measured,
    wanted_block_size,
)
from baton_kernels.attention.base import AttentionBackend
from tests.contract.test_attention_backends import (
    CHUNK,
    DECODES,
    FAR_APART,
    MIXED,
    PROMPT,
    Step,
    make_step,
)
from tests.fakes.attention.libraries import install
from tools.attention_table import steps_in

pytestmark = pytest.mark.medium

# Backend -> module of its library; block size that it takes.
LIBRARIES = {
    "flash_attn 2": ("flash_attn", "flash_attn", 256),
    "flash_attn 3": ("flash_attn", "flash_attn_interface", 16),
    "flashinfer": ("flashinfer", "flashinfer", 16),
}
GPU = "NVIDIA TEST"


def half_step(
    lens: tuple[list[int], list[int]], block_size: int, window: int | None, num_padding: int = 0
) -> Step:
    step = make_step(
        lens, block_size=block_size, head_dim=64, window=window, num_padding=num_padding, ratio=4
    )
    return replace(step, query=step.query.half(), kv_cache=step.kv_cache.half())


def check(step: Step, backend: AttentionBackend) -> None:
    expected = replace(step, query=step.query.float(), kv_cache=step.kv_cache.float()).expected()
    found = step.run(backend)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("lens", [PROMPT, CHUNK, DECODES, FAR_APART, MIXED])
def test_a_library_gets_the_step(
    monkeypatch: pytest.MonkeyPatch, library: str, lens: tuple[list[int], list[int]]
) -> None:
    name, module, block_size = LIBRARIES[library]
    hide(monkeypatch)
    install(monkeypatch, module)
    backend = ATTENTION_BACKENDS.load(name)()
    for window, soft_cap, num_padding in ((None, None, 0), (4, None, 3), (1000, 0.7, 1)):
        step = half_step(lens, block_size, window, num_padding)
        check(replace(step, soft_cap=soft_cap), backend)


def test_a_plan_of_flashinfer_serves_layers_with_and_without_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = install(monkeypatch, "flashinfer")
    backend = ATTENTION_BACKENDS.load("flashinfer")()
    for lens in (MIXED, DECODES):
        step = half_step(lens, 16, None)
        backend.plan(step.metadata)
        for window in (None, 3, None):
            layer = replace(step, window=window)
            whole = replace(layer, query=step.query.float(), kv_cache=step.kv_cache.float())
            torch.testing.assert_close(
                layer.run_layer(backend).float(), whole.expected(), rtol=1e-2, atol=1e-2
            )
    assert calls.names == ["prefill"] * 3 + ["decode"] * 3


def test_flash_attention_2_divides_the_contexts_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``flash_attn_with_kvcache`` computes one context in parts."""
    hide(monkeypatch)
    calls = install(monkeypatch, "flash_attn")
    backend = ATTENTION_BACKENDS.load("flash_attn")()
    for lens in (DECODES, PROMPT, MIXED, FAR_APART):
        check(half_step(lens, 256, None), backend)
    cached, varlen = "flash_attn_with_kvcache", "flash_attn_varlen_func"
    assert calls.names == [cached, varlen, varlen, cached]


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("flash_triton", "flash_attn_interface", ["flash_attn_with_kvcache"] * 3),
        ("flashinfer_triton", "flashinfer", ["prefill"] * 3),
    ],
)
def test_prompts_go_to_the_library_and_decodes_to_triton(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, expected: list[str]
) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton without a GPU needs TRITON_INTERPRET=1, see tests/kernels")
    hide(monkeypatch)
    calls = install(monkeypatch, module)
    backend = ATTENTION_BACKENDS.load(name)()
    for lens, window in ((PROMPT, None), (DECODES, None), (MIXED, 5), (DECODES, 7), (CHUNK, None)):
        check(half_step(lens, 16, window), backend)
    assert calls.names == expected


def test_measured_times_decide_who_computes_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = [
        row(new_tokens=8, seq_len=8, triton=5.0, sdpa=9.0, flashinfer=4.0),
        row(new_tokens=4096, seq_len=4096, triton=400.0, sdpa=270.0, flashinfer=390.0),
        row(new_tokens=1, seq_len=4096, triton=40.0, sdpa=4.0, flashinfer=4.0),
    ]
    use_table(monkeypatch, tmp_path, table)
    step = measured.nearest(measured.steps_of_gpu(GPU, "sdpa"), 128, 4, 3000, 5000)
    assert step.us == {"triton": 400.0, "sdpa": 270.0, "flashinfer": 390.0}
    step = measured.nearest(measured.steps_of_gpu(GPU, "sdpa"), 64, 8, 2, 40)
    assert step.us["triton"] == 5.0
    assert measured.steps_of_gpu("another", "sdpa") == ()
    # Each step goes to the faster of the two: sdpa saves 1 - sqrt(1 * 0.675).
    found = measured.fastest_library(GPU, ["sdpa", "flashinfer"])
    assert found is not None
    assert found[0] == "sdpa"
    assert found[1] == pytest.approx((270 / 400) ** 0.5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    hide(monkeypatch, "flashinfer")
    name, reason = choose_attention_backend("cuda:0", half=True, head_dim=128)
    assert name == "sdpa_triton"
    assert reason == f"on {GPU}, steps with prompts were measured to take 0.82 of Triton's time"
    assert choose_attention_backend("cuda:0", half=False)[0] == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert choose_attention_backend("cuda:0", half=True, head_dim=128)[0] == "triton"


def row(new_tokens: int, seq_len: int, **us: float) -> dict[str, object]:
    sizes = {"head_dim": 128, "group": 4, "new_tokens": new_tokens, "seq_len": seq_len}
    return {"gpu": GPU, **sizes, "us": us}


def use_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: Sequence[object]) -> None:
    (tmp_path / "measured.json").write_text(json.dumps(rows), encoding="utf-8")
    steps = measured.read_table(tmp_path / "measured.json")
    monkeypatch.setattr(measured, "read_table", lambda: steps)


def test_a_library_is_refused_where_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    for name in ("flash_attn", "flash_triton"):
        refused(name, f"^attention_backend: {name} cannot be used: FlashAttention is not installed")
    refused("flashinfer", "^attention_backend: flashinfer cannot be used: FlashInfer is not")
    install(monkeypatch, "flash_attn")
    refused(
        "flash_attn",
        "^block_size: flash_attn cannot be used: FlashAttention 2 needs a multiple of 256, got 16$",
    )
    assert wanted_block_size("flash_attn") == wanted_block_size("flash_triton") == 256
    assert wanted_block_size("auto") == wanted_block_size("flashinfer") == 0
    chosen = choose_attention_backend("cuda:0", "flash_attn", block_size=512, head_dim=128)
    assert chosen == ("flash_attn", "asked for by the user")
    refused("flash_attn", "sinks$", block_size=512, sinks=True)
    refused("flash_attn", "a multiple of 8 numbers, at most 256, got 300", 512, head_dim=300)
    refused("flash_attn", "^kv_cache_dtype: fp8 with flash_attn: it takes", 512, fp8=True)
    refused("flash_attn", "does not take latents", 512, latent=True)
    install(monkeypatch, "flashinfer")
    refused("flashinfer", "64, 128, 256 numbers, got 80$", head_dim=80)
    refused("flashinfer_triton", "^attention_backend: flashinfer_triton .* sinks$", sinks=True)
    assert choose_attention_backend("cuda:0", "flashinfer", head_dim=128)[0] == "flashinfer"


def test_flash_attention_3_takes_prompts_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "not measured")
    assert choose_attention_backend("cuda:0", half=True)[0] == "triton"
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_attention_backend("cuda:0", half=True)[0] == "triton"
    refused("flash_triton", r"cannot be used: .* capability 9\.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert wanted_block_size("flash_triton") == 0
    assert choose_attention_backend("cuda:0", half=True)[0] == "flash_triton"
    for half, sinks, fp8 in ((True, True, False), (True, False, True), (False, False, False)):
        chosen = choose_attention_backend("cuda:0", half=half, sinks=sinks, fp8=fp8)
        assert chosen[0] == "triton"
    assert choose_attention_backend("cuda:0", "triton", half=True)[0] == "triton"
    refused("flash_triton", "sinks$", sinks=True)
    refused("flash_triton", "^kv_cache_dtype: fp8 with flash_triton: it takes", fp8=True)


def refused(name: str, match: str, block_size: int = 16, **options: object) -> None:
    with pytest.raises(ConfigError, match=match):
        choose_attention_backend("cuda:0", name, block_size, **options)  # type: ignore[arg-type]


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these libraries, or all, seem not to be installed; stand-ins may follow."""
    hidden = modules or ("flash_attn", "flash_attn_interface", "flashinfer")

    def find(name: str) -> ModuleSpec | None:
        is_stand_in = name in sys.modules and not hasattr(sys.modules[name], "__file__")
        return None if name in hidden and not is_stand_in else find_spec(name)

    for module in ("flash", "flashinfer"):
        monkeypatch.setattr(f"baton_kernels.attention.{module}.find_spec", find)


def test_the_table_is_read_from_the_suites_results() -> None:
    parts = {"attention": {
        "attention: prefill 2048 behind 0": "us 114.3, best library sdpa cudnn",
        "step: 32/8 x 128, 512 of 8192": "triton 50.25, sdpa 61.0, flashinfer refused Error: no",
    }}  # fmt: skip
    steps = steps_in({"environment": {"gpu": GPU}, "parts": parts})
    us = {"triton": 50.25, "sdpa": 61.0}
    assert steps == [measured.MeasuredStep(GPU, 128, 4, 512, 8192, us)]
    assert steps_in({"environment": {}, "parts": {}}) == []
