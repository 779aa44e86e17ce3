"""The engine that prefill and decode nodes share. Refuses to know: gRPC, NIXL, roles."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.offline.async_llm import AsyncLLM
    from engine.offline.llm import LLM

__all__ = ["LLM", "AsyncLLM"]

# Top-level packages that the pip extra `node` installs, and that only running a model needs.
_OF_EXTRA = ("numpy", "torch")


if not TYPE_CHECKING:  # type checkers read the import above instead

    def __getattr__(name: str) -> Any:
        """Import `LLM` or `AsyncLLM`, and torch with them, when a caller first uses the class.

        The import is late, so that callers of `engine.core` need no torch.
        """
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from engine.offline.async_llm import AsyncLLM
            from engine.offline.llm import LLM
        except ModuleNotFoundError as error:
            if error.name not in _OF_EXTRA:
                raise
            raise ModuleNotFoundError(
                f"{error.name} is not installed; the engine needs: pip install 'baton-serve[node]'",
                name=error.name,
            ) from None
        return AsyncLLM if name == "AsyncLLM" else LLM
