"""Anthropic's Messages API over HTTP: a chat in other words."""
