"""What a checkpoint's files say about pooling, and what they must not say."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.pooling import (
    Activation,
    PoolingKind,
    PoolingParams,
    activate,
    check_pooling_params,
    make_embedding,
    pooled_problem,
)
from baton.checkpoint.pooling.answers import check_generates, score_of
from baton.checkpoint.pooling.architectures import Head, split_architecture
from baton.checkpoint.pooling.leaders import find_leaders
from baton.checkpoint.pooling.pairs import takes_pairs
from baton.checkpoint.pooling.setup import PoolingSetup, PoolingTask, read_setup

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "a.b.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "a.b.Normalize"}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def folder_with(tmp_path: Path, *, config: Any = CONFIG, **files: Any) -> Path:
    """Write config.json and other files, whose names have ``__`` for slashes."""
    write_json(tmp_path / "config.json", config)
    for name, content in files.items():
        write_json(tmp_path / f"{name.replace('__', '/')}.json", content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3ForCausalLM", ("Qwen3ForCausalLM", Head.TOKENS)),
        ("Qwen3Model", ("Qwen3ForCausalLM", Head.NONE)),
        ("Qwen3ForSequenceClassification", ("Qwen3ForCausalLM", Head.LABELS)),
        ("Gemma3TextModel", ("Gemma3ForCausalLM", Head.NONE)),
        ("Gemma3Model", ("Gemma3Model", Head.TOKENS)),  # it sees images
        ("BertModel", ("BertModel", Head.TOKENS)),  # of no family here
    ],
)
def test_architectures_are_split(name: str, expected: tuple[str, Head]) -> None:
    assert split_architecture(name) == expected


def test_a_plain_model_only_generates(tmp_path: Path) -> None:
    setup = read_setup(folder_with(tmp_path))
    assert (setup.task, setup.generates) == (PoolingTask.NONE, True)
    asked = read_setup(tmp_path, "mean")
    assert (asked.task, asked.generates, asked.kind) == (PoolingTask.EMBED, True, PoolingKind.MEAN)
    assert read_setup(tmp_path, "rerank").task is PoolingTask.RERANK


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PoolingKind.LAST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, PoolingKind.MEAN),
        ({"pooling_mode": "cls", "embedding_dimension": 32}, PoolingKind.CLS),
    ],
)
def test_the_files_of_sentence_transformers_are_read(
    pooling: Any, kind: PoolingKind, tmp_path: Path
) -> None:
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
    folder = folder_with(
        tmp_path,
        modules=[POOLING, NORMALIZE],
        **{"1_Pooling__config": pooling, "config_sentence_transformers": prompts},
    )
    setup = read_setup(folder)
    assert (setup.task, setup.generates) == (PoolingTask.EMBED, False)
    assert (setup.kind, setup.normalizes, setup.hidden_size) == (kind, True, 32)
    assert (setup.prompts, setup.default_prompt) == ({"query": "Q: "}, "query")
    write_json(folder / "modules.json", [POOLING])
    assert not read_setup(folder).normalizes


def test_a_head_for_labels_is_read(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}
    setup = read_setup(folder_with(tmp_path, config=config))
    assert (setup.task, setup.labels, setup.activation) == (
        PoolingTask.CLASSIFY, ("a",), Activation.SIGMOID,
    )  # fmt: skip
    config |= {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}
    assert read_setup(folder_with(tmp_path, config=config)).activation is Activation.SIGMOID
    del config["id2label"], config["problem_type"]
    setup = read_setup(folder_with(tmp_path, config=config))
    assert (setup.labels, setup.activation) == (("LABEL_0", "LABEL_1"), Activation.SOFTMAX)
    with pytest.raises(InvalidRequestError, match="model: generates no text; it makes labels"):
        check_generates(setup)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"modules": [{"type": "x.Dense", "path": ""}]}, "'Dense' is not supported"),
        ({"modules": [{**POOLING, "path": "../x"}]}, "is not a folder of this checkpoint"),
        ({"modules": []}, "must be a list of 1 to 16 modules"),
        ({"modules": [POOLING], "1_Pooling__config": {"pooling_mode": "max"}}, "needs one pooling"),
        (
            {"modules": [POOLING], "1_Pooling__config": {
                "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True,
            }},
            "needs one pooling",
        ),
        (
            {"modules": [POOLING], "1_Pooling__config": {
                "pooling_mode_mean_tokens": True, "include_prompt": False,
            }},
            "include_prompt",
        ),
        ({"config_sentence_transformers": {"prompts": {"a": 1}}}, "prompts: must be texts"),
        (
            {"config_sentence_transformers": {"prompts": {}, "default_prompt_name": "a"}},
            "default_prompt_name: 'a' is no name",
        ),
        ({"config": {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 0}},
         "num_labels: must be a number from 1"),
        ({"config": {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"1": "a"}}},
         "id2label: must have a name"),
    ],
)  # fmt: skip
def test_broken_files_are_refused_in_one_line(files: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=problem) as caught:
        read_setup(folder_with(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"architectures": ["Qwen3Model"]})
    for asked in ("none", "rerank"):
        with pytest.raises(BatonError, match="pooling: this checkpoint has no output head"):
            read_setup(folder, asked)
    with pytest.raises(BatonError, match="pooling: must be one of auto, none"):
        read_setup(folder, "max")
    labels = {"architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(BatonError, match="needs auto, got last"):
        read_setup(folder_with(tmp_path, config=labels), "last")


def test_parameters_are_checked() -> None:
    for params, problem in (
        (PoolingParams(PoolingKind.LABELS), "labels needs a model with"),
        (PoolingParams(PoolingKind.TOKENS), "1 to 16 token_ids, got 0"),
        (PoolingParams(PoolingKind.TOKENS, (9,)), "0 to 8"),
        (PoolingParams(PoolingKind.LAST, (1,)), "for the kind tokens only"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            check_pooling_params(params, vocab_size=9, num_labels=0)


def test_numbers_from_nodes_are_checked() -> None:
    assert pooled_problem(array("f", [1.0, -2.0]).tobytes()) == ""
    assert "got 3" in pooled_problem(b"abc")
    assert "got 0" in pooled_problem(b"")
    for wrong in (math.nan, math.inf):
        assert "finite" in pooled_problem(array("f", [1.0, wrong]).tobytes())


def test_results_are_made_of_numbers() -> None:
    vector = make_embedding(array("f", [3.0, 4.0, 12.0]), normalizes=True, dimensions=2)
    assert vector == array("f", [0.6, 0.8])
    assert list(make_embedding(array("f", [3.0]), normalizes=False)) == [3.0]
    assert activate([1000.0, 1000.0], Activation.SOFTMAX) == [0.5, 0.5]
    assert activate([-1000.0, 0.0], Activation.SIGMOID) == [0.0, 0.5]
    pair = array("f", [2.0, 1.0]).tobytes()
    reranker = PoolingSetup(task=PoolingTask.RERANK)
    assert score_of(reranker, pair) == pytest.approx(1 / (1 + math.exp(-1)))
    assert score_of(PoolingSetup(task=PoolingTask.RERANK, gives_logits=True), pair) == 1.0


def test_the_first_of_prompts_that_share_a_beginning_leads() -> None:
    shared, other = [1] * 4, [2] * 4
    prompts = [[*shared, 5], [*shared, 6], [*shared, 7], [9], [*other, 1], [*other, 2]]
    assert find_leaders(prompts, least=4) == ([0, 4], [1, 2, 3, 5])
    assert find_leaders(prompts, least=5) == ([], [0, 1, 2, 3, 4, 5])


def test_templates_of_pairs_are_recognized() -> None:
    assert takes_pairs("{% if m.role == 'query' %}{% elif m['role'] == \"document\" %}")
    assert not takes_pairs("{% if m.role == 'user' %}")
