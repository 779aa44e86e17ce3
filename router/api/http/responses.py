"""Response objects of OpenAI's API, as msgspec structs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from baton.api.outputs import Receipt, TextDelta


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Counts of the draft tokens that a node checked: accepted and rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a request. The prompt counts once, even for several outputs.

    Attributes:
        prompt_tokens_details: number of cached prompt tokens; None before the output's end.
        completion_tokens_details: counts of draft tokens; unset before the output's end, or if
            there were no drafts.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Receipts(msgspec.Struct):
    """Baton's extension: latency receipts of the choices that have ended, in the choices' order."""

    receipts: list[Receipt]


class Response(msgspec.Struct, kw_only=True):
    """A whole response, or one chunk of a stream.

    Attributes:
        object: kind of response, such as ``"chat.completion.chunk"``.
        prompt_token_ids, prompt_logprobs: tokens of a chat's prompt and their logprobs, if the
            request asks for them.
        usage: unset in chunks unless the stream asks for it.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    baton: Receipts | UnsetType = UNSET


class FunctionObject(msgspec.Struct):
    name: str
    arguments: str


class ToolCallObject(msgspec.Struct):
    id: str
    function: FunctionObject
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    """A piece of a tool call; only the first piece of a call has the function's name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The assistant's message in a response.

    Attributes:
        reasoning_content: the model's reasoning; ``reasoning``, the newer name of the field, has
            the same text.
    """

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallObject] | UnsetType = UNSET
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET


class MessageDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a text, one entry per token; the first token of a prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, gc=False):
    """A prompt token's logprob, as vLLM writes it.

    Attributes:
        rank: the token's place among the most probable tokens; None if it is not among the
            listed ones.
    """

    logprob: float
    rank: int | None
    decoded_token: str


class Choice(msgspec.Struct, kw_only=True):
    """Base class of choices: the fields that vLLM adds to each choice on request."""

    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(Choice):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(Choice):
    """One choice in a completions response or chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class ModelObject(msgspec.Struct):
    """A model name in OpenAI's list of models, with vLLM's fields.

    Attributes:
        root: digest of the adapter, or else the first name of the base model; names with equal
            roots are served by the same weights.
        parent: first name of an adapter's base model; None: the name itself is a base model's.
        input_modalities: OpenRouter's field: kinds of input that prompts may contain.
    """

    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    input_modalities: tuple[str, ...] = ("text",)
    owned_by: str = "baton"


class VersionObject(msgspec.Struct):
    version: str


class LoadObject(msgspec.Struct):
    server_load: int


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"


def usage_of(receipts: Iterable[Receipt], num_choices: int) -> Usage:
    """Add up the usage of all outputs of a request.

    Args:
        receipts: one per output, grouped by prompt.
        num_choices: number of outputs per prompt; a prompt's tokens count once.
    """
    prompt_tokens, completion_tokens, cached_tokens = 0, 0, 0
    receipts = list(receipts)
    for index, receipt in enumerate(receipts):
        completion_tokens += receipt.num_output_tokens
        if index % num_choices == 0:
            prompt_tokens += receipt.num_prompt_tokens
            cached_tokens += receipt.num_cached_tokens
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        _completion_tokens_details(receipts),
    )


def _completion_tokens_details(
    receipts: Iterable[Receipt],
) -> CompletionTokensDetails | UnsetType:
    decodes = [receipt.decode for receipt in receipts if receipt.decode is not None]
    num_drafts = sum(decode.num_drafts for decode in decodes)
    if not num_drafts:
        return UNSET
    num_accepted = sum(decode.num_accepted_drafts for decode in decodes)
    return CompletionTokensDetails(num_accepted, max(num_drafts - num_accepted, 0))


def usage_up_to(num_prompt_tokens: int, delta: TextDelta) -> Usage:
    """Return the usage of one output of a stream up to and including a delta.

    Cached tokens and drafts are known only at the last delta.
    """
    num_tokens = delta.output_index + len(delta.token_ids)
    usage = Usage(num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens)
    if delta.receipt is not None:
        usage.prompt_tokens_details = PromptTokensDetails(delta.receipt.num_cached_tokens)
        usage.completion_tokens_details = _completion_tokens_details([delta.receipt])
    return usage
