"""Settings: the options that tuning searches, the values that it tries, and their file.

A choice maps names of settings to values; a setting that a choice lacks has its default. A choice
is written as a configuration file, which `baton up` and each program read with `--config`.
Refuses to know: measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.api.errors import ConfigError
from loadtest.load.shapes import Deployment

Value = str | int | bool
Choice = Mapping[str, Value]
SHAPE = "shape"
THREADS = "num_threads"
_OF_UP = (SHAPE, THREADS)  # `baton up` decides these settings, so tables of nodes cannot have them


@dataclass(frozen=True, slots=True)
class Setting:
    """An option and the values to try besides its default, in the order in which they are tried.

    Attributes:
        name: name of the option in a configuration file; `SHAPE` stands for the numbers of nodes.
    """

    name: str
    values: tuple[Value, ...]


def known_settings(num_cores: int) -> dict[str, Setting]:
    """Return all settings by name, for a machine with ``num_cores`` cores for nodes.

    Settings that change a deployment most come first, because later ones are tried on top of them.
    """
    shapes = ["colocated:1", "colocated:2", "2:1+local", "1:2+local"]
    fitting = [one for one in shapes if _num_nodes(one) <= num_cores]
    threads = sorted({1, max(num_cores // 2, 1), num_cores})
    found = (
        Setting(SHAPE, tuple(fitting)),
        Setting(THREADS, tuple(threads)),
        Setting("prefill_tokens_beside_decodes", (32, 128, 256)),
        Setting("max_num_batched_tokens", (256, 512, 2048)),
        Setting("long_prefill_token_threshold", (128, 256, 1024)),
        Setting("max_num_requests", (8, 16, 32)),
        Setting("speculative_method", ("ngram",)),
        Setting("local_prefill", (False,)),
    )
    return {one.name: one for one in found}


def chosen_settings(text: str, num_cores: int) -> tuple[Setting, ...]:
    """Return the settings that ``text`` lists, separated by commas; empty: all.

    Raises ConfigError for unknown names.
    """
    known = known_settings(num_cores)
    names = [name for name in text.split(",") if name] or list(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"settings: must be of {', '.join(known)}, got {name!r:.100}")
    return tuple(known[name] for name in dict.fromkeys(names))


def deployment_of(choice: Choice) -> Deployment | None:
    """Return the numbers of nodes in a choice; None stands for the defaults of `baton up`."""
    return Deployment.parse(str(choice[SHAPE])) if SHAPE in choice else None


def node_args_of(choice: Choice) -> tuple[str, ...]:
    """Return the arguments of nodes for settings that `baton up` gives nodes on its own."""
    return ("--num-threads", str(choice[THREADS])) if THREADS in choice else ()


def config_text(
    choice: Choice,
    comments: Sequence[str] = (),
    node_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
) -> str:
    """Return a choice as the text of a configuration file.

    Args:
        node_args: arguments that the user gave the nodes of all trials.
        router_args: arguments that the user gave the router of all trials.
    """
    given = {"node_args": [*node_args, *node_args_of(choice)], "router_args": [*router_args]}
    lines = [f"# {one}" for one in comments]
    for name, value in choice.items():
        if name not in _OF_UP:
            lines.append(f"{name} = {json.dumps(value)}")
    if any(name in choice for name in _OF_UP) or any(given.values()):
        lines += ["", "[up]"]
    shape = deployment_of(choice)
    if shape is not None:
        lines += [f"prefill = {shape.num_prefill}", f"decode = {shape.num_decode}"]
    lines += [f"{name} = {json.dumps(' '.join(words))}" for name, words in given.items() if words]
    return "\n".join(lines) + "\n"


def described(choice: Choice) -> str:
    """Return a choice in words, such as ``num_threads = 2``; "the defaults" if it is empty."""
    return ", ".join(f"{name} = {json.dumps(choice[name])}" for name in choice) or "the defaults"


def _num_nodes(shape: str) -> int:
    deployment = Deployment.parse(shape)
    return deployment.num_prefill + deployment.num_decode
