"""Anthropic's Messages API over HTTP, converted to and from chat requests."""
