"""Output parsers by name, for calls and for reasoning. A new parser is one row in `families.py`.

The names are those of vLLM's options.
"""

from __future__ import annotations

from baton.registry import Registry
from router.intake.parsers.families import CALLS, THOUGHTS, Family, Thoughts

AUTO, NONE = "auto", "none"  # AUTO: the chat template decides; NONE: no parser
TOOL_CALL_PARSERS: Registry[Family] = Registry(
    "tool-call parser", CALLS, plugin_group="baton.tool_parsers"
)
REASONING_PARSERS: Registry[Thoughts] = Registry(
    "reasoning parser", THOUGHTS, plugin_group="baton.reasoning_parsers"
)
