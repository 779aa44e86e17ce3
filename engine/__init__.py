"""The engine that prefill and decode nodes share. It knows no gRPC, no NIXL and no roles."""

# What the extra `node` brings, and the engine cannot do without.
_OF_EXTRA = ("numpy", "torch")

try:
    from engine.offline.llm import LLM
except ModuleNotFoundError as error:
    if error.name not in _OF_EXTRA:
        raise
    raise ModuleNotFoundError(
        f"{error.name} is not installed; the engine needs: pip install 'baton-serve[node]'",
        name=error.name,
    ) from None

__all__ = ["LLM"]
