"""OpenAI's Responses API over HTTP, converted to and from chat requests; stores nothing."""
