"""Spans on their way to an OpenTelemetry collector; needs the extra `otel` when it is used."""
