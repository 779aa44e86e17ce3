"""The router's OpenAI-compatible HTTP API, which passes requests to `router.intake.intake`."""
