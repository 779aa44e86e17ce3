"""New weights in a running engine: the numbers of a fresh start, or nothing changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.api.errors import InvalidRequestError
from baton.api.outputs import Completion, FinishReason
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_folder import weights_digest
from engine import LLM
from tests.fakes.checkpoints.versions import (
    OPTIONS,
    PROMPTS,
    save_gguf_versions,
    save_versions,
    tensors_of,
)

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=2)
LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_versions(tmp_path_factory.mktemp("versions"))


def outputs(llm: LLM) -> list[tuple[Any, ...]]:
    """Return tokens and log-probabilities, to the bit, of prompts together and of one alone."""
    found = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[2], GREEDY)]
    return [(one.token_ids, one.logprobs) for one in found]


def from_folder(folder: Path, _: Path) -> Any:
    return folder


def from_file(folder: Path, there: Path) -> Any:
    return shutil.copy(folder / "model.safetensors", there / "step-17.safetensors")


def from_shards(folder: Path, there: Path) -> Any:
    tensors = list(tensors_of(folder).items())
    names = dict[str, str]()
    for number, part in enumerate((tensors[:5], tensors[5:])):
        name = f"model-{number}.safetensors"
        save_file(dict(part), there / name)
        names |= dict.fromkeys(dict(part), name)
    index = json.dumps({"weight_map": names})
    (there / "model.safetensors.index.json").write_text(index)
    return there


def from_tensors(folder: Path, _: Path) -> Any:
    return iter(tensors_of(folder).items())


@pytest.mark.parametrize("source", [from_folder, from_file, from_shards, from_tensors])
def test_any_source_gives_the_bits_of_a_fresh_start(
    folders: tuple[Path, Path], tmp_path: Path, source: Callable[[Path, Path], Any]
) -> None:
    old, new = folders
    llm, expected = LLM(str(old), **OPTIONS), outputs(LLM(str(new), **OPTIONS))
    before = outputs(llm)
    assert llm.weights == weights_digest(old)
    version = llm.update_weights(source(new, tmp_path))
    assert outputs(llm) == expected != before
    assert version == llm.weights != weights_digest(old)
    if source is not from_shards:  # names of files count
        assert version == weights_digest(new)
    assert llm.update_weights(old) == weights_digest(old)
    assert outputs(llm) == before


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8"},
        {"weights": "int4"},
        {"weights": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"native_kernels": False},
        {"async_scheduling": True},
        {"prefix_cache": False},
        {"speculative_method": "ngram", "num_speculative_tokens": 3},
        pytest.param({"tensor_parallel_size": 2, "num_threads": 2}, marks=pytest.mark.large),
        pytest.param({"pipeline_parallel_size": 2, "num_threads": 2}, marks=pytest.mark.large),
    ],
    ids=str,
)
def test_every_form_in_memory_is_made_anew(
    folders: tuple[Path, Path], options: dict[str, Any]
) -> None:
    old, new = folders
    expected = [outputs(LLM(str(folder), **OPTIONS, **options)) for folder in folders]
    llm = LLM(str(old), **OPTIONS, **options)
    for folder, bits in ((old, expected[0]), (new, expected[1]), (old, expected[0])):
        if folder != old or llm.weights != weights_digest(old):
            llm.update_weights(folder)
        assert outputs(llm) == bits


def test_integers_of_gguf_files_are_kept_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    old, new = save_gguf_versions(tmp_path)
    expected = [outputs(LLM(str(path), **OPTIONS)) for path in (old, new)]
    llm = LLM(str(old), **OPTIONS)
    assert outputs(llm) == expected[0] != expected[1]
    llm.update_weights(new)
    assert outputs(llm) == expected[1]


def test_receipts_name_the_version_and_old_cached_blocks_never_hit(
    folders: tuple[Path, Path],
) -> None:
    old, new = folders
    llm = LLM(str(old), **OPTIONS)

    def run() -> Completion:
        (found,) = llm.generate(PROMPTS[2], GREEDY)
        assert found.metrics is not None
        return found

    llm_outputs = [run(), run()]
    llm.update_weights(new)
    llm_outputs += [run(), run()]
    metrics = [one.metrics for one in llm_outputs]
    assert [one.num_cached_tokens for one in metrics if one] == [0, 20, 0, 20]
    versions = [weights_digest(old)] * 2 + [weights_digest(new)] * 2
    assert [one.weights for one in metrics if one] == versions


def without(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


def with_another(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.ones(2, 2)


def of_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def of_whole_numbers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int64)


def with_a_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 4] = torch.nan


def with_infinity(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][31] = -torch.inf


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (without, r"weights are missing: model\.layers\.1\.mlp\.down_proj\.weight"),
        (with_another, r"unknown to the model: model\.layers\.2\.mlp\.down_proj\.weight"),
        (of_another_shape, r"model\.norm\.weight: shape \[31\], but config\.json means \[32\]"),
        (of_whole_numbers, r"model\.norm\.weight: dtype int64 is not supported"),
        (with_a_nan, r"layers\.1\.self_attn\.q_proj\.weight: has a number that is NaN"),
        (with_infinity, r"model\.norm\.weight: has a number that is NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line_and_the_old_ones_serve_on(
    folders: tuple[Path, Path],
    damage: Callable[[dict[str, Tensor]], None],
    problem: str,
) -> None:
    llm = LLM(str(folders[0]), **OPTIONS)
    before, tensors = outputs(llm), tensors_of(folders[1])
    damage(tensors)
    with pytest.raises(
        InvalidRequestError, match=f"^weights: the given tensors.*{problem}"
    ) as told:
        llm.update_weights(tensors.items())
    assert "\n" not in str(told.value)
    assert llm.weights == weights_digest(folders[0])
    assert outputs(llm) == before
    llm.update_weights(folders[1])  # and right ones are taken afterwards


def test_a_source_of_another_model_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    llm, other = LLM(str(folders[0]), **OPTIONS), tmp_path / "other"
    shutil.copytree(folders[1], other)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"weights: .*other: tokenizer differs"):
        llm.update_weights(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 3.0}))
    with pytest.raises(InvalidRequestError, match=r"weights: .*other: model differs"):
        llm.update_weights(str(other))
    with pytest.raises(InvalidRequestError, match=r"weights: .*there is no such folder"):
        llm.update_weights(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match=r"^weights: a: is given twice$"):
        llm.update_weights([("a", torch.ones(1))] * 2)
    with pytest.raises(InvalidRequestError, match="when: must be drain or abort, got 'now'"):
        llm.update_weights(folders[1], when="now")


@pytest.mark.parametrize("when", ["drain", "abort"])
def test_open_streams_end_with_the_old_weights(folders: tuple[Path, Path], when: str) -> None:
    old, new = folders
    llm = LLM(str(old), **OPTIONS)
    (whole,) = llm.generate(PROMPTS[0], LONG)
    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream)
    llm.update_weights(new, when=when)
    pieces = [first, *stream]
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    if when == "drain":
        assert tokens == whole.token_ids
        assert pieces[-1].finish_reason is FinishReason.LENGTH
    else:
        assert tokens == whole.token_ids[: len(tokens)]
        assert pieces[-1].finish_reason is FinishReason.ABORT
    assert llm.engine.requests == {}
    assert outputs(llm) == outputs(LLM(str(new), **OPTIONS))


@pytest.mark.parametrize("level", ["host", "dropped"])
def test_a_sleep_gives_memory_back_and_changes_no_bit(
    folders: tuple[Path, Path], level: str
) -> None:
    llm = LLM(str(folders[0]), **OPTIONS)
    before = outputs(llm)
    assert llm.engine.kv_memory.tensor.any()
    llm.sleep(level)
    assert not llm.engine.kv_memory.tensor.any()
    assert hasattr(llm.engine.executor.worker, "runner") is (level == "host")  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match=r"^engine: is asleep; call wake\(\) first$"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(InvalidRequestError, match="sleep: the engine is asleep already"):
        llm.sleep(level)
    llm.wake()
    llm.wake()
    assert outputs(llm) == before
    llm.sleep(level)
    llm.update_weights(folders[1])
    assert outputs(llm) == outputs(LLM(str(folders[1]), **OPTIONS))
    with pytest.raises(InvalidRequestError, match="level: must be host or dropped, got 'deep'"):
        llm.sleep("deep")


def test_dropped_weights_whose_files_changed_do_not_wake(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    here = tmp_path / "model"
    shutil.copytree(folders[0], here)
    llm = LLM(str(here), **OPTIONS)
    llm.sleep("dropped")
    shutil.copy(folders[1] / "model.safetensors", here)
    with pytest.raises(InvalidRequestError, match=r"weights: .*: has changed; update to it"):
        llm.wake()
    llm.update_weights(here)
    assert outputs(llm) == outputs(LLM(str(folders[1]), **OPTIONS))


def test_a_paused_engine_takes_no_prompts(folders: tuple[Path, Path]) -> None:
    llm = LLM(str(folders[0]), **OPTIONS)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    llm.pause()
    with pytest.raises(InvalidRequestError, match=r"engine: is paused; call resume\(\) first"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(InvalidRequestError, match="when: must be abort while the engine is paused"):
        llm.update_weights(folders[1])
    llm.update_weights(folders[1], when="abort")
    llm.resume()
    assert outputs(llm) == outputs(LLM(str(folders[1]), **OPTIONS))


def test_a_sleeping_engine_pools_nothing(folders: tuple[Path, Path]) -> None:
    llm = LLM(str(folders[0]), pooling="last", **OPTIONS)
    (before,) = llm.embed(PROMPTS[0])
    llm.sleep("dropped")
    with pytest.raises(InvalidRequestError, match=r"^engine: is asleep; call wake\(\) first$"):
        llm.embed(PROMPTS[0])
    llm.wake()
    (after,) = llm.embed(PROMPTS[0])
    assert after.vector == before.vector
