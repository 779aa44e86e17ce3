"""The engine as a library: LLM and, for asyncio, AsyncLLM."""
