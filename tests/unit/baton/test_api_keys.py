"""Unit tests of API keys at rest: what a file may say, what each key allows, old files."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.access.api_keys import (
    KEY_PREFIX,
    convert_lines,
    digest_of,
    draw_key,
    entry_text,
    is_expired,
    parse_keys,
    read_keys,
)
from baton.access.identity import Limits, Role
from baton.api.errors import ConfigError
from baton.cli.keys import app

DIGEST = digest_of("k").hex()
BEGINNING = f'[[key]]\nname = "alice"\nsha256 = "{DIGEST}"\n'


def test_a_table_says_all_of_a_key() -> None:
    text = BEGINNING + (
        'tenant = "search"\nroles = ["infer", "look"]\nexpires = 2027-01-01\n'
        'models = ["a", "b"]\n[key.limits]\nrequests_per_minute = 60\nmost_urgent_priority = -1\n'
    )
    [key] = parse_keys(text)
    assert key.digest == digest_of("k")
    assert (key.principal.name, key.principal.tenant) == ("alice", "search")
    assert key.principal.roles == {Role.INFER, Role.LOOK}
    assert key.principal.models == {"a", "b"}
    assert key.principal.limits == Limits(requests_per_minute=60, most_urgent_priority=-1)
    assert key.expires_at == datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC).timestamp()


def test_what_is_not_said_is_a_client_of_its_own_that_may_infer() -> None:
    [key] = parse_keys(BEGINNING)
    assert key.principal.tenant == "alice"
    assert key.principal.roles == {Role.INFER}
    assert (key.principal.models, key.principal.limits) == (frozenset(), Limits())
    assert key.expires_at == math.inf
    assert not is_expired(key)


def test_one_name_may_have_several_keys() -> None:
    keys = parse_keys(entry_text("old", "alice") + entry_text("new", "alice"))
    assert [key.principal.name for key in keys] == ["alice", "alice"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no [[key]]; nobody could call"),
        ("[[key]\n", "is not TOML"),
        ('[[keys]]\nname = "a"', "keys: is not a known field"),
        ('[[key]]\nname = "a"', "key[0].sha256: is needed"),
        (BEGINNING + "role = 'look'", "key[0].role: is not a known field"),
        ('[[key]]\nname = "a b"\nsha256 = "x"', "name: must be 1 to 64 letters"),
        ('[[key]]\nname = "--admin-token"\nsha256 = "x"', "and begin with a letter or digit"),
        ('[[key]]\nname = "a"\nsha256 = "secret-1"', "sha256: must be 64 hex digits"),
        (BEGINNING + 'roles = ["admin"]', "roles: must be among infer, look, operate, join, got"),
        (BEGINNING + "roles = []", "roles: must be at least one of infer"),
        (BEGINNING + "expires = 2027-01-01T00:00:00", "expires: must be a day such as"),
        (BEGINNING + 'expires = "soon"', "both without quotes, got soon"),
        (BEGINNING + "limits = { speed = 1 }", "limits: must be among max_open_requests,"),
        (BEGINNING + "limits = { weight = 0 }", "limits: weight: must be above 0, got 0"),
        (BEGINNING + "limits = { max_open_requests = 1.5 }", "must be a whole number, got 1.5"),
        (BEGINNING + "limits = { tokens_per_minute = -1 }", "must be 0 or more, got -1"),
        (BEGINNING + "limits = { tokens_per_minute = inf }", "must be a number, got inf"),
        (BEGINNING + BEGINNING.replace("alice", "bob"), "of 'alice' and 'bob'"),
        ("# Who may call.\nalice:secret-1", "has lines of name:key"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_field_and_tells_no_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    line = str(caught.value)
    assert line.startswith(f"api_keys_file: {path}: ")
    assert problem in line
    assert "\n" not in line
    assert "secret" not in line


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^api_keys_file: cannot read"):
        read_keys(tmp_path / "nothing")


def test_old_lines_are_converted_and_keys_that_could_be_guessed_are_named() -> None:
    long = "x" * 40
    text, short = convert_lines(f"# Who may call.\n\nalice:{long}\nbob:  with:colon\n")
    keys = parse_keys(text)
    assert [(key.principal.name, key.digest) for key in keys] == [
        ("alice", digest_of(long)),
        ("bob", digest_of("with:colon")),
    ]
    assert short == ["bob"]
    with pytest.raises(ConfigError, match=r"^line 1: must be name:key$"):
        convert_lines("secret")


def test_keys_have_256_random_bits_and_are_never_the_same() -> None:
    keys = {draw_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) == len(KEY_PREFIX) + 43 for key in keys)


# ---------------------------------------------------------------- baton keys


def test_new_prints_the_key_once_and_an_entry_without_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "alice", "--role", "look", "--expires", "30d"])
    key, _, entry = result.stdout.partition("\n")
    assert result.exit_code == 0
    assert key not in entry
    [found] = parse_keys(entry)
    assert found.digest == digest_of(key)
    assert found.principal.roles == {Role.LOOK}
    assert found.expires_at - datetime.datetime.now(datetime.UTC).timestamp() > 29 * 86400


def test_new_appends_and_check_shows_who_may_do_what(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for name, expires in (("alice", "2020-01-01"), ("bob", "")):
        arguments = ["new", name, "--tenant", "search", "--file", str(path), "--expires", expires]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert digest_of(result.stdout.strip()) in {key.digest for key in read_keys(path)}
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 0
    assert "alice" in result.stdout
    assert "2020-01-01 00:00 EXPIRED" in result.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["new", "a b"], "error: key 1 ('a b'): name: must be 1 to 64 letters"),
        (["new", "a", "--role", "root"], "roles: must be among infer"),
        (["new", "a", "--expires", "soon"], "error: --expires: must be like 2027-01-31 or 90d"),
        (["check", "/nothing"], "error: api_keys_file: cannot read /nothing"),
        (["convert", "/nothing"], "error: cannot read /nothing"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
