"""The OpenAI-compatible HTTP API of the router: one more dressing of `router.intake.intake`."""
