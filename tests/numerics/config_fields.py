"""Find every field of a config.json that transformers or Baton reads, and values to try.

Fields come from transformers' configuration class, from the config attributes that its modules
read, and from the fields that ``models/*.py`` reads. Refuses to know: what either computes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from transformers import cache_utils, masking_utils, modeling_rope_utils

from models.config import ModelConfig
from models.family import Family
from models.registry import MODELS
from tests.numerics.family_checkpoints import FAMILIES, MAX_MODEL_LEN, VOCAB_SIZE
from tests.numerics.tiny_models import make_hugging_face_model

Config = dict[str, Any]
_ABSENT: Any = object()
_CONFIGS = ("config", "self.config", "text_config", "self")
_READERS = frozenset(
    (
        *("integer", "number", "optional_integer", "optional_number", "boolean", "text"),
        *("texts", "numbers", "token_ids", "child", "get", "has"),
    )
)
# Skipped: fields with tests of their own, fields of images, and attributes that no file has.
_NOT_HERE = frozenset(
    (
        *("quantization_config", "model_type", "transformers_version", "text_config"),
        *("attribute_map", "base_config_key", "sub_configs", "sub_configs_defaults"),
        *("extra_files", "extra_config_files", "per_layer_config", "get_text_config"),
        *("mm_tokens_per_image", "image_token_id", "video_token_id", "vision_config"),
        *("depth", "in_channels", "num_heads", "patch_size", "out_hidden_size"),
        *("spatial_merge_size", "temporal_patch_size", "num_position_embeddings"),
        *(f"base_model_{kind}_plan" for kind in ("ep", "fsdp", "pp", "tp")),
    )
)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "swish")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su")
# Fields that are only in an object.
_OF_ROPE = frozenset(
    (
        *("rope_type", "type", "factor", "attention_factor", "beta_fast", "beta_slow"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    )
)
# Fields with few possible values -> these values.
_VALUES: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), _ACTIVATIONS),
    "mamba_hidden_act": ("silu", "gelu"),
    **dict.fromkeys(("rope_type", "type"), _ROPE_TYPES),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "position_embedding_type": ("nope", "rope", "alibi"),
    **dict.fromkeys(("dtype", "torch_dtype"), ("float32", "bfloat16", "float16")),
    "mamba_ssm_cache_dtype": ("float32", "bfloat16"),
    "mamba_d_head": ("auto", 4, 8),
    "hybrid_override_pattern": ("M-*-", "M*", "ME*E"),
    **dict.fromkeys(("time_step_limit", "mamba_dt_limit"), ([0.0, 1.0], [0.1, 2.0])),
    "rope_scaling": (
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    ),
    "rope_parameters": ({}, {"rope_type": "default"}, {"rope_theta": 77.0}),
}
# With larger weights, transformers' float32 differs from its float64 by more than 1e-3.
_SMALL_WEIGHTS = {"Gemma4ForCausalLM": 0.1, "Gemma4ForConditionalGeneration": 0.03}
_LAYER_TYPES = (
    ("full_attention", "sliding_attention"),
    ("linear_attention", "full_attention"),
    ("conv", "full_attention"),
    ("attention", "mamba"),
    ("chunked_attention", "full_attention"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One config.json that differs from another in one field.

    Attributes:
        field: the field's name; for a field of an object, the last part of its path.
        kind: "dropped", "null" or "changed".
        config: the whole file.
        names: names by which a refusal may call the field.
    """

    field: str
    kind: str
    config: Config
    names: frozenset[str]


def base_configs(architecture: str, num_variants: int = 1) -> list[Config]:
    """Return configs to change, from the last ``num_variants`` variants of the family.

    Each variant gives two configs: one with every field, and one in the older style, without layer
    types and with ``rope_theta`` and ``rope_scaling``.
    """
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
    shape["max_position_embeddings"] = MAX_MODEL_LEN
    shape |= {"attn_implementation": "eager"}
    weights = _SMALL_WEIGHTS.get(architecture)
    small = {} if weights is None else {"initializer_range": weights}
    made = []
    for variant in list(FAMILIES[architecture].variants.values())[::-1][:num_variants]:
        config = make_hugging_face_model(architecture, **(shape | dict(variant) | small)).config
        for use_diff in (False, True):
            values = json.loads(config.to_json_string(use_diff=use_diff))
            values["architectures"] = [architecture]
            _text_of(values).pop("dtype", None)
            values.pop("dtype", None)
            made.append(_in_older_words(values, architecture) if use_diff else values)
    return made


