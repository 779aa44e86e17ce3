"""What clients may send: the fields of OpenAI's requests, vLLM's and Baton's own, as structs.

A field that is not here has no effect (`router/api/http/decoding.py` finds it); `REFUSED` are those
of others whose effect would be missed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_SHOWN_CHARS = 256  # of what a client wrote, in an error about it
# Fields of others' APIs without which the answer would not be the one that was asked for.
REFUSED = {
    "functions": "is not supported: use tools",
    "use_beam_search": "is not supported",
    "bad_words": "is not supported: use banned_token_ids or logit_bias",
    "truncate_prompt_tokens": "is not supported: cut the prompt",
    "logits_processors": "is not supported",
    "mcp_servers": "is not supported: give tools",
    "container": "is not supported",
    "prompt_embeds": "is not supported: give texts or token ids",
    # What others let constrain an output; where a request knows such a field, it is enforced.
    **dict.fromkeys(
        (
            "response_format", "json_schema", "regex", "grammar", "ebnf", "format", "output_format",
            "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_whitespace_pattern", "structural_tag", "response_schema", "grammar_lazy",
            "grammar_triggers", "stop_regex",
        ),
        "is not supported here: use structured_outputs",
    ),
}  # fmt: skip


class StreamOptions(msgspec.Struct):
    """How to stream.

    Attributes:
        include_usage: in a last chunk without a choice.
        continuous_usage_stats: vLLM's; in every chunk what its choice has cost up to there.
        include_obfuscation: of OpenAI's; it costs bandwidth and hides little here. Not done.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Constraint(msgspec.Struct):
    """Base of objects that say what an output must be; a field that is unknown is an error."""


class JsonSchema(Constraint):
    """A named JSON schema; always enforced, ``strict`` or not."""

    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Constraint):
    """OpenAI's way to ask for JSON, and those of others.

    Attributes:
        schema: where llama.cpp, Together, Fireworks and the Responses API have it; with
            ``json_object``, too.
        value: text-generation-inference's, of the types ``json``, ``json_object`` and ``regex``.
        pattern: Together's, of the type ``regex``.
        grammar: Fireworks', of the type ``grammar``.
        name: and those after it: of the schema, without an effect.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | str | None = None
    pattern: str | None = None
    grammar: str | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(Constraint):
    """vLLM's way to ask for structured output, by its names.

    Attributes:
        disable_fallback: and the one after it: vLLM's, what is done here in any case.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


class TypedGrammar(Constraint):
    """text-generation-inference's way to ask for structured output."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class SamplingRequest(msgspec.Struct, kw_only=True):
    """What both kinds of requests have. ``None`` is as if the field was not there.

    Attributes:
        guided_json: and those after it: older names of what ``structured_outputs`` has.
        json_schema: llama.cpp's and SGLang's; ``regex`` and ``ebnf`` are SGLang's.
        grammar: llama.cpp's, or text-generation-inference's.
        format: Ollama's; ``"json"`` or a schema.
        skip_special_tokens: vLLM's; False: the text shows them.
        include_stop_str_in_output: vLLM's; the text ends behind the stop string, not before it.
        return_token_ids: vLLM's; adds the ids of prompt and output.
        prompt_logprobs: vLLM's; of the prompt's tokens, in a form of vLLM's own.
        cache_salt: vLLM's; prompts with different ones share no cache.
        include_receipt: Baton's; adds ``"baton": {"receipts": [...]}`` to the response.
        session_id: Baton's; requests with the same one share a beginning. OpenAI's ``user`` is
            somebody who may have many.
        priority: vLLM's; where requests wait, smaller goes first.
        user: and those after it: taken from clients that send them, without an effect.
    """

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | TypedGrammar | None = None
    format: dict[str, Any] | str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    include_receipt: bool | None = None
    session_id: str | None = None
    priority: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    Attributes:
        add_special_tokens: vLLM's; False: those that the checkpoint adds to a text are left out.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message; what else responses carry, and clients send back, is passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct):
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ThinkingSwitch(msgspec.Struct):
    """Whether the model thinks before it answers, and for how many tokens at most.

    Attributes:
        type: as Anthropic's, DeepSeek's and Z.ai's clients send it; ``adaptive`` and
            ``between_tools`` are as ``enabled``.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None


class ReasoningConfig(msgspec.Struct):
    """How much the model thinks: a level of OpenAI's, or OpenRouter's number of tokens.

    Attributes:
        enabled: OpenRouter's; False is the level ``none``.
    """

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None


class ChatRequest(SamplingRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    Attributes:
        modalities: of the answer; the model writes text.
        reasoning_effort: a level, for the chat template or as a budget of thought tokens.
        reasoning: the level, or the budget itself.
        thinking: whether the model thinks, and the budget.
        thinking_token_budget: vLLM's name for the budget.
        documents: for the chat template.
        add_generation_prompt: vLLM's; False: the prompt ends behind the last message.
        continue_final_message: vLLM's; the prompt ends with the last message's own text.
        chat_template: vLLM's; the client's own, where the operator trusts them.
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningConfig | None = None
    thinking: ThinkingSwitch | None = None
    thinking_token_budget: int | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
