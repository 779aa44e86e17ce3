"""Tests that every architecture computes what transformers does, in all ways of computing.

A new line in the registry is in this suite by a row in tests/numerics/family_checkpoints.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from baton.api.outputs import TokenLogprobs
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams
from baton_kernels.dispatch import native_ops
from baton_kernels.native.tape import Tape
from engine import LLM
from engine.core.request import Request
from models import MODELS, load_model
from tests.numerics.family_checkpoints import (
    FAMILIES,
    REFUSED,
    REFUSED_BY_ALL,
    Example,
    TinyCheckpoint,
    all_variants,
    make_tiny_checkpoint,
    richest_variants,
)

MAX_DIFFERENCE = 1e-4  # of a logprob
TABLE = "tests/numerics/family_checkpoints.py"


def variants() -> list[Any]:
    """The richest of each family stays in `make test`."""
    richest = richest_variants()
    return [
        pytest.param(one, marks=() if one in richest else pytest.mark.thorough, id=", ".join(one))
        for one in all_variants()
    ]


@pytest.fixture(scope="module", params=variants())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture, variant = request.param
    return make_tiny_checkpoint(architecture, variant, tmp_path_factory.mktemp("model"))


def make_llm(checkpoint: TinyCheckpoint, **options: Any) -> LLM:
    """With room for all requests, and not much more: `run` looks at every block at every step."""
    defaults = {"dtype": "float32", "max_num_requests": 8, "block_size": 4, "num_blocks": 600}
    return LLM(str(checkpoint.folder), **(defaults | options))


def run(llm: LLM, examples: Sequence[Example], num_tokens: int) -> list[Request]:
    """Complete all at once; the engine's invariants hold after each step, and nothing is kept."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    num_free = llm.engine.block_pool.num_free
    requests = [
        Request.create(
            f"r{index}",
            list(example.prompt),
            params,
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=llm.engine.max_model_len,
        )
        for index, example in enumerate(examples)
    ]
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert llm.engine.block_pool.num_free == num_free
    return requests


def assert_right(llm: LLM, examples: Sequence[Example], num_tokens: int = 40) -> list[Request]:
    """Greedy tokens are those of transformers; returns the requests."""
    requests = run(llm, examples, num_tokens)
    found = [request.output_token_ids for request in requests]
    assert found == [example.output[:num_tokens] for example in examples]
    return requests


def test_every_architecture_has_a_row_in_the_table() -> None:
    missing = sorted(set(MODELS.names()) - set(FAMILIES))
    assert not missing, f"{', '.join(missing)}: add a row to FAMILIES in {TABLE}"
    unknown = sorted(set(FAMILIES) - set(MODELS.names()))
    assert not unknown, f"{', '.join(unknown)}: in FAMILIES of {TABLE}, but not registered"


def test_every_architecture_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    missing = [name for name in MODELS.names() if f"| `{name}` |" not in page]
    assert not missing, f"{', '.join(missing)}: add a row to Families in docs/models.md"


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("threshold", [7, pytest.param(64, marks=pytest.mark.thorough)])
def test_logprobs_at_every_position(checkpoint: TinyCheckpoint, threshold: int) -> None:
    llm = make_llm(checkpoint, long_prefill_token_threshold=threshold)
    prompt = checkpoint.examples[0].later(20).prompt
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=MAX_LOGPROBS, logprobs=MAX_LOGPROBS
    )
    [completion] = llm.generate([prompt], params)
    both = [checkpoint.logits(prompt), checkpoint.closer_logits(prompt)]
    expected = [one.double().log_softmax(-1) for one in both]  # each [num_tokens, vocab_size]
    found: list[TokenLogprobs | None] = [*completion.prompt_logprobs[1:], *completion.logprobs]
    for position, (token_id, one) in enumerate(
        zip([*prompt[1:], *completion.token_ids], found, strict=True)
    ):
        assert one is not None
        assert len(one.top) == MAX_LOGPROBS
        for candidate, logprob in [(token_id, one.logprob), *one.top]:
            theirs = [float(rows[position][candidate]) for rows in expected]
            assert min(abs(logprob - other) for other in theirs) <= MAX_DIFFERENCE, theirs


# ---------------------------------------------------------------- tokens, by every way


def test_two_hundred_tokens_alone(checkpoint: TinyCheckpoint) -> None:
    example = checkpoint.examples[0]
    assert_right(make_llm(checkpoint), [example], len(example.output))


