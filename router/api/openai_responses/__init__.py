"""OpenAI's Responses API over HTTP: a chat in other words, and nothing is stored."""
