"""Unit tests of the grouping of layers and of the cache that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv.layers import AnyKV, LatentKV, LayerKV, PagedKV, SharedKV, StateArray, StateKV
from baton.kv.manifest import HandOffRule, KVKind, array_offsets
from engine.core.kv_cache_groups import MAX_GROUPS, KVCacheGroup, group_layers
from engine.worker.kv_cache import (
    KVCacheSpec,
    allocate_kv_cache,
    choose_max_model_len,
    kv_cache_spec,
)
from models.config import ModelConfig

F = None
S = 12  # a window


def cut(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    return group_layers([PagedKV(2, 8, window) for window in windows], 4, layer_bytes)


def layer_bytes(kv: LayerKV, block_size: int) -> int:
    return array_offsets(kv.arrays(block_size, "float32", "float32"))[-1]


def shape_of(windows: list[int | None]) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group."""
    return [(group.kv.retained_tokens, len(group.layers)) for group in cut(windows)]


@pytest.mark.parametrize("window", [F, S])
def test_a_uniform_model_is_one_group_of_all_layers_in_order(window: int | None) -> None:
    [group] = cut([window] * 5)
    assert group.kv == PagedKV(2, 8, window)
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
    groups = cut(windows)
    assert len(groups) <= MAX_GROUPS
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        kinds = {windows[layer] for layer in group.layers}
        window = group.kv.retained_tokens
        assert kinds == {window} or (len(groups) == 1 and not window)
    # In a long sequence groups save at least the room that they leave empty.
    if len(groups) > 1:
        size = max(len(group.layers) for group in groups)
        widest = groups[0].kv
        kept = sum(size for group in groups if group.kv == widest)
        assert size * len(groups) - len(windows) <= len(windows) - kept


# ---------------------------------------------------------------- the cache


def make_spec(windows: tuple[int | None, ...], block_size: int = 4) -> KVCacheSpec:
    kv_layers = [PagedKV(2, 8, window) for window in windows]
    return kv_cache_spec(kv_layers, block_size, torch.float32)


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
    assert spec.layer_groups == (1, 0, 1, 2, 0, 2)
    tensor = allocate_kv_cache(spec, 5, torch.device("cpu"))
    places = (0, 0, 1, 0, 1, 1)
    for cache, place in zip(spec.layer_caches(tensor), places, strict=True):
        assert isinstance(cache, torch.Tensor)
        assert cache.data_ptr() == tensor[:, place].data_ptr()
        assert cache.shape == (5, 2, 2, 4, 8)
    uniform = make_spec((F, F))
    assert (uniform.num_groups, uniform.num_null_blocks) == (1, 0)
    assert uniform.layer_groups == (0, 0)


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
    assert {(g.num_places, *g.arrays[0].shape) for g in manifest.groups} == {(2, 2, 2, 4, 8)}
    assert manifest.unit_bytes() == make_spec((S, F, S, S, F, S)).block_bytes
    # Heads are what ranks divide.
    assert manifest.groups[0].arrays[0].rank_shape(1, 2) == (2, 1, 4, 8)


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


# ---------------------------------------------------------------- unlike layers

CONV = StateKV((StateArray((24, 3)),))
RECURRENT = StateKV((StateArray((40, 3)), StateArray((4, 16, 16), "float32")))


def test_states_fill_blocks_of_attention_and_the_smallest_size_that_they_fit_is_taken() -> None:
    kv_layers: list[LayerKV] = [RECURRENT, RECURRENT, RECURRENT, PagedKV(2, 8)] * 8
    spec = kv_cache_spec(kv_layers, 0, torch.bfloat16)
    # 8 layers of 64 bytes a token; a state takes 240 bytes and 4 KiB, in at most 15 groups.
    state_bytes = 240 + 4096
    assert spec.block_size == 32
    assert spec.block_bytes == 32 * 8 * 64 >= 2 * state_bytes
    assert [len(group.layers) for group in spec.groups] == [8] + [3] * 8
    assert spec.sliding_windows == (None,) + (2,) * 8
    with pytest.raises(ConfigError, match=r"block_size: .* at least 32, got 16"):
        kv_cache_spec(kv_layers, 16, torch.bfloat16)
    assert kv_cache_spec(kv_layers, 64, torch.bfloat16).block_size == 64


