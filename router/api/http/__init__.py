"""The router's OpenAI-compatible HTTP API, a thin layer over `router.intake.intake`."""
