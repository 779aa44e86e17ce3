"""Unit tests of Registry: lazy, ordered, and one clear line for a wrong name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.api.errors import ConfigError, InvalidRequestError
from baton.cli.admin.app import COMMANDS as ADMIN_COMMANDS
from baton.cli.app import COMMANDS
from baton.registry import Registry
from router.policies import POLICIES


def test_load_returns_the_very_object_that_the_string_names() -> None:
    registry: Registry[object] = Registry(
        "thing", {"error": "baton.api.errors:InvalidRequestError"}
    )
    assert registry.load("error") is InvalidRequestError


def test_names_keep_the_order_in_which_they_were_written() -> None:
    registry: Registry[object] = Registry("thing", {"b": "m:x", "a": "m:y", "c": "m:z"})
    assert registry.names() == ["b", "a", "c"]


def test_an_unknown_name_is_refused_with_the_kind_and_all_names() -> None:
    registry: Registry[object] = Registry("thing", {"b": "m:x", "a": "m:y"})
    with pytest.raises(ConfigError, match=r"^unknown thing 'q'; known: b, a$"):
        registry.load("q")


def test_changing_the_given_table_later_changes_nothing() -> None:
    entries = {"a": "m:x"}
    registry: Registry[object] = Registry("thing", entries)
    entries["b"] = "m:y"
    assert registry.names() == ["a"]


@pytest.mark.parametrize(
    "registry", [COMMANDS, ADMIN_COMMANDS, POLICIES], ids=["commands", "admin", "policies"]
)
def test_every_torch_free_entry_can_be_loaded(registry: Registry[object]) -> None:
    assert registry.names()
    for name in registry.names():
        assert registry.load(name) is not None


@pytest.mark.medium
def test_nothing_is_imported_before_it_is_chosen() -> None:
    code = "import sys, router.policies; print([m for m in sys.modules if m.startswith('router.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "router.policies" in done.stdout
    for name in POLICIES.names():
        assert f"router.policies.{name}" not in done.stdout
