"""The engine that prefill and decode nodes share. It knows no gRPC, no NIXL and no roles."""

from engine.llm import LLM

__all__ = ["LLM"]
