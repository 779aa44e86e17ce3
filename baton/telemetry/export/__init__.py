"""Export of spans to an OpenTelemetry collector; needs the extra `otel`."""
