"""API keys: read a file of keys, which says who may call and what each key allows.

    [[key]]
    name = "alice"
    sha256 = "5e884898da28..."
    tenant = "search"                      # default: the name
    cache_group = "ours"                   # tenants that share cached prompts; default: none
    roles = ["infer"]                      # infer, look, operate, join; default: infer
    expires = 2027-01-01                   # start of a day (UTC), or a time with an offset
    models = ["llama-3.1-8b"]              # served names; default: all
    limits = { requests_per_minute = 60 }  # fields of `Limits`

A key has 256 random bits, so its plain SHA-256 can be stored. Salts and slow hashes are for
passwords that people choose, and a slow hash would delay each request.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from baton.access.identity import Limits, Principal, Role
from baton.api.bounded_files import parse_toml, read_text
from baton.api.errors import ConfigError, reason_of
from baton.wrong_values import field_and_problem

KEY_PREFIX = "baton_"  # prefix by which secret scanners recognize a key
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_OLD_LINE = re.compile(r"[^\s=:\[\]#]+\s*:\s*\S+")
SHORT_KEY_CHARS = 20  # shorter keys could be found by trying words


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An entry of a key file: the key's digest, and who its holder is.

    Attributes:
        digest: SHA-256 of the key.
        principal: principal of calls with the key.
        expires_at: time of expiry, by `time.time`; infinite: the key never expires.
    """

    digest: bytes = field(repr=False)
    principal: Principal
    expires_at: float = math.inf


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One table ``[[key]]`` of the file, before its values are checked."""

    name: str
    sha256: str
    tenant: str = ""
    cache_group: str = ""
    roles: list[str] = msgspec.field(default_factory=lambda: ["infer"])
    expires: Any = None
    models: list[str] = []
    limits: dict[str, Any] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[_Entry] = []


def digest_of(key: str) -> bytes:
    """Return the digest that a key file stores for a key, which may be any text."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def draw_key() -> str:
    """Make a new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read all keys of a file; raises ConfigError with a text that does not show any key."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        remedy = f"; baton keys new NAME --file {path} makes it" if is_missing else ""
        why = reason_of(error)
        raise ConfigError(f"api_keys_file: cannot read {path} ({why}){remedy}") from error
    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"api_keys_file: {path}: {error}") from None


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Parse the text of a key file; raises ConfigError."""
    _refuse_old_lines(text)
    try:
        parsed = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"is not TOML: {error}") from None
    try:
        entries = msgspec.convert(parsed, _File, str_keys=True).key
    except msgspec.ValidationError as error:
        field, problem = field_and_problem(error, _File)
        raise ConfigError(f"{field}: {problem}" if field else problem) from None
    if not entries:
        raise ConfigError("has no [[key]]; nobody could call")
    keys = tuple(_check(f"key {number} ({entry.name!r})", entry)
                 for number, entry in enumerate(entries, 1))  # fmt: skip
    seen: dict[bytes, str] = {}
    for key in keys:
        if key.digest in seen:
            raise ConfigError(f"the sha256 of {seen[key.digest]!r} and "
                              f"{key.principal.name!r} is the same")  # fmt: skip
        seen[key.digest] = key.principal.name
    return keys


