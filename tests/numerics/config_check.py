"""Load a config.json with transformers and with Baton, and compare what both compute.

Weights are random, in the shapes that transformers derives from the config; both load the same
file. Refuses to know: which configs, what is asserted.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from baton.api.errors import BatonError
from baton.api.outputs import TokenLogprobs
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams
from engine import LLM
from models.config import ModelConfig
from models.recipe import AttentionSpec
from tests.numerics.config_fields import (
    Config,
    read_by_module,
    read_by_transformers,
    text_config_class,
)
from tests.numerics.family_checkpoints import VOCAB_SIZE
from tests.numerics.tiny_models import fill_small_weights, hugging_face_logits, save

NUM_TOKENS = 28  # longer than the windows of the tiny checkpoints
MAX_DIFFERENCE = 1e-3  # of a logprob: large layers sum in another order
_MAX_WEIGHTS = 30_000_000
_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


class Outcome(StrEnum):
    """Result of reading a config."""

    EQUAL = "equal"
    REFUSED = "refused by name"
    CONTRADICTS = "refused by another name"
    NO_REFERENCE = "transformers refuses"
    DIFFERENT = "different"
    FAILED = "failed"  # with another error than a refusal


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, with the difference or the error's text."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Theirs:
    weights: str  # key of the saved weights
    logprobs: Tensor  # [num_tokens, vocab_size]
    model: Any


class ConfigCheck:
    """Check many configs of one architecture; keeps earlier results of both sides.

    Args:
        architecture: name of a registered architecture.
        folder: an empty folder, for checkpoints.
    """

    def __init__(self, architecture: str, folder: Path) -> None:
        self._model_class = getattr(transformers, architecture)
        self._folder = folder
        self._weights: dict[str, dict[str, Tensor]] = {}
        self._theirs: dict[str, _Theirs] = {}
        self._ours: dict[str, list[TokenLogprobs | None]] = {}
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
        self._prompt: list[int] = drawn.tolist()
        aliases = text_config_class(architecture).attribute_map
        read = read_by_transformers(self._model_class) | {"tie_word_embeddings", "return_dict"}
        # transformers reads the range only to draw weights, and a checkpoint has weights.
        self._read = {aliases.get(name, name) for name in read} - {"initializer_range"}

    def check(self, config: Config, names: Collection[str]) -> Verdict:
        """Compare both sides on one config.json.

        Args:
            config: the whole file.
            names: names by which a refusal may call the changed field.

        Raises:
            Exception: Baton failed otherwise than by a refusal of one line.
        """
        try:
            parsed = ModelConfig.from_dict(config)
            theirs = self._load_theirs(config)
            if isinstance(theirs, str):
                return Verdict(Outcome.NO_REFERENCE, theirs)
            ours = self._run_ours(config, parsed, theirs.weights)
        except BatonError as error:
            return _refusal(error, names)
        return self._compare(theirs, ours, parsed, config)

    def _load_theirs(self, config: Config) -> _Theirs | str:
        """Run transformers; return its results, or its error's text."""
        try:
            read = self._read_config(config)
            key = self._key(read)
            if key not in self._theirs:
                self._theirs[key] = self._run_theirs(read)
            return self._theirs[key]
        except _TooLargeError:
            raise
        except Exception as error:  # whatever a library raises for odd values
            return f"{type(error).__name__}: {error}"

    def _read_config(self, config: Config) -> Any:
        path = self._folder / "config.json"
        path.write_text(json.dumps(config))
        return self._model_class.config_class.from_json_file(path)

    def _key(self, config: Any) -> str:
        """Return the parts of a config that the model reads."""
        whole = config.to_dict()
        parts = [whole.pop("text_config", {}), whole]
        read = [{n: v for n, v in part.items() if n in self._read} for part in parts]
        return json.dumps(read, sort_keys=True, default=str)

    def _make_theirs(self, config: Any) -> Any:
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            empty = self._model_class(config)
        num_weights = sum(one.numel() for one in empty.parameters())
        if num_weights > _MAX_WEIGHTS:
            raise _TooLargeError(f"{num_weights} weights")
        torch.manual_seed(0)
        model = self._model_class(config).eval()
        fill_small_weights(model)
        return model

    def _run_theirs(self, config: Any) -> _Theirs:
        model = self._make_theirs(config)
        shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        weights = str(hash((tuple(shapes.items()), bool(model.config.tie_word_embeddings))))
        if weights in self._weights:
            model.load_state_dict(self._weights[weights])
        else:
            save(model, self._folder / weights)
            self._weights[weights] = model.state_dict()
        logits = hugging_face_logits(model, self._prompt)
        if not torch.isfinite(logits).all():
            raise ValueError("logits are not finite")
        return _Theirs(weights, logits.double().log_softmax(-1), model)

    def _in_double(self, model: Any) -> Tensor:
        """Return transformers' logprobs in float64: ``[num_tokens, vocab_size]``.

        With rounded numbers, a router may choose another expert where two are almost equal, which
        changes a logprob by more than the limit.
        """
        double = copy.deepcopy(model).double()
        double.set_experts_implementation("eager")  # the default has no float64
        return hugging_face_logits(double, self._prompt).log_softmax(-1)

    def _run_ours(
        self, config: Config, parsed: ModelConfig, weights: str
    ) -> list[TokenLogprobs | None]:
        """Compute logprobs of the prompt's tokens but the first, and of the token after it."""
        key = f"{weights} {parsed}"
        if key in self._ours:
            return self._ours[key]
        folder = self._folder / "ours"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for path in (self._folder / weights).glob("model*"):
            (folder / path.name).symlink_to(path)
        # Large blocks, for the largest states that a changed field asks for.
        options: dict[str, Any] = {"block_size": 128, "num_blocks": 40, "dtype": "float32"}
        llm = LLM(str(folder), max_num_requests=2, **options)
        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=MAX_LOGPROBS, logprobs=MAX_LOGPROBS
        )
        [done] = llm.generate([self._prompt], params)
        self._ours[key] = [*done.prompt_logprobs[1:], *done.logprobs]
        return self._ours[key]

    def _compare(
        self,
        theirs: _Theirs,
        ours: list[TokenLogprobs | None],
        parsed: ModelConfig,
        config: Config,
    ) -> Verdict:
        difference = _difference(ours, theirs.logprobs)
        if not difference <= MAX_DIFFERENCE:  # or NaN
            difference = _difference(ours, self._in_double(theirs.model))
        if not difference <= MAX_DIFFERENCE:
            return Verdict(Outcome.DIFFERENT, f"logprobs by {difference:.2g}")
        # Compare fields that hardly show in a short prompt of a tiny model.
        text = self._read_config(config).get_text_config()
        for name in _EPS:
            is_field = name in type(text).__dataclass_fields__
            if is_field and getattr(text, name) != parsed.rms_norm_eps:
                return Verdict(Outcome.DIFFERENT, f"{name} {parsed.rms_norm_eps}")
        windows = _windows_of_theirs(self._model_class, text)
        if windows is not None and windows != _windows_of_ours(parsed):
            return Verdict(Outcome.DIFFERENT, f"windows {windows}, not {_windows_of_ours(parsed)}")
        return Verdict(Outcome.EQUAL, f"{difference:.1g}")


