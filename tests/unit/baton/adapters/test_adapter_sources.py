"""Where adapters are found: paths, installed packages, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.adapters.digest import AdapterError
from baton.adapters.files import open_adapter
from baton.adapters.sources import find_named, locate_adapter
from tests.fakes.adapter_files import cache, install, pair, write_adapter


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "team" / "one", pair())
    monkeypatch.chdir(tmp_path)
    assert locate_adapter("team/one").resolve() == folder
    assert locate_adapter(folder) == folder
    assert locate_adapter(tmp_path / "missing") == tmp_path / "missing"  # `open_adapter` refuses


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


def test_operators_name_folders_below_a_root_packages_and_cached_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, site = tmp_path / "hub", tmp_path / "site"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(site)

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuse)
    packaged = write_adapter(site / "habit_adapter", pair())
    install(site, "habit-adapter", [f"habit_adapter/{one.name}" for one in packaged.iterdir()])
    cached = write_adapter(cache(hub, "team/habit"), pair())
    gguf = cache(hub, "team/ggufs") / "sub" / "a.gguf"
    gguf.parent.mkdir()
    gguf.touch()
    root = tmp_path / "root"
    below = write_adapter(root / "team" / "one", pair())
    outside = write_adapter(tmp_path / "outside", pair())
    (root / "link").symlink_to(outside)
    for source, found in (
        ("habit-adapter", packaged),
        ("team/habit", cached),
        ("hf://team/habit", cached),
        ("team/ggufs", gguf),
        ("hf://team/ggufs/sub/a.gguf", gguf),
    ):
        assert find_named(root, source) == find_named(None, source) == found
    assert find_named(root, "team/one") == below
    write_adapter(root / "team" / "habit", pair())
    assert find_named(root, "team/habit") == root / "team" / "habit", "folders come first"
    for at, source, expected in (
        (None, "team/one", "the hub's cache of this machine does not have it; fetch it with"),
        (root, "team/two", "no such folder, and the hub's cache of this machine does not have it"),
        (None, str(outside), "no such folder or file here, as there is no --adapter-root"),
        (None, "../outside", "no such folder or file here"),
        (None, "team/..", "no such folder or file here"),
        (None, "~/outside", "no such folder or file here"),
        (None, "a\nb", "no such folder or file here"),
        (None, "", "no such folder or file here"),
        (root, "", "must be a path below the adapters' folder"),
        (root, "nothing", "no such folder or file below --adapter-root, and no installed package"),
        (root, str(outside), "must be a path below the adapters' folder"),
        (root, "../outside", "must be a path below the adapters' folder"),
        (root, "link", "leads out of the adapters' folder"),
        (root, "hf://../../outside/x.gguf", "no such folder or file below --adapter-root"),
        (root, "hf://team/ggufs/../a.gguf", "is not a file name"),
        (root, "hf://team/ggufs/b.gguf", "the hub's cache of this machine does not have it"),
    ):
        with pytest.raises(AdapterError, match=expected) as caught:
            find_named(at, source)
        assert "\n" not in str(caught.value)
