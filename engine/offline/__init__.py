"""The engine as a library: LLM, beam search."""
