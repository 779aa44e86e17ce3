"""AdapterConfig: the settings of a LoRA adapter, from PEFT's adapter_config.json.

A setting that changes results but that Baton does not support is refused by name. Names follow PEFT
(https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baton.adapters.digest import AdapterError
from baton.api.bounded_files import parse_object, read_file
from baton.api.errors import ModelLoadError

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
_MAX_CONFIG_BYTES = 2**20
MAX_ALPHA = 1e6
_MAX_PATTERNS = 10_000
_MAX_PATTERN_CHARS = 256
# PEFT reads the keys of patterns as regular expressions. Files are not trusted, and matching some
# expressions never ends. So only patterns without repetition and alternatives are allowed, which
# match a fixed number of letters.
_ANY_PREFIX = ".*\\."  # PEFT writes this prefix, which has no effect, before some keys
_LETTER = r"(?:[\w.-]|\\\.|\\d)"  # matches one letter
_PLAIN_PATTERN = re.compile(rf"\^?{_LETTER}+")
# Settings that are read, or that do not change what a trained adapter computes.
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config",
        "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
        "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
        "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
    }
)  # fmt: skip
# Values of `init_lora_weights` that leave the base model's weights unchanged.
_INITIAL_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The settings that decide what an adapter computes.

    Attributes:
        rank: rank of modules that no pattern of ``rank_pattern`` matches.
        alpha: numerator of the scale, for modules that no pattern of ``alpha_pattern`` matches.
        uses_rslora: whether the scale is ``alpha / sqrt(rank)`` instead of ``alpha / rank``.
        uses_dora: whether a magnitude per output replaces the norm of the adapted weight's rows.
        rank_pattern, alpha_pattern: pattern of module names -> rank or alpha.
        target_parameters: names of adapted parameters, or ends of their names.
    """

    rank: int
    alpha: float
    uses_rslora: bool = False
    uses_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()

    def targets_parameter(self, name: str) -> bool:
        """Return whether ``target_parameters`` has a parameter, with names compared as in PEFT."""
        return any(name == one or name.endswith(f".{one}") for one in self.target_parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the base model."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which a module's ``B @ A`` is multiplied."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name, as in PEFT."""
    for pattern, value in patterns.items():
        if _matches(pattern, module):
            return value
    return default


def _matches(pattern: str, module: str) -> bool:
    """Return whether ``(.*\\.)?(pattern)$`` matches a module's name.

    A pattern matches texts of one length only, so only the end of the name is compared.
    """
    compiled, num_letters, is_whole = _compiled(pattern)
    start = len(module) - num_letters
    if start < 0 or (start > 0 and (is_whole or module[start - 1] != ".")):
        return False
    return compiled.fullmatch(module, start) is not None


@functools.lru_cache(maxsize=2 * _MAX_PATTERNS)
def _compiled(pattern: str) -> tuple[re.Pattern[str], int, bool]:
    """Compile a pattern; return the result, its length, and whether it matches whole names only."""
    letters = pattern.removeprefix("^")
    return re.compile(letters), len(re.findall(_LETTER, letters)), letters != pattern


def read_config(folder: Path) -> AdapterConfig:
    """Read an adapter's settings; raises AdapterError naming the file and the field."""
    path = folder / CONFIG_FILE
    try:
        fields = parse_object(read_file(path, _MAX_CONFIG_BYTES))
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    except ValueError as error:
        raise AdapterError(f"{path}: {error}") from error
    reader = _Fields(path, fields)
    reader.refuse_unsupported()
    return AdapterConfig(
        rank=reader.rank("r", fields.get("r", 8)),
        alpha=reader.alpha("lora_alpha", fields.get("lora_alpha", 8)),
        uses_rslora=reader.flag("use_rslora"),
        uses_dora=reader.flag("use_dora"),
        rank_pattern=reader.patterns("rank_pattern", reader.rank),
        alpha_pattern=reader.patterns("alpha_pattern", reader.alpha),
        target_parameters=reader.names("target_parameters"),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checked access to the fields of an adapter_config.json."""

    path: Path
    values: Mapping[str, Any]

    def wrong(self, name: str, problem: str) -> AdapterError:
        return AdapterError(f"{self.path}: {name:.80}: {problem}")

    def refuse_unsupported(self) -> None:
        """Raise AdapterError for the first setting that Baton does not support."""
        kind = self.values.get("peft_type")
        if kind != "LORA":
            raise self.wrong("peft_type", f"only LORA is supported, got {_shown(kind)}")
        initial = self.values.get("init_lora_weights", True)
        if not any(initial is one or initial == one for one in _INITIAL_WEIGHTS):
            problem = (
                f"{_shown(initial)} changes the base model's weights; convert the adapter with "
                "PEFT's path_initial_model_for_weight_conversion"
            )
            raise self.wrong("init_lora_weights", problem)
        if self.values.get("bias", "none") != "none":
            problem = f"only none is supported, got {_shown(self.values['bias'])}"
            raise self.wrong("bias", problem)
        for name, value in self.values.items():
            if name not in _HARMLESS and name != "bias" and _is_set(value):
                raise self.wrong(name, f"is not supported, got {_shown(value)}")

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, got {_shown(value)}")
        return value

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self.wrong(name, f"must be a rank of 1 to {MAX_RANK}, got {_shown(value)}")
        rank: int = value
        return rank

    def alpha(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_ALPHA:  # false for NaN
            raise self.wrong(name, f"must be a number up to {MAX_ALPHA:g}, got {_shown(value)}")
        return float(value)

    def patterns(self, name: str, read: Callable[[str, Any], T]) -> dict[str, T]:
        """Read a field that maps patterns of module names to values.

        Args:
            read: checks and converts a value.
        """
        found = self.values.get(name) or {}
        if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
            problem = f"must be an object of at most {_MAX_PATTERNS} patterns"
            raise self.wrong(name, f"{problem}, got {_shown(found)}")
        for pattern in found:
            plain = pattern.removeprefix(_ANY_PREFIX)
            is_plain = _PLAIN_PATTERN.fullmatch(plain) is not None
            if not is_plain or len(pattern) > _MAX_PATTERN_CHARS:
                problem = (
                    f"{_shown(pattern)} must be a module's name or its end, of at most "
                    f"{_MAX_PATTERN_CHARS} letters, digits and dots"
                )
                raise self.wrong(name, problem)
        return {
            pattern.removeprefix(_ANY_PREFIX): read(f"{name}.{pattern}", value)
            for pattern, value in found.items()
        }

    def names(self, name: str) -> tuple[str, ...]:
        """Read a field that is a list of names."""
        found = self.values.get(name) or []
        if not isinstance(found, list) or len(found) > _MAX_PATTERNS:
            problem = f"must be a list of at most {_MAX_PATTERNS} names, got {_shown(found)}"
            raise self.wrong(name, problem)
        for one in found:
            if not isinstance(one, str) or not 0 < len(one) <= _MAX_PATTERN_CHARS:
                problem = f"must have names of 1 to {_MAX_PATTERN_CHARS} letters, got {_shown(one)}"
                raise self.wrong(name, problem)
        return tuple(found)


def _is_set(value: Any) -> bool:
    """Return whether a setting is used; PEFT writes None, False or an empty value if it is not."""
    return not (value is None or value is False or value in ({}, []))


def _shown(value: Any) -> str:
    """Return a value as one short line, for error messages."""
    return json.dumps(value, default=str)[:60]
