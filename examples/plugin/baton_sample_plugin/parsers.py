"""Parsers of tool calls and of reasoning with marks of their own, made from Baton's forms."""

from __future__ import annotations

from baton.text.thoughts.marks import ThoughtMarks
from router.intake.parsers.families import Family, Thoughts
from router.intake.parsers.json_calls import JsonForm
from router.intake.parsers.think import ThinkForm

SAMPLE_CALLS = Family(JsonForm(("<sample_call>",), "</sample_call>"), ("<sample_call>",))
SAMPLE_THOUGHTS = Thoughts(ThinkForm(ThoughtMarks("<musing>", "</musing>")), ("<musing>",))
