"""Adapters beside everything else: chunks, prefix hits, preemption, drafts, other adapters.

Each is another way to the same tokens, those of PEFT. Natively, results are even equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton.adapters.digest import AdapterError
from baton.api.errors import ConfigError, InvalidRequestError, OverloadedError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton_kernels.dispatch import native_ops
from engine import LLM
from engine.executors.uniproc import worker_of
from tests.numerics.peft_adapters import certain_prompts, greedy_tokens, make_adapter
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = pytest.mark.medium

VOCAB_SIZE = 61
NUM_OUTPUTS = 10
NUM_TOKENS = 40
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 16, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "use_dora": True},
    "patterns": {
        "r": 2, "lora_alpha": 2, "target_modules": ALL,
        "rank_pattern": {"q_proj": 5, "^model.layers.1.mlp.up_proj": 64},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 9},
    },
    "large": {"r": 256, "lora_alpha": 16, "target_modules": ["down_proj", "o_proj"]},
}  # fmt: skip
GATED = [("float32", "auto"), ("bfloat16", "int4")]  # the other kinds of weights are thorough
GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Scene:
    """A model with adapters; prompts with their outputs by PEFT, by the adapter's name."""

    folder: Path
    adapters: dict[str, Path]
    models: dict[str, Any]
    expected: dict[str, list[tuple[list[int], list[int]]]]

    def llm(self, **options: Any) -> LLM:
        defaults = {"dtype": "float32", "block_size": 4, "num_blocks": 400, "max_num_requests": 16}
        return LLM(str(self.folder), adapters=self.adapters, **(defaults | options))

    def rows(self) -> list[tuple[str, list[int], list[int]]]:
        """Return (adapter, prompt, output), so that adapters alternate."""
        both = [(name, *one) for name, found in self.expected.items() for one in found]
        return both[::2] + both[1::2]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("adapters")
    theirs = make_hugging_face_model(
        "Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        initializer_range=0.5,
        max_position_embeddings=200,
    )
    made = {
        name: make_adapter(theirs, root / name, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    models = {"": theirs, **{name: one.model for name, one in made.items()}}
    expected = {
        name: certain_prompts(model, 2, NUM_TOKENS, NUM_OUTPUTS, VOCAB_SIZE, seed=len(name))
        for name, model in models.items()
    }
    folders = {name: one.folder for name, one in made.items()}
    return Scene(save(theirs, root / "model"), folders, models, expected)


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 24},
    "preempted": {"num_blocks": 45},
    "without a prefix cache": {"prefix_cache": False},
    "with drafts": {
        "speculative_method": "ngram", "ngram_min": 1, "num_speculative_tokens": 4,
        "adaptive_speculation": False,
    },
    "scheduled ahead": {"async_scheduling": True},
    "in torch": {"native_kernels": False},
    "in panels of float32": {"weights": "fp32"},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_mixed_rows_equal_peft_in_every_way(scene: Scene, way: str) -> None:
    llm, rows = scene.llm(**WAYS[way]), scene.rows()
    names = [name for name, _, _ in rows]
    for _ in range(2):  # prefixes are known the second time
        completions = llm.generate([prompt for _, prompt, _ in rows], GREEDY, adapter=names)
        for (name, _, output), completion in zip(rows, completions, strict=True):
            assert list(completion.token_ids) == output, name
    if way == "preempted":
        assert llm.engine.metrics().preemptions_total > 0
    if way == "with drafts":
        assert llm.engine.metrics().drafts_total > 0
    llm.engine.check()


def test_an_adapter_is_packed_when_it_is_read(scene: Scene) -> None:
    """Loading takes no time between two steps: it neither reads nor packs."""
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 400}
    llm = LLM(str(scene.folder), max_adapters=1, **options)
    read = llm.engine.adapters.read(scene.adapters["dora"])
    for numbers in read.adapter.data.values():
        numbers[:] = bytes(len(numbers))
    llm.engine.adapters.load(read)
    llm.load_adapter("dora", scene.adapters["dora"])  # it has its slot already
    prompts = [prompt for prompt, _ in scene.expected["dora"]]
    found = llm.generate(prompts, GREEDY, adapter="dora")
    assert [list(one.token_ids) for one in found] == [out for _, out in scene.expected["dora"]]


