"""Unit tests of hub ids, and of the file that a quantization's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api.errors import ModelLoadError
from baton.checkpoint.hub import HubName, fetch

PARTS = [f"Q8_0/big-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)]
FILES = [
    *("README.md", "config.json", "mmproj-F16.gguf", "big.imatrix.gguf"),
    *("big-Q4_K_M.gguf", "big-Q4_K_S.gguf", "big-UD-Q4_K_XL.gguf", "big.bf16.gguf"),
    *PARTS,
]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name:Q4_K_M", HubName("owner/name", "Q4_K_M")),
        ("hf://owner/name", HubName("owner/name")),
        ("hf://owner/na.me:UD-Q2_K_XL", HubName("owner/na.me", "UD-Q2_K_XL")),
        ("hf://owner/name/a/b.gguf", HubName("owner/name", file="a/b.gguf")),
        ("owner/name/b.gguf", None),
        ("hf://owner/name/b.bin", None),
        ("name", None),
        ("owner/name:", None),
        ("owner/name:a/b", None),
    ],
)
def test_names_of_the_hub(model: str, expected: HubName | None) -> None:
    assert HubName.parse(model) == expected


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Files that were looked up in a stand-in for a repository with `FILES`."""
    found: list[str] = []

    def cached(repository: str, file: str) -> str:
        found.append(file)
        return str(tmp_path / file)

    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, name: list(FILES))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    return found


@pytest.mark.parametrize(
    ("quantization", "files"),
    [
        ("Q4_K_M", ["big-Q4_K_M.gguf"]),
        ("q4_k_s", ["big-Q4_K_S.gguf"]),
        ("UD-Q4_K_XL", ["big-UD-Q4_K_XL.gguf"]),
        ("BF16", ["big.bf16.gguf"]),
        ("Q8_0", PARTS),
    ],
)
def test_a_quantization_is_a_file_or_its_parts(
    asked: list[str], tmp_path: Path, quantization: str, files: list[str]
) -> None:
    name = HubName("owner/name", quantization)
    assert fetch("x", name, []) == tmp_path / files[0]
    assert asked == files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (HubName("owner/name", "Q4_K"), "no .gguf file of Q4_K; it has: Q4_K_M, Q4_K_S, Q8_0, UD-"),
        (HubName("owner/name", "F16"), "no .gguf file of F16"),
        (HubName("owner/name"), "files of several kinds; name one, as owner/name:KIND: Q4_K_M, "),
        (HubName("owner/name", file="../../b.gguf"), "is not a file name"),
    ],
)
def test_what_no_file_is_meant_by_is_refused_in_one_line(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, name: HubName, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ModelLoadError, match=message) as caught:
        fetch("x", name, [])
    assert "\n" not in str(caught.value)
    assert not asked
