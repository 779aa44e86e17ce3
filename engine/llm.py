"""LLM: the engine in one process, no network. The reference that the split system must equal.

from engine import LLM
LLM("examples/demo_model").generate(["def read_config(path):"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engine_config import EngineConfig
from baton.errors import InvalidRequestError
from baton.model_folder import find_model_folder
from baton.outputs import Completion, FinishReason
from baton.prompt import check_prompt, draw_seed
from baton.sampling_params import SamplingParams
from baton.tokenizer import Tokenizer
from engine.engine import Engine
from engine.request import Request

Prompt = str | Sequence[int]


class LLM:
    """Completes prompts offline.

    Args:
        model: a folder in Hugging Face format, or a hub id.
        options: fields of EngineConfig, such as ``dtype="float32"``.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: an option is wrong.
    """

    def __init__(self, model: str, **options: Any) -> None:
        folder = find_model_folder(str(model))
        self.engine = Engine(folder, EngineConfig(**options))
        self.tokenizer = Tokenizer(folder) if Tokenizer.exists_in(folder) else None
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete each prompt.

        Args:
            prompts: texts or lists of token ids; one or many.
            sampling_params: for all prompts, or one per prompt.

        Returns:
            Completions in prompt order; ``text`` is empty for a checkpoint without a tokenizer.

        Raises:
            InvalidRequestError: a prompt or a parameter is outside its limit; nothing was run.
        """
        prompt_list = _as_list(prompts)
        params_list = _one_per_prompt(sampling_params, len(prompt_list))
        requests = [
            self._make_request(prompt, params)
            for prompt, params in zip(prompt_list, params_list, strict=True)
        ]
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
        return [self._completion(request) for request in requests]

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self._tokenize(prompt)
        engine = self.engine
        check_prompt(
            token_ids,
            vocab_size=engine.model_config.vocab_size,
            max_model_len=engine.max_model_len,
        )
        self._num_requests += 1
        return Request.create(
            f"offline-{self._num_requests}",
            token_ids,
            params,
            seed=draw_seed() if params.seed is None else params.seed,
            eos_token_ids=engine.eos_token_ids,
            max_model_len=engine.max_model_len,
        )

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token_id) for token_id in prompt]
        if self.tokenizer is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        return self.tokenizer.encode(prompt)

    def _completion(self, request: Request) -> Completion:
        token_ids = request.output_token_ids
        return Completion(
            request_id=request.request_id,
            text=self.tokenizer.decode(token_ids) if self.tokenizer else "",
            token_ids=tuple(token_ids),
            finish_reason=request.status.finish_reason or FinishReason.ABORT,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # a single list of token ids
    return list(prompts)  # type: ignore[arg-type]  # a list of prompts


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            "sampling_params", f"must be one or {num_prompts} (one per prompt), got {len(params)}"
        )
    return list(params)