class _TooLargeError(Exception):
    """A model of this config is too large to compare; make the changed value smaller."""


def _difference(ours: list[TokenLogprobs | None], theirs: Tensor) -> float:
    largest = 0.0
    for found, expected in zip(ours, theirs, strict=True):
        assert found is not None
        token_ids = [token_id for token_id, _ in found.top]
        logprobs = torch.tensor([logprob for _, logprob in found.top], dtype=torch.double)
        largest = max(largest, float((logprobs - expected[token_ids]).abs().max()))
    return largest


def _windows_of_theirs(model_class: type, text: Any) -> tuple[int | None, ...] | None:
    """Return each layer's window; None if the architecture has no windows."""
    read = read_by_module(sys.modules[model_class.__module__])
    if "sliding_window" not in read or "sliding_window" not in type(text).__dataclass_fields__:
        return None
    all_windowed = ["sliding_attention"] * text.num_hidden_layers
    types = text.layer_types if "layer_types" in read else all_windowed
    return tuple(text.sliding_window if one == "sliding_attention" else None for one in types)


def _windows_of_ours(config: ModelConfig) -> tuple[int | None, ...]:
    mixers = (layer.mixer for layer in config.layers)
    return tuple(one.window if isinstance(one, AttentionSpec) else None for one in mixers)


def _refusal(error: BatonError, names: Collection[str]) -> Verdict:
    text = str(error)
    assert "\n" not in text, text
    _, _, problem = text.partition(": ")
    named = any(re.search(rf"\b{re.escape(name)}\b", problem) for name in names)
    return Verdict(Outcome.REFUSED if named else Outcome.CONTRADICTS, text)
