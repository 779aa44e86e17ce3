"""Unit tests of plug-ins: permission, the time of import, and the cost of a broken one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton import plugins
from baton.api.errors import ConfigError
from baton.registry import Registry

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package with one plug-in into a folder of packages."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(package: str, name: str, content: str, group: str = "baton.policies") -> None:
        module = package.replace("-", "_").lower()
        (tmp_path / f"{module}.py").write_text(content)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:found\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


@pytest.fixture
def registry() -> Registry[object]:
    plugins._allowed.cache_clear()
    entries = {"own": "baton.version:__version__"}
    return Registry("routing policy", entries, plugin_group="baton.policies")


def test_nothing_is_found_or_imported_unless_it_is_allowed(
    install: Install, registry: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("Some-Package", "mine", "raise SystemExit('imported')")
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    assert registry.names() == ["own"]
    with pytest.raises(ConfigError, match=r"unknown routing policy 'mine'; known: own$"):
        registry.load("mine")
    assert [one.name for one in plugins.installed() if one.package == "some-package"] == ["mine"]


@pytest.mark.parametrize("allowed", ["all", "some_package", "other, Some.Package"])
def test_an_allowed_package_adds_its_names_and_is_imported_when_used(
    allowed: str,
    install: Install,
    registry: Registry[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("Some-Package", "mine", "found = 42")
    monkeypatch.setenv(plugins.VARIABLE, allowed)
    assert registry.names() == ["own", "mine"]
    assert "some_package" not in sys.modules
    assert registry.load("mine") == 42
    assert registry.load_all()["mine"] == 42


def test_a_broken_one_is_one_line_where_all_are_read_and_an_error_where_it_is_named(
    install: Install,
    registry: Registry[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install("broken", "mine", "raise RuntimeError('no\\nsuch chip')")
    monkeypatch.setenv(plugins.VARIABLE, "all")
    line = (
        "routing policy 'mine': the plug-in broken 1.0 cannot be imported: "
        "RuntimeError: no such chip"
    )
    with caplog.at_level(logging.WARNING):
        assert list(registry.load_all()) == ["own"]
    assert [record.getMessage() for record in caplog.records] == [line]
    with pytest.raises(ConfigError) as raised:
        registry.load("mine")
    assert str(raised.value) == line


def test_of_equal_names_ours_and_then_the_first_packages_count(
    install: Install,
    registry: Registry[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install("b-package", "mine", "found = 'b'")
    install("a-package", "mine", "found = 'a'")
    install("c-package", "own", "found = 'c'")
    monkeypatch.setenv(plugins.VARIABLE, "all")
    with caplog.at_level(logging.WARNING):
        assert registry.load("mine") == "a"
    assert "'mine' of b-package is left out: a-package has one" in caplog.text
    assert registry.load("own") != "c"


def test_a_named_package_without_plug_ins_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "no-such-package")
    assert plugins.missing_packages() == ["no-such-package"]
