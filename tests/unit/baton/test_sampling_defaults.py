"""Unit tests of sampling defaults: what a checkpoint recommends, and who wins over whom."""

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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"top_p": 7}', r"top_p: must be in \(0, 1\], got 7"),
        ('{"temperature": "hot"}', "temperature: must be 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json:? .*{problem}"):
        read_sampling_defaults(folder_with(tmp_path, text))


def test_a_request_wins_over_the_checkpoint_and_that_over_ours() -> None:
    silent = ChatRequest(model="m", messages=[])
    params = sampling_params(silent, max_tokens=1, defaults=RECOMMENDED)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert params.repetition_penalty == 1.1
    assert sampling_params(silent, max_tokens=1).temperature == 1.0
    says = ChatRequest(model="m", messages=[], temperature=0.0, top_k=-1)
    params = sampling_params(says, max_tokens=1, defaults=RECOMMENDED)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 0.95)
