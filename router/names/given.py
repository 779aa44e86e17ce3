"""Reads the served names from a router's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
    """Return what each name in the options stands for; names of the first base model come first.

    Args:
        names: names of the base model; with several base models, ``NAME=MODEL``. A base model
            without a name is served under its text in ``--model``.
        aliases: further names in the same form, divided by commas.
        defaults: request defaults; see `read_defaults`.

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
    """Return what the names of adapters in the options stand for.

    Args:
        served: the base models' own names.
        root: folder below which adapters' folders must lie.
        adapters: ``NAME=SOURCE`` or ``NAME=SOURCE=MODEL``. MODEL is a name of a base model, or its
            text in ``--model``; the adapter's name gets the request defaults of that name, or of
            the base model's first name.

    Reads all files of the adapters. Raises ConfigError naming the option.
    """
    parents = {one.base.model: one for one in reversed(served)} | {one.name: one for one in served}
    found: dict[str, ServedName] = {}
    for entry in adapters:
        name, source, parent = _divide_adapter(entry, parents, served[0])
        if name in found or any(one.name == name for one in served):
            raise ConfigError(f"adapter: {name!r:.200} is the name of two things")
        digest = read_digest(root, source)
        found[name] = dataclasses.replace(parent, name=name, adapter=digest, adapter_source=source)
    return list(found.values())


def _divide_adapter(
    entry: str, parents: Mapping[str, ServedName], first: ServedName
) -> tuple[str, str, ServedName]:
    """Return the name, the source and the base model's name that an adapter's option gives.

    Args:
        parents: names of base models, by the texts that may stand for them; these texts may contain
            equal signs.
        first: the base model's name if the option gives none and there is only one base model.
    """
    name, _, rest = entry.partition("=")
    for model in sorted(parents, key=len, reverse=True):
        source = rest.removesuffix(f"={model}")
        if name and source not in ("", rest):
            return name, source, parents[model]
    if len({one.base.model for one in parents.values()}) > 1:
        known = ", ".join(parents)
        raise ConfigError(
            "adapter: with several models, must be NAME=SOURCE=MODEL with a MODEL of "
            f"{known:.200}, got {entry!r:.200}"
        )
    if not (name and rest):
        raise ConfigError(f"adapter: must be NAME=SOURCE, got {entry!r:.200}")
    return name, rest, first


def read_digest(root: str, source: str) -> AdapterDigest:
    """Compute the digest of an adapter from its files; raises ConfigError.

    Args:
        root: ``--adapter-root``; empty: folders are not allowed.
        source: the adapter's folder, package or hub id; see `find_named`.
    """
    try:
        return adapter_digest(find_named(Path(root) if root else None, source))
    except AdapterError as error:
        raise ConfigError(str(error)) from None


def _of_one(base: BaseModel, names: Sequence[str], aliases: str) -> dict[str, BaseModel]:
    first, *others = [one for one in names if one] or [base.model]
    return dict.fromkeys([first, *others, *read_names(first, aliases)], base)


def _of_several(bases: Sequence[BaseModel], entries: Sequence[str]) -> dict[str, BaseModel]:
    """Return the base model of each served name, in the order of the base models."""
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
    """Divide ``NAME=MODEL`` into the name and the base model; both may contain equal signs."""
    for base in bases:
        name = entry.removesuffix(f"={base.model}")
        if name not in ("", entry):
            return name, base
    models = ", ".join(base.model for base in bases)
    raise ConfigError(
        f"served_model_name: with several models, must be NAME=MODEL with a MODEL of {models}, "
        f"got {entry!r:.200}"
    )
