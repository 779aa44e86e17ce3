"""Fields of request bodies, as structs: OpenAI's, vLLM's and Baton's own.

Fields that no struct has are ignored, except those in `REFUSED`: ignoring them would change the
answer, so they are errors (see `router/api/http/decoding.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_SHOWN_CHARS = 256  # maximum number of characters that errors quote from a client
# Fields of other APIs that change the answer and are not supported -> the error's text.
REFUSED = {
    "functions": "is not supported: use tools",
    "bad_words": "is not supported: use banned_token_ids or logit_bias",
    "truncate_prompt_tokens": "is not supported: cut the prompt",
    "logits_processors": "is not supported",
    "mcp_servers": "is not supported: give tools",
    "container": "is not supported",
    "prompt_embeds": "is not supported: give texts or token ids",
    # Other servers constrain outputs by these fields. Without the constraint, the answer would be
    # wrong.
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
    """Options of a stream.

    Attributes:
        include_usage: whether the stream ends with a chunk that has the usage and no choices.
        continuous_usage_stats: vLLM's field: whether each chunk has the usage up to this chunk.
        include_obfuscation: OpenAI's field: whether to pad chunks; ignored, because padding costs
            bandwidth and hides little.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Constraint(msgspec.Struct):
    """Base class of objects that constrain outputs; unknown fields of these objects are errors."""


class JsonSchema(Constraint):
    """A JSON Schema with a name; enforced whether ``strict`` is true or false."""

    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Constraint):
    """A response format in OpenAI's form, or in the forms of other servers.

    Attributes:
        schema: the schema in the form of llama.cpp, Together, Fireworks and the Responses API, for
            ``json_schema`` and ``json_object``.
        value: the schema or regex in text-generation-inference's form, for ``json``,
            ``json_object`` and ``regex``.
        pattern: the regex in Together's form, for ``regex``.
        grammar: the grammar in Fireworks' form, for ``grammar``.
        name, description, strict: accepted without effect.
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
    """vLLM's object ``structured_outputs``: a constraint on the output, under vLLM's names.

    Attributes:
        disable_fallback, disable_any_whitespace: vLLM's fields; accepted without effect, because
            Baton always does what they ask for.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


class TypedGrammar(Constraint):
    """A constraint on the output in the form of text-generation-inference: its type and value."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class PromptCacheOptions(msgspec.Struct):
    """OpenAI's options of its prompt cache.

    Attributes:
        mode: accepted without effect: prompts are always cached.
        ttl: how long nodes keep the prompt and its answer in their prefix caches, such as ``30m``.
    """

    mode: str | None = None
    ttl: str | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """Fields with the same meaning in completions, chat and responses. None: a field is absent.

    Attributes:
        cache_salt: vLLM's field: prompts with different salts do not share any cached blocks.
        session_id: Baton's field: requests with the same session id share a prefix, so some
            routing policies send them to the same nodes.
        priority: vLLM's field: among waiting requests, smaller values go first.
        prompt_cache_key: OpenAI's field: acts as a ``session_id`` if the request has none.
        prompt_cache_retention: OpenAI's field: how long nodes keep the prompt and its answer in
            their prefix caches: ``in_memory`` (10 minutes) or ``24h``.
        prompt_cache_options: OpenAI's newer field, whose ``ttl`` has the same meaning.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class SamplingRequest(SharedFields, kw_only=True):
    """Fields that completions and chat share. None means that a field is absent.

    Attributes:
        guided_json: vLLM's older name of ``json`` in ``structured_outputs``; the other ``guided_``
            fields are older names, too.
        json_schema: llama.cpp's and SGLang's field: a JSON Schema of the output.
        regex, ebnf: SGLang's fields: a regex or a grammar of the output.
        grammar: llama.cpp's and text-generation-inference's field: a grammar of the output.
        format: Ollama's field: ``"json"``, or a JSON Schema of the output.
        skip_special_tokens: vLLM's field: whether special tokens are left out of the text; the
            default is true.
        include_stop_str_in_output: vLLM's field: whether the text includes the stop string that
            ended it.
        return_token_ids: vLLM's field: whether to return the token ids of prompt and output.
        prompt_logprobs: vLLM's field: number of top logprobs per prompt token.
        include_receipt: Baton's field: whether to add ``"baton": {"receipts": [...]}`` to the
            response.
        use_beam_search: vLLM's field: whether the outputs are the best ones of a beam search.
        best_of: number of beams; absent: ``n``. Without a beam search, ``best_of`` must equal
            ``n``.
        length_penalty: vLLM's field: exponent of the length in a beam's score; default 1.
        early_stopping: vLLM's field: when a beam search ends; see `BeamSearchParams`.
        user: accepted without effect, as are all fields below.
    """

    n: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
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
    include_receipt: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    Attributes:
        add_special_tokens: vLLM's field: whether a text prompt gets the checkpoint's special tokens
            (such as BOS); the default is true.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ImageUrl(msgspec.Struct):
    """The URL of an image: a data URL, or an http(s) URL of a host that the operator allows.

    Attributes:
        detail: accepted without effect, because each model resizes images by its own rule.
    """

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content: a text or, in a user's message, an image.

    Attributes:
        image_url: the image of a part of type ``image_url``, as an object or as a bare URL.
    """

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call that the model made in an earlier turn."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message of a conversation.

    Unknown fields are ignored, because clients send messages of earlier responses back.
    """

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
        parameters: JSON Schema of the arguments.
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
    """Switches thinking before the answer, with a budget in tokens.

    Attributes:
        type: Anthropic's, DeepSeek's and Z.ai's field; ``adaptive`` and ``between_tools`` mean
            ``enabled``.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None


class ReasoningConfig(msgspec.Struct):
    """How much the model thinks: OpenAI's effort level, or OpenRouter's number of tokens.

    Attributes:
        enabled: OpenRouter's field; false means the effort level ``none``.
    """

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None


class ChatRequest(SamplingRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    Attributes:
        modalities: kinds of output; only text is supported.
        reasoning_effort: the effort level; the chat template gets the level, or, if the template
            knows no levels, the level becomes a budget of thinking tokens.
        reasoning: the effort level, or a budget in tokens.
        thinking: switches thinking on or off, with a budget in tokens.
        thinking_token_budget: vLLM's field: maximum number of thinking tokens.
        documents: documents that the chat template writes into the prompt.
        add_generation_prompt: vLLM's field: whether the prompt ends with the beginning of an
            assistant's message, instead of after the last message.
        continue_final_message: vLLM's field: whether the output continues the last message's text.
        chat_template: vLLM's field: a template that replaces the checkpoint's, if the operator
            allows it.
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
