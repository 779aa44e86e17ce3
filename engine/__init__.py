"""The engine that prefill and decode nodes share. It knows no gRPC, no NIXL and no roles."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.offline.llm import LLM

__all__ = ["LLM"]

# What the extra `node` brings, and what runs a model cannot do without.
_OF_EXTRA = ("numpy", "torch")


if not TYPE_CHECKING:  # a checker knows the name of above, and that there is no other

    def __getattr__(name: str) -> Any:
        """Import `LLM`, and torch with it, when somebody asks for it: `engine.core` needs none."""
        if name != "LLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from engine.offline.llm import LLM
        except ModuleNotFoundError as error:
            if error.name not in _OF_EXTRA:
                raise
            raise ModuleNotFoundError(
                f"{error.name} is not installed; the engine needs: pip install 'baton-serve[node]'",
                name=error.name,
            ) from None
        return LLM
