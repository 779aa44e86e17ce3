"""Check the OTEL_* environment variables that the span exporter reads.

OpenTelemetry's SDK raises exceptions for some invalid values and logs a traceback for others. It
accepts the rest, but then sends nothing. The checks of this file give one line that names the
variable and its limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from baton.api.errors import ConfigError
from baton.options import LONGEST_S

COMPRESSIONS = ("gzip", "none")
_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")
_PREFIX, _OF_TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
# Variable of sampling or sending that Baton ignores -> what Baton uses instead.
IGNORED = {
    "OTEL_SDK_DISABLED": "traces are off without --trace-endpoint",
    "OTEL_TRACES_SAMPLER": "--trace-ratio says which requests are traced",
    "OTEL_TRACES_SAMPLER_ARG": "--trace-ratio says which requests are traced",
    "OTEL_TRACES_EXPORTER": "spans go to --trace-endpoint by OTLP over gRPC",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "spans go to --trace-endpoint by OTLP over gRPC",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "spans go to --trace-endpoint by OTLP over gRPC",
}


def endpoint_problem(endpoint: str) -> str:
    """Return what is wrong with the URL of a collector; empty if the URL is valid."""
    try:
        url = urlsplit(endpoint)
        is_right = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is no number, or too large
        is_right = False
    if is_right and endpoint.isascii() and endpoint.isprintable() and " " not in endpoint:
        return ""
    return f"must be http:// or https:// with a host and a port, got {endpoint!r:.100}"


def check_environment(environment: Mapping[str, str]) -> list[str]:
    """Check the variables that the exporter reads; empty values count as not set.

    Returns:
        A warning for each variable that is set but ignored.

    Raises:
        ConfigError: a value is invalid; the text names the variable and its limits.
    """
    for name, value in environment.items():
        if not value:
            continue
        check = _CHECKS.get(name)
        if check is not None and (problem := check(value)):
            raise ConfigError(f"{name}: {problem}")
    return [f"{name} is ignored: {why}" for name, why in IGNORED.items() if environment.get(name)]


def chosen(environment: Mapping[str, str], name: str) -> str:
    """Return a setting's value for traces, or else its value for all signals; empty: not set."""
    return environment.get(_OF_TRACES + name) or environment.get(_PREFIX + name) or ""


def _timeout_problem(value: str) -> str:
    try:
        is_right = 0 < float(value) <= LONGEST_S
    except ValueError:
        is_right = False
    limits = f"must be seconds above 0, at most {LONGEST_S:g}"
    return "" if is_right else f"{limits}, got {value!r:.100}"


def _compression_problem(value: str) -> str:
    if value.strip().lower() in COMPRESSIONS:
        return ""
    return f"must be one of {', '.join(COMPRESSIONS)}, got {value!r:.100}"


def _file_problem(value: str) -> str:
    try:
        is_pem = b"-----BEGIN " in Path(value).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return f"must be a PEM file that can be read, got {value!r:.100} ({why})"
    return "" if is_pem else f"must be a PEM file, got {value!r:.100}"


def _headers_problem(value: str) -> str:
    """Return what is wrong with headers, but without the headers' values, which may be secrets."""
    for item in filter(str.strip, value.split(",")):
        name, separator, text = item.partition("=")
        name, text = unquote(name).strip().lower(), unquote(text).strip()
        is_name = _HEADER_NAME.fullmatch(name) is not None and not name.endswith("-bin")
        if not (separator and is_name and text.isascii() and text.isprintable()):
            return "must be like name=value,name=value, of printable ASCII characters"
    return ""


def _attributes_problem(value: str) -> str:
    problem = _text_problem(value)
    for item in filter(str.strip, value.split(",")):
        name, separator, _ = item.partition("=")
        if not (separator and name.strip()):
            problem = problem or f"must be like name=value,name=value, got {value!r:.100}"
    return problem


def _text_problem(value: str) -> str:
    try:
        unquote(value, errors="strict").encode()
    except UnicodeError:
        return f"must be text in UTF-8, got {value!r:.100}"
    return ""


def _codes_problem(value: str) -> str:
    from grpc import StatusCode

    if all(code.strip().upper() in StatusCode.__members__ for code in value.split(",") if code):
        return ""
    return f"must be names of gRPC's status codes, like UNAVAILABLE, got {value!r:.100}"


_OF_EXPORTER: dict[str, Callable[[str], str]] = {
    "TIMEOUT": _timeout_problem,
    "COMPRESSION": _compression_problem,
    "HEADERS": _headers_problem,
    "CERTIFICATE": _file_problem,
    "CLIENT_KEY": _file_problem,
    "CLIENT_CERTIFICATE": _file_problem,
}
_CHECKS: dict[str, Callable[[str], str]] = {
    **{_PREFIX + name: check for name, check in _OF_EXPORTER.items()},
    **{_OF_TRACES + name: check for name, check in _OF_EXPORTER.items()},
    "OTEL_SERVICE_NAME": _text_problem,
    "OTEL_RESOURCE_ATTRIBUTES": _attributes_problem,
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES": _codes_problem,
}