def test_each_unlike_layer_has_its_own_views_that_share_no_byte() -> None:
    kv_layers: list[LayerKV] = [
        CONV,
        PagedKV(2, 8),
        RECURRENT,
        PagedKV(1, 8, 12),
        PagedKV(2, 8),
        CONV,
    ]
    spec = kv_cache_spec(kv_layers, 128, torch.bfloat16)
    tensor = allocate_kv_cache(spec, 3, torch.device("cpu"))
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (3, 1, spec.block_bytes))
    caches, seen = spec.layer_caches(tensor), dict[int, set[tuple[int, int]]]()
    attending, recurrent = caches[1], caches[2]
    assert isinstance(attending, torch.Tensor)
    assert (attending.shape, attending.dtype) == ((3, 2, 2, 128, 8), torch.bfloat16)
    assert [(a.shape, a.dtype) for a in recurrent] == [
        ((3, 40, 3), torch.bfloat16),
        ((3, 4, 16, 16), torch.float32),
    ]
    for layer, cache in enumerate(caches):
        views = (cache,) if isinstance(cache, torch.Tensor) else cache
        for view in views:
            view[1] = 0
            tensor[1] = 0
            view[1] = torch.ones_like(view[1])
            written = tensor[1].flatten().nonzero().flatten().tolist()
            assert not tensor[0].any()
            assert not tensor[2].any()
            group = seen.setdefault(spec.layer_groups[layer], set())
            span = {(written[0], written[-1])}
            assert all(end < written[0] or written[-1] < start for start, end in group)
            group |= span


def test_the_manifest_of_unlike_layers() -> None:
    spec = kv_cache_spec([LatentKV(20), CONV], 4, torch.float32)
    latent, state = spec.manifest.groups
    assert (latent.kind, latent.arrays[0].shape) == (KVKind.LATENT, (4, 20))
    assert (state.kind, state.handoff) == (KVKind.STATE, HandOffRule.AT_BOUNDARY)
    assert state.arrays[0].rank_shape(1, 3) == (8, 3)
    assert spec.manifest.unit_bytes() == spec.block_bytes
    spec.manifest.check()


def test_a_uniform_latent_cache_is_plain() -> None:
    spec = kv_cache_spec([LatentKV(20)] * 3, 4, torch.float32)
    assert (spec.block_shape, spec.tensor_dtype) == ((3, 4, 20), torch.float32)
    with pytest.raises(ConfigError, match="kv_cache_dtype: fp8 is not supported for latents"):
        kv_cache_spec([LatentKV(20)] * 3, 4, torch.float8_e4m3fn)


def test_a_model_that_attends_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="a model without attention layers is not supported"):
        kv_cache_spec([CONV], 4, torch.float32)


def test_layers_that_share_kv_have_the_table_and_cache_of_the_layer_that_they_read() -> None:
    full, window = PagedKV(1, 16), PagedKV(2, 8, 12)
    kv_layers: list[AnyKV] = [window, full, SharedKV(2), SharedKV(2), full]
    spec = kv_cache_spec(kv_layers, 4, torch.float32)
    assert [group.layers for group in spec.groups] == [(1,), (4,), (0,)]
    assert spec.layer_groups == (2, 0, 2, 0, 1)
    caches = spec.layer_caches(allocate_kv_cache(spec, 2, torch.device("cpu")))
    assert caches[2] is caches[0]
    assert caches[3] is caches[1]
    first, second = (kv_cache_spec(kv_layers, 4, torch.float32, stages=(i, 2)) for i in (0, 1))
    assert first.stage_layers == second.stage_layers == (2, 3)
