"""The prompts of `LLM` and `AsyncLLM`: their types, and arguments for all prompts or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.images import PromptImage
from baton.api.sampling_params import SamplingParams
from engine.offline.images import ImagePrompt

Prompt = str | Sequence[int] | ImagePrompt
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The token ids of a prompt, in which tokens of images have replaced the image markers.

    Attributes:
        images: the images of the prompt with their files, in order.
    """

    token_ids: list[int]
    images: tuple[PromptImage, ...] = ()


def is_conversation(value: object) -> bool:
    """Return whether a value is one conversation, that is, a list of messages."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def without_images(inputs: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """Return a pooling method's inputs as a list; raises InvalidRequestError for images."""
    listed = [one for one in as_list(inputs) if not isinstance(one, Mapping)]
    if len(listed) < len(as_list(inputs)):
        raise InvalidRequestError("inputs", "must be texts or token ids, got images")
    return listed


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # a single list of token ids
    return list(prompts)  # type: ignore[arg-type]  # a list of prompts


def name_per_prompt(field: str, given: str | Sequence[str], num_prompts: int) -> list[str]:
    """Return an argument with names, such as those of adapters, as a list with a name per prompt.

    Args:
        field: name of the argument, for errors.
    """
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        problem = f"must be a name or a name per prompt, got {given!r:.80}"
        raise InvalidRequestError(field, problem)
    names = [given] * num_prompts if isinstance(given, str) else list(given)
    if len(names) != num_prompts:
        problem = f"must be one or {num_prompts} (one per prompt), got {len(names)}"
        raise InvalidRequestError(field, problem)
    return names


def priority_per_prompt(priority: int | Sequence[int], num_prompts: int) -> list[int]:
    priorities = [priority] * num_prompts if isinstance(priority, int) else list(priority)
    if len(priorities) != num_prompts:
        problem = f"must be one or {num_prompts} (one per prompt), got {len(priorities)}"
        raise InvalidRequestError("priority", problem)
    return priorities


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            "sampling_params", f"must be one or {num_prompts} (one per prompt), got {len(params)}"
        )
    return list(params)