def changes(
    config: Config, architecture: str, fields: Sequence[str] | None = None
) -> Iterator[Change]:
    """Drop, null and change each field of a file's text part, one at a time."""
    text_class = text_config_class(architecture)
    path = ("text_config",) if "text_config" in config else ()
    text = _text_of(config)
    for name in fields_of(architecture, config) if fields is None else fields:
        declared = text_class.__dataclass_fields__.get(name)
        default = getattr(declared, "default", None)
        others = {new for old, new in text_class.attribute_map.items() if old == name}
        others |= {old for old, new in text_class.attribute_map.items() if new == name}
        if name in ("dtype", "torch_dtype"):
            others |= {"dtype", "torch_dtype"}
        names = frozenset({name} | others)
        value = text.get(name, _ABSENT)
        for kind, other in _others(name, value, None if default is MISSING else default):
            yield Change(name, kind, _with(config, (*path, name), other), names)


def fields_of(architecture: str, config: Config) -> list[str]:
    """List text fields that either side reads for any architecture, or that a file has."""
    model = getattr(transformers, architecture)
    found = read_by_transformers(model) | read_by_baton() | {"torch_dtype"}
    found -= _NOT_HERE
    own = known_fields(architecture, config)
    return sorted({*own, *(name for name in found if not name.startswith("_"))})


def known_fields(architecture: str, config: Config) -> list[str]:
    """List the fields that transformers knows for the architecture, or that a file has."""
    text, text_class = _text_of(config), text_config_class(architecture)
    found = set(text) | set(text_class.__dataclass_fields__) | set(text_class.attribute_map)
    found |= _popped(sys.modules[text_class.__module__]) | _popped(modeling_rope_utils)
    return sorted(name for name in found - _NOT_HERE if not name.startswith("_"))


def read_by_transformers(model_class: type) -> set[str]:
    """Find the fields that a model's forward pass may read."""
    found = set[str]()
    for module in (sys.modules[model_class.__module__], masking_utils, cache_utils):
        found |= read_by_module(module)
    return found | read_by_module(modeling_rope_utils)


def read_by_baton() -> set[str]:
    """Find the fields that ``models/*.py`` and the families' files read."""
    found, folder = set[str](), Path(__file__).parents[2] / "models"
    for path in (*folder.glob("*.py"), *folder.glob("families/**/*.py")):
        if path.stem == "quantization":  # has tests of its own
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Attribute(attr=attr), [ast.Constant(str(name)), *_]) if (
                    attr in _READERS and name.isidentifier()
                ):
                    found.add(name)
    return found - _OF_ROPE


def text_config_class(architecture: str) -> Any:
    """Return the configuration class of a model's text part."""
    config_class = getattr(transformers, architecture).config_class
    if "text_config" not in config_class.sub_configs:
        return config_class
    return type(config_class().get_text_config())  # (the class itself may be any, as "auto")


@cache
def read_by_module(module: ModuleType) -> frozenset[str]:
    """Find the attributes that a module's code takes from a config."""
    found = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Attribute(value, attr=name) if ast.unparse(value) in _CONFIGS[:3]:
                found.add(name)
            case ast.Call(ast.Name("getattr" | "hasattr"), [of, ast.Constant(str(name)), *_]):
                if ast.unparse(of) in _CONFIGS:
                    found.add(name)
    return frozenset(found)


@cache
def _popped(module: ModuleType) -> frozenset[str]:
    """Find the fields that a configuration class takes from its keyword arguments."""
    found = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("kwargs"), attr="pop" | "get" | "setdefault"),
                [ast.Constant(str(name)), *_],
            ):
                found.add(name)
            case ast.Compare(ast.Constant(str(name)), comparators=[ast.Name("kwargs")]):
                found.add(name)
            case ast.Subscript(ast.Name("kwargs"), ast.Constant(str(name))):
                found.add(name)
    return frozenset(found)


def _text_of(config: Config) -> Config:
    text: Config = config.get("text_config", config)
    return text


def _in_older_words(config: Config, architecture: str) -> Config:
    """Return a config as transformers 4 wrote it."""
    text = _text_of(config)
    if architecture not in ("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"):
        text.pop("layer_types", None)  # other architectures name layer types in other fields
    ropes = text.pop("rope_parameters", None) or {}
    if "sliding_attention" in ropes:
        if architecture == "Gemma3ForCausalLM":
            text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    scaling = dict(ropes)
    for name in ("rope_theta", "partial_rotary_factor"):
        value = scaling.pop(name, None)
        if value is not None:
            text[name] = value
    if architecture == "BambaForCausalLM":  # half of each head always turns
        text.pop("partial_rotary_factor", None)
    if scaling.get("rope_type", "default") != "default":
        text["rope_scaling"] = scaling
    return config


