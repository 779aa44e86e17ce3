"""Convert request fields to SamplingParams, with OpenAI's defaults and vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from baton.api.beam_search import BeamSearchParams
from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from router.api.http.schema import ResponseFormat, SamplingRequest, TypedGrammar

# Beginning of errors about two fields that exclude each other
TOGETHER = "cannot be together with "
# Fields with the same name and meaning in requests and in SamplingParams.
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
    """Return the parameters of one output; raises InvalidRequestError.

    Args:
        defaults: values of parameters that the request omits; a beam search ignores them.
        structured_output: constraint that a chat's tools put on the output; replaces the
            constraint of ``response_format``.
    """
    given: dict[str, Any] = {"temperature": 0} if request.use_beam_search else dict(defaults or {})
    given.update({name: value for name in _SAME if (value := getattr(request, name)) is not None})
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0)  # -1 means off, as 0 does
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
    """Use the client's own field names in errors about structured outputs and beams."""
    try:
        yield
    except InvalidRequestError as error:
        outer, _, kind = error.field.partition(".")
        if outer == "beam_width":
            field = "n" if request.best_of is None else "best_of"
            raise InvalidRequestError(field, error.problem) from None
        if outer != "structured_output":
            raise
        field = next(iter(_asked(request)), "tools")
        if _must_call(request):
            field = "tools"
        elif field == "structured_outputs" and kind:
            field = f"{field}.{'json' if kind == 'json_schema' else kind}"
        raise InvalidRequestError(field, error.problem) from None


def beams_of(request: SamplingRequest) -> BeamSearchParams | None:
    """Return the beam search that a request asks for, or None; raises InvalidRequestError."""
    num = 1 if request.n is None else request.n
    if not request.use_beam_search:
        for name, usual in (("length_penalty", 1), ("early_stopping", False), ("best_of", num)):
            if getattr(request, name) not in (None, usual):
                raise InvalidRequestError(name, _NEEDS_BEAMS[name].format(num))
        return None
    if request.stream:
        raise InvalidRequestError(
            "stream", "cannot be true with use_beam_search: a beam is known only at its end"
        )
    penalty = request.length_penalty
    with as_client_wrote(request):
        return BeamSearchParams(
            beam_width=num if request.best_of is None else request.best_of,
            length_penalty=1.0 if penalty is None else penalty,
            early_stopping=request.early_stopping or False,
        )


_NEEDS_BEAMS = {
    "length_penalty": "needs use_beam_search: true",
    "early_stopping": "needs use_beam_search: true",
    "best_of": "must be n ({}) or absent without use_beam_search",
}


def asked_format(request: SamplingRequest) -> StructuredOutput | None:
    """Return the constraint that ``response_format`` asks for, or None."""
    if request.response_format is None:
        return None
    found = _of_response_format(request.response_format)
    return StructuredOutput(**next(iter(found.values()))) if found else None


def asks_for_output(request: SamplingRequest) -> bool:
    """Return whether a field of the request constrains the output."""
    return bool(_asked(request))


def _must_call(request: SamplingRequest) -> bool:
    return getattr(request, "tool_choice", None) not in (None, "none", "auto")


def _only_one(
    request: SamplingRequest, structured_output: StructuredOutput | None
) -> StructuredOutput | None:
    asked = _asked(request)
    if structured_output is not None:
        asked = {f: how for f, how in asked.items() if not f.startswith("response_format")}
        if _must_call(request):
            asked["tool_choice"] = {}
        else:
            asked = {"tools" if request.response_format is None else "response_format": {}, **asked}
    if len(asked) > 1:
        other, field, *_ = (name.partition(".")[0] for name in asked)
        raise InvalidRequestError(field, TOGETHER + other)
    if structured_output is not None or not asked:
        return structured_output
    return StructuredOutput(**next(iter(asked.values())))


def _asked(request: SamplingRequest) -> dict[str, dict[str, Any]]:
    """Return each field of the request that constrains outputs, with its constraint."""
    asked: dict[str, dict[str, Any]] = {}
    if request.response_format is not None:
        asked.update(_of_response_format(request.response_format))
    if (whole := request.structured_outputs) is not None:
        asked["structured_outputs"] = {
            "json_schema": whole.json,
            "regex": whole.regex,
            "choice": tuple(whole.choice or ()),
            "grammar": whole.grammar,
            "json_object": bool(whole.json_object),
        }
    for field, kind in _PLAIN.items():
        if (value := getattr(request, field)) is not None:
            asked[field] = {kind: tuple(value) if kind == "choice" else value}
    if request.json_schema is not None:
        asked["json_schema"] = {"json_schema": _unwrapped(request.json_schema)}
    if isinstance(request.grammar, TypedGrammar):
        kind = "regex" if request.grammar.type == "regex" else "json_schema"
        asked["grammar.value"] = {kind: _of_kind(kind, request.grammar.value, "grammar.value")}
    elif request.grammar is not None:
        asked["grammar"] = {"grammar": request.grammar}
    if request.format == "json":
        asked["format"] = {"json_object": True}
    elif request.format not in (None, "", "text"):
        asked["format"] = {"json_schema": request.format}
    return asked


# Field names of SGLang and older vLLM versions -> the equivalent `StructuredOutput` field.
_PLAIN = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
# Type of response_format -> the kind of constraint, and the fields that may hold its value.
_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "json_object": ("json_schema", ("schema", "json_schema", "value")),
    "json_schema": ("json_schema", ("json_schema", "schema", "value")),
    "json": ("json_schema", ("value", "schema", "json_schema")),
    "regex": ("regex", ("pattern", "value")),
    "grammar": ("grammar", ("grammar", "value")),
}


def _of_response_format(given: ResponseFormat) -> dict[str, dict[str, Any]]:
    said = {
        "json_schema": given.json_schema.schema if given.json_schema is not None else None,
        "schema": given.schema,
        "value": given.value,
        "pattern": given.pattern,
        "grammar": given.grammar,
    }
    said = {name: value for name, value in said.items() if value is not None}
    kind, names = _FORMATS.get(given.type, ("", ()))
    for name in said:
        if name not in names or len(said) > 1:
            raise InvalidRequestError(
                f"response_format.{name}", f"is one too many for the type {given.type!r}"
            )
    if given.type == "text":
        return {}
    if said:
        ((name, value),) = said.items()
        field = f"response_format.{name}{'.schema' if name == 'json_schema' else ''}"
        return {field: {kind: _of_kind(kind, value, field)}}
    if given.type == "json_object":
        return {"response_format": {"json_object": True}}
    inner = ".schema" if names[0] == "json_schema" else ""
    raise InvalidRequestError(f"response_format.{names[0]}{inner}", "is needed")


def _of_kind(kind: str, value: Any, field: str) -> Any:
    """Return the value of a constraint if its type fits ``kind``; raises InvalidRequestError."""
    if kind != "json_schema" and not isinstance(value, str):
        raise InvalidRequestError(field, "must be a text")
    return _unwrapped(value) if kind == "json_schema" else value


def _unwrapped(schema: Any) -> Any:
    """Return the schema inside OpenAI's wrapper with name and description.

    Return a schema without such a wrapper unchanged.
    """
    wrapper = {"name", "schema", "strict", "description"}
    if (
        isinstance(schema, dict)
        and isinstance(schema.get("schema"), dict)
        and set(schema) <= wrapper
    ):
        return schema["schema"]
    return schema
