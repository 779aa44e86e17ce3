"""Where adapters are found: paths, installed packages, the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.adapters.digest import AdapterError
from baton.adapters.files import open_adapter
from baton.adapters.sources import locate_adapter
from tests.fakes.adapter_files import pair, write_adapter


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "team" / "one", pair())
    monkeypatch.chdir(tmp_path)
    assert locate_adapter("team/one").resolve() == folder
    assert locate_adapter(folder) == folder
    assert locate_adapter(tmp_path / "missing") == tmp_path / "missing"  # `open_adapter` refuses


def install(site: Path, name: str, files: Sequence[str]) -> None:
    """Make a package as pip leaves it behind."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_an_installed_package_with_one_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_adapter(tmp_path / "habit_adapter" / "files", pair())
    names = [f"habit_adapter/files/{path.name}" for path in folder.iterdir()]
    install(tmp_path, "habit-adapter", names)
    found = locate_adapter("habit-adapter")
    assert found == folder
    assert open_adapter(found).modules
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "other.gguf").touch()
    install(tmp_path, "two-adapters", [*names, "two/other.gguf"])
    with pytest.raises(AdapterError, match=r"package two-adapters: has 2 adapters \(files, other"):
        locate_adapter("two-adapters")
    install(tmp_path, "no-adapter", ["no/README"])
    with pytest.raises(AdapterError, match="no installed package"):
        locate_adapter("no-adapter")


def test_an_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "snapshot", pair())
    asked: list[tuple[str, list[str]]] = []

    def fetch(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(folder)

    files = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, repository: files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    for source in ("team/habit", "hf://team/habit"):
        assert locate_adapter(source) == folder
    assert asked == [("team/habit", ["adapter_config.json", "adapter_model.safetensors"])] * 2


def test_what_is_nowhere_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for source, expected in (
        ("habit-that-nobody-has", "no such folder or file, and no installed package"),
        ("./team/one", "no such folder or file"),
        ("/a/b/c", "no such folder or file"),
        ("a\0b", "no such folder or file|is no usable path"),
        ("~nobody-at-all/one", "no such folder or file|is no usable path"),
    ):
        with pytest.raises(AdapterError, match=expected) as caught:
            locate_adapter(source)
        assert "\n" not in str(caught.value)
