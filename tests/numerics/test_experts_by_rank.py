"""Ranks with whole experts: each loads only its experts, and their sum is the whole mixture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.adapters.files import read_adapter
from baton.api.errors import ConfigError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EXPERT_PARALLEL
from baton_kernels import ExpertShare, PackedWeight
from baton_kernels.dispatch import native_ops
from engine import LLM
from models import load_model
from models.adapters.experts import AdaptedExperts
from models.adapters.slots import AdapterSlots
from models.base import AdapterSpan
from models.config import ModelConfig
from models.cpu.packing import CpuPacker
from models.decoder import DecoderForCausalLM
from models.layers.linear import PackedLinear
from models.layers.moe import SparseMoe
from models.parallel.experts import expert_share
from models.parallel.group import Ranks, SingleRank
from models.parallel.shards import Rank
from tests.numerics.family_checkpoints import (
    TinyCheckpoint,
    make_tiny_checkpoint,
    richest_variants,
)
from tests.numerics.test_adapters_of_each_family import adapt_all, make_model
from tests.numerics.test_families import assert_right, make_llm
from tests.numerics.tiny_models import make_hugging_face_model, save
from tests.property.num_examples import num_requests
from tests.unit.models.test_fused_experts import save_mxfp4

# with biases and fused experts; with shared experts; with a bias of the router and groups
ARCHITECTURES = ["GptOssForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"]
NUM_EXPERTS = 5


class Seat(SingleRank):
    """A rank that only loads its share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


SEATS = [Seat(rank, 2) for rank in range(2)]


def mixtures(folder: Path, ranks: Ranks, *, packs: bool) -> list[SparseMoe]:
    """Load a rank's model, and return its layers with experts."""
    packer = CpuPacker.choose(torch.float32, "auto") if packs else None
    model = load_model(folder, dtype=torch.float32, ranks=ranks, packer=packer)
    assert isinstance(model, nn.Module)
    return [one for one in model.modules() if isinstance(one, SparseMoe)]


