"""From the fields of a request to SamplingParams: OpenAI's defaults, vLLM's names for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from router.api.http.schema import ResponseFormat, SamplingRequest, StructuredOutputs

TOGETHER = "cannot be together with "  # how an error begins that names another field
# Names and meanings that OpenAI's or vLLM's requests and SamplingParams share.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "banned_token_ids",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(
    request: SamplingRequest,
    *,
    max_tokens: int,
    defaults: Mapping[str, Any] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured_output: StructuredOutput | None = None,
) -> SamplingParams:
    """The parameters of one output; raises InvalidRequestError.

    Args:
        defaults: of what the request does not say.
        structured_output: what something else than ``response_format`` asks for.
    """
    given: dict[str, Any] = dict(defaults or {})
    given.update({name: value for name in _SAME if (value := getattr(request, name)) is not None})
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0)  # -1 is off, too
    with as_client_wrote(request):
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_output=_only_one(request, structured_output),
            **given,
        )


@contextmanager
def as_client_wrote(request: SamplingRequest) -> Iterator[None]:
    """Errors about a structured output name the field that it came in."""
    try:
        yield
    except InvalidRequestError as error:
        outer, _, kind = error.field.partition(".")
        if outer != "structured_output":
            raise
        kind = "json" if kind == "json_schema" else kind
        if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
            field = "tools"
        elif request.response_format is not None:
            field = "response_format.json_schema.schema"
        elif request.structured_outputs is not None:
            field = "structured_outputs" + (f".{kind}" if kind else "")
        elif getattr(request, f"guided_{kind}", None) is not None:
            field = f"guided_{kind}"
        else:
            field = "tools"
        raise InvalidRequestError(field, error.problem) from None


def _only_one(
    request: SamplingRequest, structured_output: StructuredOutput | None
) -> StructuredOutput | None:
    wanted = {
        "response_format": _of_response_format(request.response_format),
        "structured_outputs": _of_structured_outputs(request.structured_outputs),
        **_of_guided(request),
        "tool_choice": structured_output,
    }
    if structured_output is not None:
        wanted["response_format"] = None  # of the text, which an output that is a call has not
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequestError(list(given)[1], TOGETHER + next(iter(given)))
    return next(iter(given.values()), None)


def _of_response_format(given: ResponseFormat | None) -> StructuredOutput | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutput(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        raise InvalidRequestError("response_format.json_schema.schema", "is needed")
    return StructuredOutput(json_schema=given.json_schema.schema)


def _of_guided(request: SamplingRequest) -> dict[str, StructuredOutput]:
    """What fields of older versions of vLLM ask for."""
    found = {}
    if request.guided_json is not None:
        found["guided_json"] = StructuredOutput(json_schema=request.guided_json)
    if request.guided_regex is not None:
        found["guided_regex"] = StructuredOutput(regex=request.guided_regex)
    if request.guided_choice is not None:
        found["guided_choice"] = StructuredOutput(choice=tuple(request.guided_choice))
    if request.guided_grammar is not None:
        found["guided_grammar"] = StructuredOutput(grammar=request.guided_grammar)
    return found


def _of_structured_outputs(given: StructuredOutputs | None) -> StructuredOutput | None:
    if given is None:
        return None
    return StructuredOutput(
        json_schema=given.json,
        regex=given.regex,
        choice=tuple(given.choice or ()),
        grammar=given.grammar,
        json_object=bool(given.json_object),
    )