@pytest.mark.skipif(native_ops() is None, reason="no native kernels here")
def test_decodes_run_from_tapes(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in a decode step of any family is computed by torch."""
    num_calls: list[int] = []
    run_tape = Tape.run

    def counted(tape: Tape) -> None:
        num_calls.append(len(tape._calls))
        run_tape(tape)

    monkeypatch.setattr(Tape, "run", counted)
    assert_right(make_llm(checkpoint), checkpoint.examples[:2], 12)
    assert num_calls


def test_in_a_batch_of_other_lengths(checkpoint: TinyCheckpoint) -> None:
    llm = make_llm(checkpoint, prefix_cache=False, max_num_batched_tokens=50)
    batch = [example.later(7 * index) for index, example in enumerate(checkpoint.examples)]
    assert_right(llm, [*batch, checkpoint.short_examples[0]])


@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("threshold", [1, 11])
def test_in_chunks(checkpoint: TinyCheckpoint, threshold: int, block_size: int) -> None:
    llm = make_llm(checkpoint, block_size=block_size, long_prefill_token_threshold=threshold)
    example = checkpoint.examples[1]
    [request] = assert_right(llm, [example], 20)
    assert request.num_forwards == -(-len(example.prompt) // threshold) + 20 - 1


def test_with_prefix_hits(checkpoint: TinyCheckpoint) -> None:
    llm = make_llm(checkpoint)
    first, second, *_ = checkpoint.examples
    [request] = assert_right(llm, [first])
    assert request.num_hit_tokens == 0
    [request] = assert_right(llm, [second])  # the shared beginning
    assert 0 < request.num_hit_tokens < len(second.prompt)
    shared = request.num_hit_tokens
    [request] = assert_right(llm, [first.later(30)])  # what was generated, too
    assert request.num_hit_tokens > max(len(first.prompt) - 1, shared)


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_preempted(checkpoint: TinyCheckpoint, prefix_cache: bool) -> None:
    examples = checkpoint.short_examples
    options = {"block_size": 2, "prefix_cache": prefix_cache, "long_prefill_token_threshold": 4}
    llm = make_llm(checkpoint, num_blocks=2 * _blocks_of_one(checkpoint, **options), **options)
    while llm.engine.max_model_len < len(examples[0].prompt + examples[0].output):
        llm = make_llm(checkpoint, num_blocks=llm.engine.num_blocks + 4, **options)
    requests = assert_right(llm, examples)
    assert sum(request.num_preemptions for request in requests) > 0


def _blocks_of_one(checkpoint: TinyCheckpoint, **options: Any) -> int:
    """Blocks that one of the short examples holds at most, and those that nobody may have."""
    llm = make_llm(checkpoint, **options)
    example = checkpoint.short_examples[0]
    params = SamplingParams(max_tokens=len(example.output), temperature=0, ignore_eos=True)
    num_free = [llm.engine.block_pool.num_free for _ in llm.stream(example.prompt, params)]
    return llm.engine.num_blocks - min(num_free)


def test_on_the_reference_of_the_kernels(checkpoint: TinyCheckpoint) -> None:
    llm = make_llm(checkpoint, attention_backend="reference", long_prefill_token_threshold=17)
    assert_right(llm, checkpoint.examples[:2], 12)


# ---------------------------------------------------------------- what is not computed so


def test_fields_that_would_change_results_are_refused(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    values = json.loads((checkpoint.folder / "config.json").read_text())
    where = ["text_config"] if "text_config" in values else []
    of_text = values.get("text_config", values)
    refused = {name: value for name, value in REFUSED.items() if of_text.get(name) is not None}
    if "full_attention" in (of_text.get("rope_parameters") or {}):
        # transformers ignores what stands beside a RoPE for each type of layers.
        refused["rope_parameters.full_attention"] = refused.pop("rope_parameters")
    assert len(refused) >= 2
    for name, value in (REFUSED_BY_ALL | refused | dict(checkpoint.refused)).items():
        changed = _with(values, [*where, *name.split(".")], value)
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match=rf"\b{name.split('.')[-1]}\b") as caught:
            load_model(tmp_path)
        assert "\n" not in str(caught.value)


def _with(values: dict[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """A copy with another value; of the first layer, where each layer has one."""
    name, *rest = path
    old = values.get(name)
    if rest:
        value = _with(old or {}, rest, value)
    elif isinstance(old, list):
        value = [value, *old[1:]]
    return values | {name: value}