def _others(name: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield the kinds of change to a value, each with the new value, or that it is absent."""
    if value is not _ABSENT:
        yield "dropped", _ABSENT
    if value is not None:
        yield "null", None
    known = value if value is not _ABSENT and value is not None else default
    for other in _changed(name, known):
        if other != value:
            yield "changed", other


def _changed(name: str, value: Any) -> Sequence[Any]:
    if name in _VALUES:
        return _VALUES[name]
    if name in ("layer_types", "layers_block_type"):
        count = len(value) if isinstance(value, list) else 2
        mixed = [[pair[i % 2] for i in range(count)] for pair in _LAYER_TYPES]
        return [*mixed, *([pair[1]] * count for pair in _LAYER_TYPES), mixed[0][:-1]]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value, 0, 1]
        case float():
            return [value * 2, value / 2, 0.0, 1.0, 2]
        case str():
            return ["nonsense"]
        case list() | tuple():
            numbers = [one for one in value if isinstance(one, int | float)]
            return [[], [2 * one for one in numbers], numbers[::-1], numbers[:-1], [0]]
        case dict():
            return [{}]
        case _:
            return [True, False, 2, 0.5, "nonsense"]


def _with(config: Config, path: Sequence[str], value: Any) -> Config:
    """Return a copy with another value at a path; makes missing objects."""
    made = copy.deepcopy(config)
    place = made
    for name in path[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    if value is _ABSENT:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return made


# ---------------------------------------------------------------- rotary embeddings

_THETA = 500.0
_SCALINGS: Mapping[str, Config] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn, attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
# Values for fields that the scalings above leave out.
_ROPE_VALUES: Config = {
    "partial_rotary_factor": 0.5,
    "attention_factor": 1.5,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
    "truncate": True,
    "mrope_section": [1, 1, 2],
    "rope_theta": _THETA,
} | {name: value for scaling in _SCALINGS.values() for name, value in scaling.items()}
_MAX_ROPE_VALUES = 5  # for each field, dropped and null included
_WITH_OWN_ROPE = (
    *("LlamaForCausalLM", "CwmForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM"),
    *("Phi3ForCausalLM", "GptOssForCausalLM", "GlmForCausalLM", "Glm4MoeForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "BambaForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Lfm2ForCausalLM"),
)
_ROPE_FIELDS = (*sorted(modeling_rope_utils.RopeParameters.__annotations__), "type")
_OUTER_FIELDS = (
    *("rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings", "max_position_embeddings"),
)


def rope_changes(config: Config, architecture: str) -> Iterator[Change]:
    """Give a file every kind of RoPE, in each way to write it.

    Also changes each RoPE field for architectures whose RoPE Baton reads in a special way, and for
    Llama, which stands for all others.
    """
    path = ("text_config",) if "text_config" in config else ()
    text = {n: v for n, v in _text_of(config).items() if not n.startswith(("rope_", "partial_"))}
    found = ModelConfig.from_dict(config)
    family = MODELS.load(found.architecture)
    assert isinstance(family, Family)
    num_pairs = found.rope.rotary_dim(found.head_dim) // 2
    partial = found.rope.partial_rotary_factor
    for name, fields in _SCALINGS.items():
        scaling = {"rope_type": name.split(",")[0], **fields}
        if name == "longrope":
            scaling["short_factor"] = [1 + i / 10 for i in range(num_pairs)]
            scaling["long_factor"] = [2 + i / 10 for i in range(num_pairs)]
        turning = {} if partial == 1.0 else {"partial_rotary_factor": partial}
        newer = {"rope_parameters": {"rope_theta": _THETA, **scaling}}
        older = {"rope_scaling": scaling, "rope_theta": _THETA, **turning}
        ways: list[tuple[Config, tuple[str, ...]]] = [
            (newer, ("rope_parameters",)),
            (older, ("rope_scaling",)),
        ]
        if family.ropes_by_layer_type:
            both = {"full_attention": newer["rope_parameters"]}
            both["sliding_attention"] = {"rope_type": "default", "rope_theta": 90.0}
            ways += [({"rope_parameters": both}, ("rope_parameters", kind)) for kind in both]
        for way, section in ways:
            whole = _with(config, path, text | way) if path else text | way
            yield Change(f"{name} RoPE", "changed", whole, frozenset(("rope_type", *way)))
            if architecture in _WITH_OWN_ROPE:
                yield from _changes_of_rope(whole, path, section)


def _changes_of_rope(
    config: Config, path: tuple[str, ...], section: tuple[str, ...]
) -> Iterator[Change]:
    text = _text_of(config)
    scaling: Any = text
    for name in section:
        scaling = scaling[name]
    inner = [((*path, *section, name), name, scaling) for name in _ROPE_FIELDS]
    outer = [((*path, name), name, text) for name in _OUTER_FIELDS]
    for place, name, values in inner + outer:
        names = frozenset(("rope_type", "type") if name in ("rope_type", "type") else (name,))
        value = values.get(name, _ABSENT)
        for kind, other in [*_others(name, value, _ROPE_VALUES.get(name))][:_MAX_ROPE_VALUES]:
            yield Change(".".join(place), kind, _with(config, place, other), names)
