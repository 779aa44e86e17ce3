"""Unit tests of sampling defaults: a checkpoint's recommendations and their precedence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.api.errors import ConfigError, ModelLoadError
from baton.checkpoint.sampling_defaults import read_sampling_defaults
from router.api.http.sampling import sampling_params
from router.api.http.schema import ChatRequest
from router.intake.text_options import TextOptions

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


def folder_with(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def test_what_is_recommended_is_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    more = {"do_sample": True, "eos_token_id": [1], "min_p": None}
    folder = folder_with(tmp_path, json.dumps({**RECOMMENDED, **more}))
    assert read_sampling_defaults(folder) == RECOMMENDED
    assert TextOptions().sampling_defaults(folder) == RECOMMENDED
    assert TextOptions(generation_config="none").sampling_defaults(folder) == {}
    with pytest.raises(ConfigError, match="generation_config: must be one of auto, none, got 'x'"):
        TextOptions(generation_config="x")


@pytest.mark.parametrize("text", [None, "{}", '{"eos_token_id": 2, "do_sample": true}'])
def test_requests_are_sampled_calmly_where_a_checkpoint_recommends_nothing(
    tmp_path: Path, text: str | None
) -> None:
    folder = tmp_path if text is None else folder_with(tmp_path, text)
    assert TextOptions().sampling_defaults(folder) == {"temperature": 0.7}
    assert TextOptions(generation_config="none").sampling_defaults(folder) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"top_p": 7}', r"top_p: must be in \[0, 1\], got 7"),
        ('{"top_k": -2}', "top_k: must be 0 or more"),
        ('{"top_k": true}', "top_k: must be a whole number"),
        ('{"temperature": "hot"}', "temperature: must be 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json:? .*{problem}"):
        read_sampling_defaults(folder_with(tmp_path, text))


@pytest.mark.parametrize(
    ("written", "top_k"), [("-1", 0), ("0", 0), ("20.0", 20), ("-1.0", 0), ("20", 20)]
)
def test_values_that_other_libraries_take_for_off_are_off(
    tmp_path: Path, written: str, top_k: int
) -> None:
    """Regression: the router did not start with a top-k of -1 or a top-p of 0."""
    folder = folder_with(tmp_path, f'{{"top_k": {written}, "top_p": 0}}')
    defaults = read_sampling_defaults(folder)
    params = sampling_params(ChatRequest(model="m", messages=[]), max_tokens=1, defaults=defaults)
    assert params.top_k == top_k
    assert 0 < params.top_p < 1e-300  # keeps the most probable token alone


def test_a_request_wins_over_the_checkpoint_and_that_over_ours() -> None:
    silent = ChatRequest(model="m", messages=[])
    params = sampling_params(silent, max_tokens=1, defaults=RECOMMENDED)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert params.repetition_penalty == 1.1
    assert sampling_params(silent, max_tokens=1).temperature == 1.0
    says = ChatRequest(model="m", messages=[], temperature=0.0, top_k=-1)
    params = sampling_params(says, max_tokens=1, defaults=RECOMMENDED)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 0.95)