def num_weights(moe: SparseMoe) -> int:
    """Return how many weights of experts a layer has."""
    return sum(one.numel() for layer in (moe.gate_up, moe.down) for one in layer.parameters())


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_sum_over_ranks_is_the_whole_mixture(
    architecture: str, packs: bool, tmp_path: Path
) -> None:
    more = {"num_experts": 6, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
    more |= {"first_k_dense_replace": 0, "n_routed_experts": 6, "num_local_experts": 6}
    more |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
    if not architecture.startswith("Deepseek"):
        more = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "sliding_window": 6}
    save(make_hugging_face_model(architecture, **more), tmp_path)
    whole = mixtures(tmp_path, Ranks(), packs=packs)
    for size in (2, 3):
        seats = [Seat(rank, size) for rank in range(size)]
        by_rank = [
            mixtures(tmp_path, Ranks(seat, seat, expert_parallel="on"), packs=packs)
            for seat in seats
        ]
        for index, moe in enumerate(whole):
            parts = [layers[index] for layers in by_rank]
            assert [one.share for one in parts] == [ExpertShare(rank, size) for rank in range(size)]
            sizes = [num_weights(one) for one in parts]
            assert sum(sizes) == num_weights(moe)  # each expert is on one rank
            assert max(sizes) * moe.num_experts == num_weights(moe) * -(-moe.num_experts // size)
            x = torch.randn(7, moe.width)
            total = sum(one(x) for one in parts)
            torch.testing.assert_close(total, moe(x), rtol=1e-4, atol=1e-4)
            rows = 7 * moe._routing.top_k
            [loads] = {tuple(one.loads.tolist()) for one in parts if one.loads is not None}
            assert loads[1] == rows
            assert -(-rows // size) <= loads[0] <= rows


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
@torch.no_grad()
def test_whole_experts_keep_groups_that_parts_would_cut(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, intermediate_size=96)  # two parts would cut groups of 32
    [whole, *_] = mixtures(tmp_path, Ranks(), packs=True)
    kept = packed_of(whole).layout
    assert kept is not None
    by_rank = [
        mixtures(tmp_path, Ranks(one, one, expert_parallel="on"), packs=True)[0] for one in SEATS
    ]
    assert [packed_of(one).layout for one in by_rank] == [kept, kept]
    cut = mixtures(tmp_path, Ranks(SEATS[0], SEATS[0], expert_parallel="off"), packs=True)[0]
    assert packed_of(cut).layout != kept
    x = torch.randn(7, whole.width)
    torch.testing.assert_close(sum(one(x) for one in by_rank), whole(x), rtol=1e-4, atol=1e-4)


def packed_of(moe: SparseMoe) -> PackedWeight:
    assert isinstance(moe.down, PackedLinear)
    return moe.down.packed


@torch.no_grad()
def test_adapters_of_experts_that_ranks_have(tmp_path: Path) -> None:
    """The sum over ranks is the whole mixture also for tokens with an adapter of the experts."""
    name = "Qwen2MoeForCausalLM"
    theirs = make_model(name, dict(richest_variants())[name])
    adapter = read_adapter(adapt_all(name, theirs, tmp_path)["lora"].folder)
    folder = save(theirs, tmp_path / "model")
    found: list[list[AdaptedExperts]] = []
    for ranks in (Ranks(), *(Ranks(one, one, expert_parallel="on") for one in SEATS)):
        model = load_model(folder, dtype=torch.float32, ranks=ranks)
        assert isinstance(model, DecoderForCausalLM)
        slots = AdapterSlots(model, torch.float32, ranks)
        slots.load(adapter)
        slots._step.spans = (AdapterSpan(adapter.digest, 1, 6),)
        sites = dict.fromkeys(slots._sites.values())
        found.append([site for site in sites if isinstance(site, AdaptedExperts)])
    for whole, *parts in zip(*found, strict=True):
        x, weights = torch.randn(8, whole._moe.width), torch.rand(8, 2)
        ids = torch.rand(8, whole._moe.num_experts).argsort(1)[:, :2].contiguous()
        expected = whole.mix(x, ids, weights, None, None)
        assert (expected - whole._moe.mix(x, ids, weights, None, None)).abs().max() > 1e-3
        # Tokens with the adapter use only the first rank's experts, other tokens only the second's.
        ids = ids // 2 * 2
        ids[[0, 6, 7]] += 1
        expected = whole.mix(x, ids, weights, None, None)
        for part in parts:
            assert part._moe.loads is not None
            part._moe.loads.zero_()
        total = sum(one.mix(x, ids, weights, None, None) for one in parts)
        assert [one._moe.loads.tolist() for one in parts] == [[10, 16], [10, 16]]
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_the_option(tmp_path: Path) -> None:
    """All experts are whole with `on`, if there are enough for all ranks."""
    assert EXPERT_PARALLEL == ("auto", "on", "off")
    assert expert_share(Rank(1, 2, "on"), 5, 64) == ExpertShare(1, 2)
    assert list(ExpertShare(1, 2).experts(5)) == [1, 3]
    assert expert_share(Rank(1, 2, "off"), 5, 64) is None
    assert expert_share(Rank(0, 1, "on"), 5, 64) is None
    assert expert_share(Rank(0, 2, "auto"), 8, 384) == ExpertShare(0, 2)  # not 256 and 128
    assert expert_share(Rank(0, 2, "auto"), 8, 768) is None
    assert expert_share(Rank(0, 4, "auto"), 8, 768) is None
    assert expert_share(Rank(0, 2, "auto"), 1, 384) is None
    with pytest.raises(ConfigError, match=r"^expert_parallel: 6 ranks cannot share 5 experts$"):
        expert_share(Rank(0, 6, "on"), 5, 64)
    save(make_hugging_face_model("Qwen3ForCausalLM"), tmp_path)
    seat = Seat(0, 2)
    with pytest.raises(ConfigError, match=r"^expert_parallel: the model has no experts"):
        load_model(tmp_path, ranks=Ranks(seat, seat, expert_parallel="on"))


# ---------------------------------------------------------------------- processes


@pytest.fixture(scope="module", params=richest_variants(), ids=", ".join)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TinyCheckpoint:
    architecture, variant = request.param
    made = make_tiny_checkpoint(architecture, variant, tmp_path_factory.mktemp("model"))
    if ModelConfig.from_folder(made.folder).experts is None:
        pytest.skip("a model without experts")
    return made


# Ranks of a stage, and stages.
@pytest.fixture(params=[(2, 1), (4, 1), (2, 2)], ids=str)
def over_ranks(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint) -> Iterator[LLM]:
    num_ranks, num_stages = request.param
    llm = make_llm(
        checkpoint,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        expert_parallel="on",
        num_threads=1,
        long_prefill_token_threshold=16,
    )
    yield llm
    llm.engine.close()


@pytest.mark.large
@pytest.mark.lengthy
def test_every_family_with_experts_by_rank(over_ranks: LLM, checkpoint: TinyCheckpoint) -> None:
    """Greedy tokens of transformers, alone and in batches, and the ranks' loads are counted."""
    longest = checkpoint.examples[0]
    assert_right(over_ranks, [longest], len(longest.output))
    assert_right(over_ranks, [*checkpoint.examples, *checkpoint.short_examples])
    busiest, mean = over_ranks.engine.executor.expert_loads()
    assert busiest >= mean > 0


# Number of requests of each family: about 2,000 of all 12 families together.
NUM_DRAWN = 167


def complete_drawn(checkpoint: TinyCheckpoint, num: int, **options: Any) -> list[Completion]:
    """Complete drawn prompts, some of which have equal beginnings, with drawn lengths."""
    draw = random.Random(5)
    vocabulary = range(3, ModelConfig.from_folder(checkpoint.folder).vocab_size)
    beginnings = [draw.choices(vocabulary, k=20) for _ in range(3)]
    prompts = [
        draw.choice(beginnings)[: draw.choice([0, 9, 20])]
        + draw.choices(vocabulary, k=draw.randint(1, 20))
        for _ in range(num)
    ]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 20),
            temperature=draw.choice([0.0, 0.0, 0.8]),
            seed=index,
            ignore_eos=True,
            logprobs=0,
        )
        for index in range(num)
    ]
    llm = make_llm(checkpoint, num_threads=1, long_prefill_token_threshold=16, **options)
    try:
        return llm.generate(prompts, params)
    finally:
        llm.engine.close()


@pytest.mark.large
@pytest.mark.lengthy
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}], ids=str
)
def test_drawn_requests_by_rank(
    sizes: dict[str, int],
    checkpoint: TinyCheckpoint,
    record_property: Callable[[str, object], None],
) -> None:
    num = num_requests(NUM_DRAWN)
    expected = complete_drawn(checkpoint, num)
    found = complete_drawn(checkpoint, num, expert_parallel="on", **sizes)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    record_property("requests", num)
