"""Tests that the predicted memory of a model equals a loaded model's, and is shown in one line.

Refuses to know: how weights are packed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from baton.api.errors import ConfigError
from baton.checkpoint.model_folder import find_model_folder
from baton.engine_config import GIB, WEIGHTS, EngineConfig
from baton_kernels.dispatch import native_ops
from engine import LLM
from engine.worker import worker
from engine.worker.host.host_memory import HostMemory
from engine.worker.host.memory_check import check_memory
from models import ModelConfig, load_model
from models.cpu.packing import CpuPacker
from models.memory_needs import memory_needs
from tests.fakes.checkpoints.gguf_files import write_model
from tests.numerics.tiny_models import make_hugging_face_model, save

DEMO = "examples/demo_model"
SHAPE = {
    "vocab_size": 640,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 32,
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folders(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = make_hugging_face_model(
            "LlamaForCausalLM", tie_word_embeddings=request.param, **SHAPE
        )
        found[dtype] = save(theirs.to(dtype), tmp_path_factory.mktemp("model"))
    return found


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_a_loaded_model_has(
    folders: dict[torch.dtype, Path], dtype: str, weights: str
) -> None:
    for folder in folders.values():
        packer = CpuPacker.choose(getattr(torch, dtype), weights)
        model = load_model(folder, dtype=getattr(torch, dtype), packer=packer)
        assert isinstance(model, torch.nn.Module)
        kept = sum(one.numel() * one.itemsize for one in model.parameters())
        needed = memory_needs(model.config, dtype=dtype).weights[weights]
        assert needed == pytest.approx(kept, rel=1e-3)


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_a_loaded_gguf_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tied: bool
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    theirs = make_hugging_face_model("LlamaForCausalLM", tie_word_embeddings=tied, **SHAPE)
    path = tmp_path / "one.gguf"
    write_model(path, theirs, GGMLQuantizationType[kind])
    folder = find_model_folder(str(path))
    model = load_model(folder, dtype=torch.float32, packer=CpuPacker.choose(torch.float32, "auto"))
    assert isinstance(model, torch.nn.Module)
    kept = sum(one.numel() * one.itemsize for one in model.parameters())
    needed = memory_needs(model.config, folder=folder).weights["auto"]
    assert needed == pytest.approx(kept, rel=1e-3)


def test_bytes_of_keys_and_values() -> None:
    config = ModelConfig.from_folder(DEMO)
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert memory_needs(config).kv_token_bytes == 4 * numbers
    assert memory_needs(config, dtype="bfloat16").kv_token_bytes == 2 * numbers
    assert memory_needs(config, kv_cache_dtype="fp8", block_size=8).kv_block_bytes == 8 * numbers


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    needs = memory_needs(ModelConfig.from_folder(DEMO))

    def check(available: int, **options: Any) -> None:
        check_memory(
            Path(DEMO), EngineConfig(**options), "float32", HostMemory(4 * available, available)
        )

    weights = needs.weights["fp32"]
    check(weights, weights="fp32")
    check(weights + 3 * needs.kv_block_bytes, weights="fp32", num_blocks=3)
    check(weights + 2**20, weights="fp32", kv_cache_bytes=2**20)
    check(0, weights="fp32", check_memory=False)
    for options in ({"num_blocks": 3}, {"kv_cache_bytes": 3 * needs.kv_block_bytes}):
        with pytest.raises(ConfigError, match=r"^weights: fp32 take .*; int4 take") as caught:
            check(weights + 3 * needs.kv_block_bytes - 1, weights="fp32", **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--no-check-memory") as caught:
        check(1, weights="int4")
    assert "int4 take" in str(caught.value)
    assert str(caught.value).count("int4") == 1


def test_blocks_of_some_layers_are_not_taken_for_blocks_of_all(tmp_path: Path) -> None:
    """Check a model in which half of the layers have windows."""
    config = json.loads(Path(DEMO, "config.json").read_text(encoding="utf-8"))
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    memory = HostMemory(GIB, GIB)
    for changes, is_refused in (({}, True), (windows, False)):
        changed = json.dumps({**config, "layer_types": None, **changes})
        (tmp_path / "config.json").write_text(changed, encoding="utf-8")
        if is_refused:
            with pytest.raises(ConfigError, match="the KV cache"):
                check_memory(tmp_path, EngineConfig(num_blocks=20_000), "float32", memory)
        else:
            check_memory(tmp_path, EngineConfig(num_blocks=20_000), "float32", memory)


def test_without_native_kernels_nothing_is_packed() -> None:
    config = ModelConfig.from_folder(DEMO)
    packed, plain = (memory_needs(config, native_kernels=one).weights for one in (True, False))
    assert plain["auto"] == pytest.approx(2 * packed["auto"], rel=1e-2)
    assert plain["int8"] == packed["int8"]
    memory = HostMemory(GIB, packed["auto"])
    check_memory(Path(DEMO), EngineConfig(), "float32", memory)
    with pytest.raises(ConfigError, match=r"^weights: auto take 0\.02 GiB"):
        check_memory(Path(DEMO), EngineConfig(native_kernels=False), "float32", memory)


def test_an_engine_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "read_host_memory", lambda: HostMemory(GIB, 2**20))
    loaded: list[object] = []
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: loaded.append(1))
    with pytest.raises(ConfigError, match=r"^weights: auto take"):
        LLM(DEMO, device="cpu")
    assert not loaded
    monkeypatch.undo()
    monkeypatch.setattr(worker, "read_host_memory", lambda: HostMemory(GIB, 2**20))
    LLM(DEMO, device="cpu", check_memory=False, num_blocks=8)


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`baton model show` in a fresh process, which says whether it imported torch."""
    code = (
        "import sys\nfrom baton.cli.app import app\n"
        "try: app(['model', 'show', *sys.argv[1:]], prog_name='baton')\n"
        "except SystemExit as end:\n"
        "    assert 'torch' not in sys.modules\n    raise\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.medium
def test_the_command_prints_it_without_torch() -> None:
    needs = memory_needs(ModelConfig.from_folder(DEMO))
    shown = show(DEMO, "--output", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == {
        "weights_bytes": needs.weights,
        "kv_token_bytes": needs.kv_token_bytes,
        "kv_block_bytes": needs.kv_block_bytes,
        "block_size": 16,
    }
    lines = show(DEMO).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == list(WEIGHTS)
    assert lines[-1] == "KV cache: 6.0 KiB a token, 96 KiB a block of 16 tokens"
    missing = show("/nowhere")
    assert missing.returncode == 1
    assert missing.stderr == "error: model: '/nowhere': there is no such folder or file\n"
