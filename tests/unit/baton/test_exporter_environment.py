"""Odd values of OTEL_* variables: one line that names the variable, never a traceback."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from opentelemetry.sdk import environment_variables as known

from baton.api.errors import ConfigError
from baton.telemetry.export.environment import IGNORED, check_environment, endpoint_problem
from baton.telemetry.export.span_export import SpanExporter

pytestmark = pytest.mark.medium

ODD = ["", "garbage", "nan", "inf", "-1", "0", "1e300", "\udcff", "a=b", "=", "%ff=%ff", "x" * 5000]
NAMES = sorted(
    {value for name, value in vars(known).items() if name.startswith(("OTEL_", "_OTEL_"))}
    | {"OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES"}
)


def test_there_are_variables() -> None:
    assert "OTEL_EXPORTER_OTLP_TIMEOUT" in NAMES
    assert len(NAMES) > 40


def problem_of_exporter(endpoint: str) -> str:
    """Make an exporter and close it; return why it cannot be made, or nothing."""
    try:
        SpanExporter(endpoint, "baton-x", {}).close()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_no_variable_ends_a_program_without_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: `OTEL_EXPORTER_OTLP_TIMEOUT=` and others ended a program in a traceback."""
    # Each name and each value meets both schemes.
    for number, value in enumerate(ODD, NAMES.index(name)):
        scheme = "https" if number % 2 else "http"
        with monkeypatch.context() as context:
            context.setenv(name, value)
            problem = problem_of_exporter(f"{scheme}://127.0.0.1:1")
        if problem:
            assert value, "an empty value is none"
            assert problem.startswith((f"{name}: must be ", "OTEL_*: "))
            assert len(problem.splitlines()) == 1
            assert len(problem) < 300
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "2.5"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20x,a=b"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,name=%C3%A4"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES", "unavailable,ABORTED"),
    ],
)
def test_right_values_are_taken(name: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, right)
    SpanExporter("http://127.0.0.1:1", "baton-x", {}).close()


@pytest.mark.parametrize(
    ("name", "odd", "limits"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "seconds above 0, at most 1e"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "nan", "seconds above 0, at most 1e"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip", "one of gzip, none"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "a PEM file that can be read"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a", "like name=value"),
        ("OTEL_SERVICE_NAME", "\udcff", "text in UTF-8"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES", "BUSY", "gRPC's status codes"),
    ],
)
def test_the_line_says_what_is_allowed(name: str, odd: str, limits: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: must be .*{limits}.*, got "):
        check_environment({name: odd})


def test_headers_are_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        check_environment({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret\nx"})
    assert "secret" not in str(raised.value)


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    """Regression: an exporter without its CA's file took those of the machine."""
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_CERTIFICATE: must be a PEM file"):
        check_environment({"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem")})


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_set_and_ignored_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "traceidratio")
    with caplog.at_level(logging.WARNING):
        SpanExporter("http://127.0.0.1:1", "baton-x", {}).close()
    assert f"{name} is ignored: " in caplog.text


@pytest.mark.parametrize(
    "endpoint",
    ["", "garbage", "localhost:4317", "ftp://a:1", "http://", "http://:1", "http://a:x",
     "http://a:99999", "http://a:0", "http://[", "http://a b:1", "http://\udcff:1"],
)  # fmt: skip
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    assert endpoint_problem(endpoint).startswith("must be http:// or https:// with a host")
    with pytest.raises(ConfigError, match=r"^trace_endpoint: must be http"):
        SpanExporter(endpoint, "baton-x", {})