def test_no_prefix_hit_crosses_adapters(scene: Scene) -> None:
    llm = scene.llm()
    prompt = scene.expected[""][0][0]
    hits = []
    for name in ("", "small", "", "small", "rslora"):
        [completion] = llm.generate([prompt], GREEDY, adapter=name)
        expected = greedy_tokens(scene.models[name], prompt, NUM_OUTPUTS, least_margin=0.0)
        assert list(completion.token_ids) == expected
        hits.append(llm.engine.metrics().cached_prompt_tokens_total)
    assert hits[0] == hits[1] == 0, "the adapter found the base model's KV"
    assert hits[2] == NUM_TOKENS - 4
    assert hits[3] == hits[4] == 2 * hits[2]


def scored(llm: LLM, rows: list[tuple[str, list[int]]]) -> list[Completion]:
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, logprobs=2)
    return llm.generate([prompt for _, prompt in rows], params, adapter=[name for name, _ in rows])


def bits(completion: Completion) -> list[float]:
    return [logprob for one in completion.logprobs for _, logprob in one.top]


@pytest.mark.skipif(native_ops() is None, reason="needs the native kernels")
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        pytest.param(*pair, marks=() if pair in GATED else pytest.mark.thorough)
        for pair in product(("float32", "bfloat16"), ("auto", "int8", "int4"))
    ],
)
def test_results_are_equal_to_the_bit_alone_and_in_company(
    scene: Scene, dtype: str, weights: str
) -> None:
    """Results of the base model and of adapters do not depend on the rest of the step."""
    rows = [(name, prompt) for name, prompt, _ in scene.rows()]
    llm = scene.llm(dtype=dtype, weights=weights, prefix_cache=False)
    plain = LLM(str(scene.folder), dtype=dtype, weights=weights, block_size=4, num_blocks=400)
    together = scored(llm, rows)
    for row, completion in zip(rows, together, strict=True):
        [alone] = scored(llm, [row])
        assert bits(alone) == bits(completion), row[0]
        if not row[0]:
            assert bits(scored(plain, [row])[0]) == bits(completion)
    prompt = rows[0][1]
    assert len({tuple(bits(one)) for one in scored(llm, [(n, prompt) for n in scene.models])}) == 6


@pytest.mark.skipif(native_ops() is None, reason="needs the native kernels")
@pytest.mark.parametrize("name", ["small", "dora"])
def test_decodes_with_adapters_run_from_tapes(scene: Scene, name: str) -> None:
    llm = scene.llm()
    slots = worker_of(llm.engine.executor)._adapters
    assert slots is not None
    scored(llm, [("", scene.rows()[0][1]), (name, scene.rows()[1][1])])
    assert slots._twin.tapes is not None
    assert any(taped is not None for taped in slots._twin.tapes._tapes.values())
    scored(llm, [("", scene.rows()[0][1]), ("rslora", scene.rows()[1][1])])
    llm.unload_adapter(name)
    left = {span.adapter for key in slots._twin.tapes._tapes for span in key[-1]}
    assert left == {llm.load_adapter("rslora", scene.adapters["rslora"])}
    llm.unload_adapter("rslora")
    assert not slots._twin.tapes._tapes, "a tape keeps an adapter's memory"


def test_a_step_without_adapters_runs_the_model_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = scene.llm()
    slots = worker_of(llm.engine.executor)._adapters
    assert slots is not None
    [_] = scored(llm, [("small", scene.rows()[0][1])])  # its row stays assigned

    def refuse(*arguments: Any) -> None:
        raise AssertionError("computed by the twin")

    monkeypatch.setattr(slots, "forward", refuse)
    [prompt, output], _ = scene.expected[""]
    [completion] = llm.generate([prompt], GREEDY)
    assert list(completion.token_ids) == output


