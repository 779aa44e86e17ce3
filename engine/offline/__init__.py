"""The engine as a library: LLM."""
