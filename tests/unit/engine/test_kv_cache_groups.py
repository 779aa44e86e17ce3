"""Unit tests of the grouping of layers and of the cache that follows from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv_manifest import KVKind
from engine.core.kv_cache_groups import MAX_GROUPS, group_layers
from engine.worker.kv_cache import (
    KVCacheSpec,
    choose_max_model_len,
    kv_cache_spec,
)
from models.config import ModelConfig

F = None
S = 12  # a window


def shape_of(windows: list[int | None]) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group."""
    return [(group.sliding_window, len(group.layers)) for group in group_layers(windows)]


@pytest.mark.parametrize("window", [F, S])
def test_a_uniform_model_is_one_group_of_all_layers_in_order(window: int | None) -> None:
    [group] = group_layers([window] * 5)
    assert group.sliding_window == window
    assert group.layers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([S, F] * 3, [(F, 3), (S, 3)]),
        ([S, S, F] * 2, [(F, 2), (S, 2), (S, 2)]),
        ([S, S, S, S, S, F] * 2, [(F, 2)] + [(S, 2)] * 5),
        ([F, F, F, S], [(F, 1)] * 3 + [(S, 1)]),
        ([4, 9, 9, 4], [(9, 2), (4, 2)]),
        # Does not divide evenly into few groups: windows get the empty places, not full layers.
        ([S] * 22 + [F] * 4, [(F, 4)] + [(S, 4)] * 5 + [(S, 2)]),
        ([S] * 52 + [F] * 10, [(F, 10)] + [(S, 10)] * 5 + [(S, 2)]),
        # Ten empty places to free one layer's past is a bad bargain.
        ([F] * 11 + [S], [(F, 12)]),
    ],
)
def test_groups_of_known_patterns(
    windows: list[int | None], expected: list[tuple[int | None, int]]
) -> None:
    assert shape_of(windows) == expected


@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_that_keeps_at_least_what_it_needs(
    windows: list[int | None],
) -> None:
    groups = group_layers(windows)
    assert len(groups) <= MAX_GROUPS
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        kinds = {windows[layer] for layer in group.layers}
        assert kinds == {group.sliding_window} or (len(groups) == 1 and not group.sliding_window)
    # In a long sequence groups save at least the room that they leave empty.
    if len(groups) > 1:
        size = max(len(group.layers) for group in groups)
        widest = groups[0].sliding_window
        kept = sum(size for group in groups if group.sliding_window == widest)
        assert size * len(groups) - len(windows) <= len(windows) - kept


# ---------------------------------------------------------------- the cache


def make_spec(windows: tuple[int | None, ...], block_size: int = 4) -> KVCacheSpec:
    return kv_cache_spec(make_model(len(windows)), windows, block_size, torch.float32)


def make_model(num_layers: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
        }
    )


def test_a_block_holds_one_group_and_layers_know_their_places() -> None:
    spec = make_spec((S, F, S, S, F, S))
    assert spec.block_shape == (2, 2, 2, 4, 8)
    assert spec.block_bytes == 2 * 2 * 2 * 4 * 8 * 4
    assert (spec.num_groups, spec.num_null_blocks) == (3, 1)
    assert spec.sliding_windows == (F, S, S)
    assert spec.layer_places == ((1, 0), (0, 0), (1, 1), (2, 0), (0, 1), (2, 1))
    uniform = make_spec((F, F))
    assert (uniform.num_groups, uniform.num_null_blocks) == (1, 0)
    assert uniform.layer_places == ((0, 0), (0, 1))


def test_peers_that_group_otherwise_have_another_layout() -> None:
    layouts = {
        make_spec(windows).manifest.layout
        for windows in ((F, F, F), (S, F, F), (S, F, S, F, S, F, S, F))
    }
    assert len(layouts) == 3


def test_the_manifest_says_what_lies_in_a_block() -> None:
    manifest = make_spec((S, F, S, S, F, S)).manifest
    assert [(g.kind, g.layers, g.window) for g in manifest.groups] == [
        (KVKind.PAGED, (1, 4), 0),
        (KVKind.WINDOW, (0, 2), S),
        (KVKind.WINDOW, (3, 5), S),
    ]
    assert {g.shape for g in manifest.groups} == {(2, 2, 2, 4, 8)}
    assert manifest.unit_bytes() == make_spec((S, F, S, S, F, S)).block_bytes
    # Heads are what ranks divide.
    assert manifest.groups[0].rank_shape(1, 2) == (2, 2, 1, 4, 8)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "expected"),
    [((F, F), 7, 28), ((S, S), 7, 24), ((S, F), 7, 12), ((S, F), 8, 12), ((S, S, F), 10, 12)],
)
def test_the_longest_request_fits_alone_in_all_groups(
    windows: tuple[int | None, ...], num_blocks: int, expected: int
) -> None:
    spec, model = make_spec(windows), make_model(len(windows))
    config = EngineConfig(block_size=4)
    assert choose_max_model_len(model, config, spec, num_blocks) == expected
    config = EngineConfig(block_size=4, max_model_len=expected + 1)
    with pytest.raises(ConfigError, match=rf"max_model_len: {expected + 1} .*\({expected} tokens"):
        choose_max_model_len(model, config, spec, num_blocks)


def test_a_cache_that_holds_no_block_of_tokens_is_refused() -> None:
    spec, model = make_spec((S, S, F)), make_model(3)
    with pytest.raises(ConfigError, match=r"num_blocks: 3 .* at least 4 are needed"):
        choose_max_model_len(model, EngineConfig(block_size=4), spec, 3)
    assert choose_max_model_len(model, EngineConfig(block_size=4), spec, 4) == 4
