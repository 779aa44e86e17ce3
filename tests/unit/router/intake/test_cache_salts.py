"""Unit tests of cache salts: which clients share a salt, and that no other client can learn it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import ConfigError
from router.calls.call import Terms
from router.intake.cache_salts import CacheSalts, read_secret
from router.policies.least_tokens import LeastTokens
from tests.fakes.router.intakes import make_intake
from tests.fakes.router.nodes import make_pool
from tests.fakes.router.router_scene import PARAMS, RecordingDispatcher, asynchronous

SECRET = b"sixteen bytes or more"


def member(tenant: str, name: str = "key", group: str = "") -> Principal:
    return Principal(name=name, tenant=tenant, cache_group=group)


def test_where_there_are_no_tenants_there_is_no_salt() -> None:
    assert CacheSalts(SECRET).of(ANYBODY) == b""


def test_a_salt_is_that_of_the_tenant_whatever_its_key_and_of_nobody_else() -> None:
    salts = CacheSalts(SECRET)
    assert salts.of(member("a", "one key")) == salts.of(member("a", "another"))
    # A group is no tenant of that name, and a tenant in a group has the group's only.
    everybody = [member("a"), member("b"), member("ab"), member("c", group="a")]
    assert len({salts.of(one) for one in everybody}) == len(everybody)
    assert salts.of(member("c", group="a")) == salts.of(member("d", group="a"))


def test_routers_with_one_secret_agree_and_others_do_not() -> None:
    here, there = CacheSalts(SECRET), CacheSalts(SECRET)
    assert here.of(member("a")) == there.of(member("a"))
    drawn = {CacheSalts().of(member("a")) for _ in range(3)}
    assert len(drawn | {here.of(member("a"))}) == 4


def test_the_salt_is_the_one_that_was_agreed_on() -> None:
    """Routers of different versions must agree on it, or a fleet loses its cache in an update."""
    expected = "200bd19f6ec4f3301cafc3f57b99824f0d7d6d98e11f977aa0dfc77abb5fcb47"
    assert CacheSalts(SECRET).of(member("alice")).hex() == expected


def test_a_secret_comes_from_a_file_and_one_that_can_be_guessed_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  " + SECRET + b"\n")
    assert read_secret(str(path)) == SECRET
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match=r"^cache_salt_secret_file: .* 16 bytes or more, got 5$"):
        read_secret(str(path))
    with pytest.raises(ConfigError, match=r"^cache_salt_secret_file: cannot read"):
        read_secret(str(tmp_path / "nothing"))


@asynchronous
async def test_a_call_carries_the_salt_of_its_tenant_and_shows_it_to_nobody() -> None:
    dispatcher = RecordingDispatcher(make_pool(), LeastTokens())
    salts = CacheSalts(SECRET)
    intake = make_intake(dispatcher, None, vocab_size=10, default_timeout_s=60.0, cache_salts=salts)
    terms = Terms(received_at=0.0, principal=member("a"))
    call = await intake.accept([1, 2, 3], PARAMS, terms)
    assert call.cache_salt == salts.of(member("a"))
    assert "salt" not in repr(call)
    of_anybody = await intake.accept([1, 2, 3], PARAMS, Terms(received_at=0.0))
    assert of_anybody.cache_salt == b""