def test_outputs_streams_and_beams_have_adapters(scene: Scene) -> None:
    llm = scene.llm()
    (prompt, output), _ = scene.expected["dora"]
    several = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0, ignore_eos=True, n=2)
    completions = llm.generate([prompt], several, adapter="dora")
    assert [list(one.token_ids) for one in completions] == [output, output]
    pieces = llm.stream(prompt, GREEDY, adapter="dora")
    assert [token for piece in pieces for token in piece.token_ids] == output
    [[best, _]] = llm.beam_search([prompt], beam_width=2, max_tokens=4, adapter="dora")
    [[plain, _]] = llm.beam_search([prompt], beam_width=2, max_tokens=4)
    assert best.logprob != plain.logprob


def test_slots_go_to_the_adapters_used_last(scene: Scene) -> None:
    llm = scene.llm(max_adapters=5)
    prompts = {name: found[0] for name, found in scene.expected.items()}

    def right(name: str) -> None:
        [completion] = llm.generate([prompts[name][0]], GREEDY, adapter=name)
        assert list(completion.token_ids) == prompts[name][1], name

    for name in scene.adapters:
        right(name)
    llm.load_adapter("again", scene.adapters["small"])  # the same content, so the same slot
    assert len(llm.engine.adapters.views()) == 5
    llm = LLM(str(scene.folder), dtype="float32", block_size=4, num_blocks=400, max_adapters=2)
    for name, folder in scene.adapters.items():
        llm.load_adapter(name, folder)
        assert len(llm.engine.adapters.views()) <= 2
    for name in [*scene.adapters, *scene.adapters]:  # each takes the slot of another
        right(name)
    with pytest.raises(OverloadedError, match="max_adapters: all 2 adapters are pinned or in use"):
        llm.generate([prompts[""][0]] * 3, GREEDY, adapter=["small", "dora", "large"])
    right("dora")
    llm.load_adapter("small", scene.adapters["small"], pinned=True)
    for name in ("dora", "large", "rslora"):
        right(name)
    assert [one.is_pinned for one in llm.engine.adapters.views()].count(True) == 1


def test_unloading_waits_for_requests_and_reloading_switches(scene: Scene) -> None:
    llm = scene.llm()
    (prompt, output), _ = scene.expected["rslora"]
    pieces = llm.stream(prompt, GREEDY, adapter="rslora")
    tokens = list(next(pieces).token_ids)
    digest = llm.load_adapter("rslora", scene.adapters["small"])
    assert [one.is_leaving for one in llm.engine.adapters.views()].count(True) == 1
    [switched] = llm.generate([scene.expected["small"][0][0]], GREEDY, adapter="rslora")
    assert list(switched.token_ids) == scene.expected["small"][0][1]
    tokens += [token for piece in pieces for token in piece.token_ids]
    assert tokens == output, "the running request ends on the adapter that it began with"
    assert not any(one.is_leaving for one in llm.engine.adapters.views())
    assert digest in llm.engine.adapters.digests
    llm.unload_adapter("rslora")
    assert digest in llm.engine.adapters.digests, "small has the same content"
    with pytest.raises(InvalidRequestError, match=r"^adapter: 'rslora' is not loaded; loaded: "):
        llm.generate([prompt], GREEDY, adapter="rslora")


def test_odd_values_are_refused_in_one_line(scene: Scene) -> None:
    llm, prompt = scene.llm(), scene.expected[""][0][0]
    small: Any = scene.adapters["small"]
    odd: Any
    for odd in ("", "a\nb", "x" * 257, 5, None):
        with pytest.raises(InvalidRequestError, match=r"^adapter: must have a name of 1 to 256"):
            llm.load_adapter(odd, small)
    for odd in (None, 5, b"small"):
        with pytest.raises(InvalidRequestError, match=r"^adapter: must be a path or a text, got"):
            llm.load_adapter("it", odd)
        with pytest.raises(InvalidRequestError, match=r"^adapter: must be a name or a name per"):
            llm.generate([prompt], GREEDY, adapter=odd)
    with pytest.raises(AdapterError, match="safetensors: is no folder with an adapter"):
        llm.load_adapter("it", small / "adapter_model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"^adapters: must be a mapping of names"):
        LLM(str(scene.folder), adapters=[small])
    with pytest.raises(ConfigError, match=r"^max_adapters: must be 0 or more"):
        LLM(str(scene.folder), max_adapters=-1)
