"""Tests that a model's computed FLOPs and bytes equal a count by hand for a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.metrics import EngineCounters, attended_tokens
from engine.core.outputs import ScheduledRequest, SchedulerOutput
from models.config import ModelConfig
from models.recipe import AttentionSpec, LayerSpec, MixerSpec, MlpSpec, ShortConvSpec
from models.work import ModelWork, layers_by_decodes, model_work
from tests.fakes.engine.engine_parts import make_request


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_folder(Path("examples/demo_model"))


def test_matrices_are_two_flops_a_weight(config: ModelConfig) -> None:
    hidden, mlp = config.hidden_size, config.layers[0].feed_forward
    assert isinstance(mlp, MlpSpec)
    inner = mlp.inner_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = hidden * (query + 2 * key) + query * hidden + 3 * hidden * inner
    work = model_work(config, dtype="float32")
    assert work.token_flops == 2 * config.num_layers * layer
    assert work.head_flops == 2 * hidden * config.vocab_size
    # A head's product of a query and a key, and of a probability and a value.
    num_layers = config.num_layers
    assert work.attention == ((None, num_layers * 2 * 2 * query, num_layers * 2 * key * 4),)
    assert work.expert_bytes == 0
    read = (config.num_layers * layer + hidden * config.vocab_size) * 2  # kept as bfloat16
    assert work.weight_bytes == pytest.approx(read, rel=0.02)


def with_layers(config: ModelConfig, num_layers: int, head_in_layers: float) -> ModelConfig:
    """Return a model of equal layers, with a head of as many weights as some layers."""
    layer_size = model_work(config, dtype="float32").token_flops / 2 / config.num_layers
    vocab_size = round(head_in_layers * layer_size / config.hidden_size)
    return replace(of_layers(config, config.layers[:1] * num_layers), vocab_size=vocab_size)


def of_layers(config: ModelConfig, layers: tuple[LayerSpec, ...]) -> ModelConfig:
    return replace(config, recipe=replace(config.recipe, layers=layers))


@pytest.mark.parametrize(
    ("num_layers", "head_in_layers", "num_stages", "numbers"),
    [
        (12, 4.0, 2, (8, 4)),
        (30, 8.0, 2, (19, 11)),
        (30, 8.0, 3, (12, 13, 5)),
        (12, 40.0, 4, (3, 4, 4, 1)),
        (12, 0.1, 2, ()),  # equal numbers are as good
        (12, 4.0, 1, ()),
        (2, 4.0, 3, ()),  # refused elsewhere
        (4, 9.0, 4, ()),
    ],
)
def test_the_last_stage_of_decodes_has_fewer_layers(
    config: ModelConfig,
    num_layers: int,
    head_in_layers: float,
    num_stages: int,
    numbers: tuple[int, ...],
) -> None:
    model = with_layers(config, num_layers, head_in_layers)
    assert layers_by_decodes(model, num_stages) == numbers


def test_stages_are_equal_if_a_layer_would_lose_the_kv_that_it_reads(config: ModelConfig) -> None:
    model = with_layers(config, 12, 4.0)
    mixer = model.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    shared = replace(model.layers[0], mixer=replace(mixer, kv_distance=1))
    own = model.layers[:1]
    parted = of_layers(model, (*own * 8, shared, *own * 3))
    whole = of_layers(model, (*own * 9, shared, *own * 2))
    assert layers_by_decodes(parted, 2) == ()
    assert layers_by_decodes(whole, 2) == (8, 4)


def test_of_experts_few_tokens_read_those_that_they_choose() -> None:
    work = ModelWork(
        token_flops=1, head_flops=1, attention=(), weight_bytes=1, expert_bytes=1,
        num_experts=8, top_k=2,
    )  # fmt: skip
    assert work.expert_share(0) == 0
    assert work.expert_share(1) == pytest.approx(0.25)
    assert work.expert_share(2) == pytest.approx(1 - 0.75**2)
    assert work.expert_share(1000) == pytest.approx(1)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 7), (2, 9), (5, 5), (9, 30)])
def test_tokens_attend_to_themselves_and_what_is_before_them(
    begin: int, end: int, window: int | None
) -> None:
    each = (min(place + 1, window or place + 1) for place in range(begin, end))
    assert attended_tokens(begin, end, window) == sum(each)


def test_a_step_reads_kv_once_a_request_and_of_windows_what_is_in_them() -> None:
    counters = EngineCounters(attention=((None, 2, 20), (4, 3, 30)))
    one, several = make_request("one", 10), make_request("several", 10)
    one.num_computed_tokens, several.num_computed_tokens = 9, 6
    items = ScheduledRequest(one, 1), ScheduledRequest(several, 3)
    counters.note_work(SchedulerOutput(items, 4))
    assert counters.attention_flops == 2 * (10 + 7 + 8 + 9) + 3 * (4 + 4 + 4 + 4)
    assert counters.kv_read_bytes == 20 * (10 + 9) + 30 * (4 + 6)


def test_each_layer_attends_with_its_own_heads(config: ModelConfig) -> None:
    small = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, window=16)
    large = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=32, window=None)
    state = ShortConvSpec(num_channels=8, kernel_size=3, bias=False)
    # The last three layers read the keys and values of layers 0, 1 and 0.
    shared = [replace(one, kv_distance=distance) for one, distance in ((small, 3), (large, 3))]
    last = replace(small, kv_distance=5)
    mixers: list[MixerSpec] = [small, large, state, *shared, last]
    layers = tuple(LayerSpec(mixer, None) for mixer in mixers)
    described = replace(config, recipe=replace(config.recipe, layers=layers))
    for kv_cache_dtype, num_bytes in (("auto", 2), ("fp8", 1)):
        work = model_work(described, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        assert work.attention == (
            (16, 3 * 4 * 4 * 8, 3 * 2 * 2 * 8 * num_bytes),
            (None, 2 * 4 * 4 * 32, 2 * 2 * 32 * num_bytes),
        )
