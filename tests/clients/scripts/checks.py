"""Shared code of the clients' scripts: Baton's address, the prompts, and the run of the checks.

The standard library alone: each script runs in its client's own environment.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

MAX_TOKENS = 48
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER_QUESTION = "What is the weather in Oslo?"
CITIES = ("Oslo", "Rome")
WEATHER_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER: dict[str, Any] = {"type": "function", "function": WEATHER_FUNCTION}
# A small model seldom calls a tool by itself: a grammar has it write what a larger one writes, and
# the router reads a call in it as in any text.
SAYS_A_CALL = {
    "structured_outputs": {
        "regex": r'<tool_call>\n\{"name": "get_weather", "arguments": '
        r'\{"city": "(Oslo|Rome)"\}\}\n</tool_call>'
    }
}
PERSON_QUESTION = "Extract the person: Anna Schmidt is 34 years old."


@dataclass(frozen=True, slots=True)
class System:
    """Where Baton is.

    Attributes:
        http: host:port of its HTTP API.
        grpc: host:port of its gRPC API.
        model: the name that it serves.
        tokenizer: a folder with the model's tokenizer, as `transformers` reads it.
    """

    http: str
    grpc: str
    model: str
    tokenizer: str

    @property
    def root_url(self) -> str:
        """Return the URL that paths other than OpenAI's begin with."""
        return f"http://{self.http}"

    @property
    def base_url(self) -> str:
        """Return the base URL for clients of OpenAI's API."""
        return f"{self.root_url}/v1"


def refusal(kind: type[Exception], ask: Callable[..., object], **fields: Any) -> Exception:
    """The error of this kind that asking for something ends with."""
    try:
        ask(**fields)
    except kind as error:
        return error
    raise AssertionError("was not refused")


def run(*checks: Callable[[System], None]) -> None:
    """Run the checks in turn and print each result; exit with 1 if a check failed."""
    parser = argparse.ArgumentParser()
    for field in fields(System):
        parser.add_argument(f"--{field.name}", required=True)
    system = System(**vars(parser.parse_args()))
    failed = False
    for check in checks:
        started = time.monotonic()
        try:
            check(system)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed = True
            result = "FAILED"
        else:
            result = "ok"
        took = time.monotonic() - started
        print(f"{result:<6} {check.__name__.replace('_', ' ')} ({took:.1f} s)", flush=True)
    sys.exit(failed)