def _refuse_old_lines(text: str) -> None:
    """Raise ConfigError for a file of ``name:key`` lines, and say how to convert it."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if _OLD_LINE.fullmatch(first):
        raise ConfigError(
            "has lines of name:key, which hold keys in the clear; make a new file from it with: "
            "baton keys convert OLD > NEW"
        )


def _check(where: str, entry: _Entry) -> ApiKey:
    """Check one table of the file and return its key; raises ConfigError."""
    group = entry.cache_group or entry.name
    names = {"name": entry.name, "tenant": entry.tenant or entry.name, "cache_group": group}
    for name, value in names.items():
        if not _NAME.fullmatch(value):
            raise ConfigError(
                f"{where}: {name}: must be 1 to 64 letters, digits, '.', '_', '@' or '-', and "
                f"begin with a letter or digit, got {value[:80]!a}"
            )
    if not re.fullmatch(r"[0-9a-fA-F]{64}", entry.sha256):
        # The value is not shown, because it may be the key itself.
        raise ConfigError(f"{where}: sha256: must be 64 hex digits")
    principal = Principal(
        name=entry.name,
        tenant=entry.tenant or entry.name,
        cache_group=entry.cache_group,
        roles=_roles(where, entry.roles),
        models=frozenset(entry.models),
        limits=_limits(where, entry.limits),
    )
    digest = bytes.fromhex(entry.sha256)
    return ApiKey(digest=digest, principal=principal, expires_at=_expiry(where, entry.expires))


def _roles(where: str, names: Sequence[str]) -> frozenset[Role]:
    known = [role.value for role in Role]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{where}: roles: must be among {', '.join(known)}, got {name[:80]!a}"
            )
    if not names:
        raise ConfigError(f"{where}: roles: must be at least one of {', '.join(known)}")
    return frozenset(map(Role, names))


def _limits(where: str, given: dict[str, Any]) -> Limits:
    known = {one.name: one.default for one in fields(Limits)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"{where}: limits: must be among {', '.join(known)}, got {name[:80]!a}"
            )
        is_whole = name in ("max_open_requests", "most_urgent_priority")
        number = isinstance(value, int if is_whole else int | float) and value is not True
        if not number or isinstance(value, bool) or not math.isfinite(value):
            kind = "a whole number" if is_whole else "a number"
            raise ConfigError(f"{where}: limits: {name}: must be {kind}, got {value!a:.80}")
        if name == "weight" and not value > 0:
            raise ConfigError(f"{where}: limits: weight: must be above 0, got {value}")
        if name != "most_urgent_priority" and value < 0:
            raise ConfigError(f"{where}: limits: {name}: must be 0 or more, got {value}")
    return Limits(**given)


def _expiry(where: str, when: Any) -> float:
    """Return the time of expiry in seconds since the epoch.

    A day without a time means the beginning of this day in UTC.
    """
    if when is None:
        return math.inf
    if isinstance(when, datetime.date) and not isinstance(when, datetime.datetime):
        when = datetime.datetime(when.year, when.month, when.day, tzinfo=datetime.UTC)
    if not isinstance(when, datetime.datetime) or when.tzinfo is None:
        raise ConfigError(
            f"{where}: expires: must be a day such as 2027-01-31, or a time with an offset such as "
            f"2027-01-31T12:00:00Z, both without quotes, got {when!s:.80}"
        )
    return when.timestamp()


# ------------------------------------------------------------------ writing


def entry_text(
    key: str,
    name: str,
    *,
    tenant: str = "",
    roles: Iterable[str] = ("infer",),
    expires: str = "",
    models: Iterable[str] = (),
) -> str:
    """Return a key's table for a key file; raises ConfigError for invalid values."""
    lines = [
        "[[key]]",
        f"name = {_quoted(name)}",
        f'sha256 = "{digest_of(key).hex()}"',
    ]
    if tenant:
        lines.append(f"tenant = {_quoted(tenant)}")
    lines.append(f"roles = {_quoted(list(roles))}")
    if expires:
        lines.append(f"expires = {expires}")
    if list(models):
        lines.append(f"models = {_quoted(list(models))}")
    text = "\n".join(lines) + "\n"
    parse_keys(text)
    return text


def _quoted(value: str | list[str]) -> str:
    """Quote a string for TOML; JSON's quotes are valid TOML for names and digests."""
    return json.dumps(value, ensure_ascii=False)


def convert_lines(text: str) -> tuple[str, list[str]]:
    """Convert ``name:key`` lines to ``[[key]]`` tables.

    Returns the tables, and the names whose keys are too short to be safe. Raises ConfigError with a
    text that does not show any key.
    """
    tables, short = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        name, _, key = (part.strip() for part in line.partition(":"))
        if not name or not key:
            raise ConfigError(f"line {number}: must be name:key")
        tables.append(entry_text(key, name))
        if len(key) < SHORT_KEY_CHARS:
            short.append(name)
    return "\n".join(tables), short


def is_expired(key: ApiKey) -> bool:
    """Return whether a key has expired."""
    return key.expires_at <= time.time()
