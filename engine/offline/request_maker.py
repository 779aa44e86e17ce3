"""RequestMaker: checks the prompts of an `LLM` and makes an engine's requests from them.

    text, ids, conversation, images -> token ids -> one Request per wanted output

Refuses to know: steps, answers, names of adapters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.adapters.digest import AdapterDigest
from baton.api.errors import InvalidRequestError
from baton.api.prompt import (
    check_priority,
    check_prompt,
    check_sampling_params,
    choice_request_id,
    choice_seed,
    draw_seed,
)
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.pooling.answers import check_generates
from baton.checkpoint.pooling.setup import PoolingSetup
from baton.media.expand import as_written
from baton.text.thoughts.marks import ThoughtFinder, find_marks
from baton.text.tokenizer import Tokenizer
from engine.core.request import Request
from engine.engine import Engine
from engine.offline.images import take_images, with_images
from engine.offline.prompts import Conversation, Prompt, ReadPrompt, is_conversation


class RequestMaker:
    """Makes the requests of one `LLM`. Raises InvalidRequestError for what is outside its limit.

    Args:
        engine: the engine that gets the requests.
        tokenizer: the checkpoint's tokenizer; None: prompts are token ids.
        setup: the model's poolings; some models do not generate.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, setup: PoolingSetup) -> None:
        self._engine, self._tokenizer, self._setup = engine, tokenizer, setup
        self._numbers = itertools.count(1)  # a number per prompt, for its request ids

    def make_choices(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams,
        adapter: AdapterDigest,
        priority: int,
        *,
        compiles_grammar: bool,
    ) -> list[Request]:
        """Make one request per wanted output (``SamplingParams.n``) of a prompt.

        Args:
            adapter: digest of an adapter; empty: the base model.
            compiles_grammar: whether to wait until a grammar is compiled; if False, the engine
                compiles the grammar while other requests run.
        """
        engine = self._engine
        check_generates(self._setup)
        read = prompt if isinstance(prompt, ReadPrompt) else self.read(prompt)
        token_ids = read.token_ids
        prompt_images = engine.features.images.of_prompt(read.images, token_ids)
        params = self._with_marks(params, token_ids)
        check_sampling_params(params, vocab_size=engine.model_config.vocab_size)
        self._check_priority(priority)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop", "this checkpoint has no tokenizer.json")
        number = next(self._numbers)
        compiles_now = compiles_grammar or params.structured_output is None
        seed = draw_seed() if params.seed is None else params.seed
        return [
            Request.create(
                choice_request_id(f"offline-{number}", index),
                token_ids,
                params,
                seed=choice_seed(seed, index),
                eos_token_ids=engine.eos_token_ids,
                max_model_len=engine.max_model_len,
                adapter=adapter,
                priority=priority,
                grammar=engine.features.grammars.compile_for(params) if compiles_now else None,
                images=prompt_images,
            )
            for index in range(params.n)
        ]

    def encode_chats(self, conversations: Conversation | Sequence[Conversation]) -> list[Prompt]:
        """Return the prompt of each conversation, made by the checkpoint's chat template.

        Raises InvalidRequestError if the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("chat", "this checkpoint has no tokenizer.json")
        many = [conversations] if is_conversation(conversations) else conversations
        return [self._render(messages) for messages in many]  # type: ignore[arg-type]  # checked

    def _render(self, messages: Conversation) -> Prompt:
        assert self._tokenizer is not None
        plain, images = take_images(messages)
        layout = self._engine.features.images.layout if images else None
        replaced = None if layout is None else (layout.marker, layout.written)
        token_ids = self._tokenizer.encode_chat(plain, replaced=replaced)
        return {"prompt": token_ids, "images": images} if images else token_ids

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Tokenize a prompt, replace its image markers by tokens, and check the result."""
        engine = self._engine
        images: Sequence[Any] = ()
        if isinstance(prompt, Mapping):
            images, prompt = prompt.get("images", ()), prompt["prompt"]
        layout = engine.features.images.layout if images else None
        if layout is not None and isinstance(prompt, str):
            prompt = as_written(prompt, layout)
        token_ids, placed = with_images(self._tokenize(prompt), images, layout)
        check_prompt(
            token_ids,
            vocab_size=engine.model_config.vocab_size,
            max_model_len=engine.max_model_len,
        )
        return ReadPrompt(token_ids, placed)

    def _with_marks(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """Fill in the marks that delimit the checkpoint's thoughts; raises InvalidRequestError."""
        asked = params.thinking
        if asked is None or asked.close_token_ids:
            return params
        if self._tokenizer is None:
            raise InvalidRequestError("thinking", "this checkpoint has no tokenizer.json")
        finder = ThoughtFinder(self._tokenizer, find_marks(self._tokenizer))
        thinking = finder.thinking(
            prompt, budget_tokens=asked.budget_tokens, must_open=asked.must_open
        )
        return replace(params, thinking=thinking)

    def _check_priority(self, priority: int) -> None:
        check_priority(priority)
        if priority and not self._engine.by_priority:
            raise InvalidRequestError(
                "priority", 'needs LLM(..., scheduling_policy="priority"), which is "fcfs"'
            )

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token_id) for token_id in prompt]
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        return self._tokenizer.encode(prompt)
