"""Read the served names from a router's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from baton.adapters.digest import AdapterDigest, AdapterError
from baton.adapters.files import adapter_digest
from baton.adapters.sources import find_named
from baton.api.errors import ConfigError
from router.names.base_model import BaseModel
from router.names.defaults import read_defaults, read_names
from router.names.served_name import ServedName


def names_given(
    bases: Sequence[BaseModel], names: Sequence[str], aliases: str, defaults: str
) -> list[ServedName]:
    """Return the served names; names of the first base model come first.

    Args:
        names: with one base model its names, with several ``NAME=MODEL``. A base model without a
            name is served under its text in ``--model``.
        aliases: more names in the same form, divided by commas.
        defaults: see `read_defaults`.

    Raises ConfigError naming the option.
    """
    found = _of_one(bases[0], names, aliases) if len(bases) == 1 else {}
    if len(bases) > 1:
        found = _of_several(bases, [*names, *read_names("", aliases)])
    by_name = read_defaults(tuple(found), defaults)
    return [
        ServedName(name=name, base=base, defaults=by_name[name]) for name, base in found.items()
    ]


def adapters_given(
    served: Sequence[ServedName], root: str, adapters: Sequence[str]
) -> list[ServedName]:
    """Return the names that ``NAME=SOURCE`` give to adapters of the only base model.

    Args:
        served: the base model's own names; those of adapters have the same defaults as the first.
        root: folder below which adapters' folders must lie; reads all of their files.

    Raises ConfigError naming the option.
    """
    found: dict[str, ServedName] = {}
    for entry in adapters:
        name, _, source = entry.partition("=")
        if not (name and source):
            raise ConfigError(f"adapter: must be NAME=SOURCE, got {entry!r:.200}")
        if len({one.base.model for one in served}) > 1:
            raise ConfigError("adapter: with several models, name adapters in --names-file")
        if name in found or any(one.name == name for one in served):
            raise ConfigError(f"adapter: {name!r:.200} is the name of two things")
        digest = read_digest(root, source)
        found[name] = dataclasses.replace(
            served[0], name=name, adapter=digest, adapter_source=source
        )
    return list(found.values())


def read_digest(root: str, source: str) -> AdapterDigest:
    """Return the digest of an adapter from its files; raises ConfigError.

    Args:
        root: ``--adapter-root``; empty: there are no folders.
        source: see `find_named`.
    """
    try:
        return adapter_digest(find_named(Path(root) if root else None, source))
    except AdapterError as error:
        raise ConfigError(str(error)) from None


def _of_one(base: BaseModel, names: Sequence[str], aliases: str) -> dict[str, BaseModel]:
    first, *others = [one for one in names if one] or [base.model]
    return dict.fromkeys([first, *others, *read_names(first, aliases)], base)


def _of_several(bases: Sequence[BaseModel], entries: Sequence[str]) -> dict[str, BaseModel]:
    """Return base models by served name, in the order of the base models."""
    found: dict[str, BaseModel] = {}
    for entry in filter(None, entries):
        name, base = _divide(entry, bases)
        if found.setdefault(name, base) is not base:
            raise ConfigError(f"served_model_name: {name!r} must be of one model, got two")
    named = list(found.values())
    for base in bases:
        if base not in named and found.setdefault(base.model, base) is not base:
            raise ConfigError(
                f"served_model_name: {base.model!r} is a model, and must not name another"
            )
    return {name: base for one in bases for name, base in found.items() if base is one}


def _divide(entry: str, bases: Sequence[BaseModel]) -> tuple[str, BaseModel]:
    """Return name and base model of ``NAME=MODEL``; both may contain equal signs."""
    for base in bases:
        name = entry.removesuffix(f"={base.model}")
        if name not in ("", entry):
            return name, base
    models = ", ".join(base.model for base in bases)
    raise ConfigError(
        f"served_model_name: with several models, must be NAME=MODEL with a MODEL of {models}, "
        f"got {entry!r:.200}"
    )
