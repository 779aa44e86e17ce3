"""Drawn forms: constrained answers of random models behind random thoughts, judged by definition.

For each family of models, each form of an answer and each drawn schema there are two requests: one
that thinks and one that does not. An answer that ends must fit. A thought must keep its budget to
the token, and must not be empty where the request wants a thought.

    python -m tests.fuzz.drawn_forms --schemas 1000 --seed 0 --results drawn.jsonl

A run that is ended goes on behind its last finished batch. `--by states` draws tokens without an
engine, several times as fast. Refuses to know: how answers are held.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.registry import Registry
from baton.text.tokenizer import Tokenizer
from tests.fakes.answers.asked_chats import AskedChat, Said, ask
from tests.fakes.answers.call_texts import read_calls, read_common_call
from tests.fakes.answers.drawn_schemas.drawn import DrawnSchema
from tests.fakes.answers.drawn_schemas.writers import draw_schema
from tests.fakes.checkpoints.thinking_model import FAMILIES, write_thinking_model
from tests.fuzz.answer_writers.base import AnswerWriter, Written

FORMS = ("schema", "regex", "required", "auto", "strict")
BATCH = 64  # schemas; as many grammars as an engine remembers
MAX_TOKENS = 240
# Families whose prompts open the thought have closing marks alone.
_MARKS = {
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
}
_THINK = ("<think>", "</think>")
# Marks that end a thought, a call or an answer, or begin a call: trained models write them often.
_NUDGED = (
    "</think>", "</seed:think>", "<|end|>", "<tool_call>", "<seed:tool_call>", "<|im_end|>",
    "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<|channel|>", "</arg_value>",
    "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>",
)  # fmt: skip
_CLOSING = ('"', '",', '"}', "]", "}", "]}", "}}", '"]', ", ", ",")

# What draws the tokens of answers.
WRITERS: Registry[Callable[[Path], AnswerWriter]] = Registry(
    "writer of answers",
    {
        "engine": "tests.fuzz.answer_writers.engine:EngineWriter",
        "states": "tests.fuzz.answer_writers.states:StateWriter",
    },
)

Judge = Callable[[Said, str], str]
"""Returns what is wrong with an answer and its text, or an empty text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what must hold of its answer.

    Attributes:
        wants_thought: the answer must begin with a thought that is not empty.
        budget: most tokens of the thought; None: no limit.
    """

    family: str
    form: str
    number: int
    body: dict[str, Any]
    chat: AskedChat
    judge: Judge
    wants_thought: bool
    budget: int | None

    @property
    def name(self) -> str:
        return f"{self.family} {self.form} {self.number}"

    def http_body(self, model: str) -> dict[str, Any]:
        """Return the request as a client sends it."""
        params = self.chat.params
        return {
            **self.body,
            "model": model,
            "messages": [{"role": "user", "content": "Go."}],
            "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias},
            "temperature": params.temperature,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
        }


class Forms:
    """Draws the bodies of requests in each form, with a judge of the answer.

    Args:
        family: the family whose calls are read.
        rng: source of the draws.
    """

    def __init__(self, family: str, rng: random.Random) -> None:
        self._family = family
        self._rng = rng

    def draw(self, form: str) -> tuple[dict[str, Any], Judge]:
        """Draw the body of a request, without its fields about thoughts."""
        made: tuple[dict[str, Any], Judge] = getattr(self, f"_{form}")()
        return made

    def _schema(self) -> tuple[dict[str, Any], Judge]:
        drawn = draw_schema(self._rng)
        return _format(drawn), lambda said, text: drawn.problem_of(said.text)

    def _regex(self) -> tuple[dict[str, Any], Judge]:
        regex = draw_regex(self._rng)

        def judge(said: Said, text: str) -> str:
            # Only Python counts U+001C to U+001F as spaces.
            text = re.sub("[\x1c-\x1f]", "!", said.text)
            return "" if re.fullmatch(regex, text) else f"is no {regex}: {said.text!r}"

        return {"regex": regex}, judge

    def _required(self) -> tuple[dict[str, Any], Judge]:
        tools, several = self._tools(), self._rng.random() < 0.5
        body = {
            "tools": _offered(tools), "tool_choice": "required", "parallel_tool_calls": several,
        }  # fmt: skip

        def judge(said: Said, text: str) -> str:
            if not said.calls or said.text.strip() or (len(said.calls) > 1 and not several):
                return f"has {len(said.calls)} calls beside {said.text!r}"
            return self._problem_of_calls(tools, said, text)

        return body, judge

    def _auto(self) -> tuple[dict[str, Any], Judge]:
        tools, answer = self._tools(), draw_schema(self._rng)
        body = {"tools": _offered(tools, strict=True), **_format(answer)}

        def judge(said: Said, text: str) -> str:
            if said.calls:
                return self._problem_of_calls(tools, said, text)
            return answer.problem_of(said.text)

        return body, judge

    def _strict(self) -> tuple[dict[str, Any], Judge]:
        tools = self._tools()
        several = self._rng.random() < 0.7
        body = {"tools": _offered(tools, strict=True), "parallel_tool_calls": several}
        return body, lambda said, text: self._problem_of_calls(tools, said, text, several=several)

    def _tools(self) -> dict[str, DrawnSchema]:
        names = self._rng.sample(("look", "get_weather", "book-room"), self._rng.choice((1, 1, 2)))
        if self._family == "olmo3":
            names = [name.replace("-", "_") for name in names]
        return {name: draw_schema(self._rng) for name in names}

    def _problem_of_calls(
        self, tools: dict[str, DrawnSchema], said: Said, text: str, *, several: bool = True
    ) -> str:
        """Judge calls by their schemas, and by a reading of the text that is independent."""
        for name, written in said.calls:
            if name not in tools:
                return f"calls {name!r}"
            if problem := tools[name].problem_of(written):
                return f"{problem} in {written}"
        is_common = text.startswith('{"name"') and self._family not in ("gpt_oss",)
        try:
            found = read_common_call(text) if is_common else read_calls(self._family, text)
        except (AssertionError, ValueError) as error:
            return f"is not of the form: {error}"
        found = found if several else found[:1]
        if len(found) != len(said.calls):
            return f"has {len(found)} calls by definition, {len(said.calls)} as read"
        for one, (name, written) in zip(found, said.calls, strict=True):
            if not one.agrees(name, json.loads(written)):
                return f"is read as {name} {written}, is {one}"
        return ""


def _format(drawn: DrawnSchema) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": drawn.schema}}}


def _offered(tools: dict[str, DrawnSchema], **more: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": one.schema, **more}}
        for name, one in tools.items()
    ]


def draw_regex(rng: random.Random) -> str:
    """Draw a regex whose matches are bounded."""
    parts = (
        "[a-z]{1,4}", "[0-9]{2,3}", "(?:yes|no|été)", "-", r"[A-Z][a-z]{0,5}", "日本?", r"\.",
        "(?:[0-9a-f]{2}:){1,3}", "[^\\s\"]{1,3}", "(?:a|bc)*x", r"\(", " ", "[a-z_]{1,3}", "#?",
    )  # fmt: skip
    return "".join(rng.choices(parts, k=rng.randint(1, 5))) + rng.choice(("[xyz]", "[0-9]"))


Way = tuple[dict[str, Any], bool, int | None]
"""Fields of a request, whether a thought is wanted, and the thought's budget."""


def draw_thought(rng: random.Random) -> Way:
    """Draw how a request thinks; returns fields, whether a thought is wanted, and its budget."""
    budget = rng.choice((1, 1, 2, 3, 5, 8, 13, 21))
    return rng.choice(
        (
            ({"thinking": {"type": "enabled", "budget_tokens": budget}}, True, budget),
            ({"thinking": {"type": "enabled", "budget_tokens": budget}}, True, budget),
            ({"thinking_token_budget": budget}, False, budget),
            ({"reasoning": {"max_tokens": budget}}, False, budget),
            ({"thinking": {"type": "enabled"}}, True, None),
        )
    )


class DrawnForms:
    """Asks a random model of one family for drawn forms.

    Args:
        family: names a row of `FAMILIES`.
        folder: where the checkpoint is made.
        seed: seed of all draws.
        by: names a row of `WRITERS`.

    Attributes:
        folder: has the checkpoint.
    """

    def __init__(self, family: str, folder: Path, seed: int = 0, by: str = "engine") -> None:
        self.family = family
        self.folder = folder
        self._seed = seed
        write_thinking_model(folder, family)
        self._tokenizer = Tokenizer(folder)
        self._writer = WRITERS.load(by)(folder)
        opened, closed = _MARKS.get(family, _THINK)
        self._open, self._close = self._encode(opened), self._encode(closed)
        self._nudges = self._single_tokens(_NUDGED)
        self._closers = self._single_tokens(_CLOSING)

    def run(self, form: str, numbers: Iterable[int]) -> tuple[Counter[str], list[str]]:
        """Ask for the draws of some numbers; returns counts, and a line for each fault."""
        counts, faults = Counter[str](), list[str]()
        asked = [one for number in numbers for one in self.asked(form, number, counts)]
        for one, completion in zip(asked, self.complete(asked), strict=True):
            faults += [f"{one.name}: {fault}" for fault in self.judge(one, completion, counts)]
        return counts, faults

    def complete(self, asked: Sequence[Asked]) -> list[Written]:
        """Answer requests in one batch."""
        return self._writer.write([(one.chat.prompt, one.chat.params) for one in asked])

    def asked(
        self, form: str, number: int, counts: Counter[str], *, budget: int | None = None
    ) -> list[Asked]:
        """Return the requests of a draw; none where the engine refuses its grammar.

        Args:
            counts: counters to which refusals are added.
            budget: tokens of the thought of the only request; None: draw the ways to think.
        """
        rng = random.Random(f"{self._seed} {self.family} {form} {number}")
        body, judge = Forms(self.family, rng).draw(form)
        ways: list[Way] = [draw_thought(rng), ({"reasoning_effort": "none"}, False, 0)]
        if budget is not None:
            enabled = {"type": "enabled", "budget_tokens": budget}
            ways = [({"thinking": enabled}, True, budget)]
        found = []
        for way, is_wanted, limit in ways:
            try:
                chat = self._nudged(ask(self._tokenizer, {**body, **way}), rng, budget)
                if chat.params.structured_output is not None:
                    self._writer.check(chat.params)
            except InvalidRequestError as error:
                counts["refused"] += 1
                counts[f"refused: {_reason(error)}"] += 1
                continue
            found.append(
                Asked(self.family, form, number, {**body, **way}, chat, judge, is_wanted, limit)
            )
        return found

    def _nudged(self, chat: AskedChat, rng: random.Random, budget: int | None) -> AskedChat:
        """Have a random model close what it opens about as often as a trained one does.

        Args:
            budget: tokens that the thought has; None: it may end before.
        """
        biases = dict.fromkeys(self._closers, rng.uniform(5, 7.5))
        if budget is None:
            biases |= {token_id: rng.uniform(3, 6) for token_id in self._nudges}
        params = replace(
            chat.params,
            logit_bias=tuple(sorted(biases.items())),
            temperature=rng.choice((0.7, 1.0, 1.3)),
            seed=rng.getrandbits(40),
            max_tokens=MAX_TOKENS + (budget or 0),
        )
        return replace(chat, params=params)

    def judge(self, one: Asked, completion: Written, counts: Counter[str]) -> list[str]:
        """Count an answer, and return what is wrong with it."""
        counts["outputs"] += 1
        counts["tokens"] += len(completion.token_ids)
        said = one.chat.read(completion.token_ids)
        faults, num_thought = [], self.thought_tokens(one, completion.token_ids)
        is_cut = completion.finish_reason is FinishReason.LENGTH
        counts["cut"] += is_cut
        if num_thought is not None:
            counts["thoughts"] += num_thought > 0
            if one.budget is not None:
                counts["thoughts that used up their budgets"] += num_thought == one.budget > 0
                if num_thought > one.budget:
                    faults.append(f"thinks {num_thought} of {one.budget} tokens")
        if one.wants_thought and not num_thought:
            faults.append("has no thought")
        if is_cut:
            return faults
        if completion.finish_reason is not FinishReason.STOP:
            return [*faults, f"ends by {completion.finish_reason}"]
        counts["calls"] += len(said.calls)
        counts["answers that are calls"] += bool(said.calls)
        if problem := one.judge(said, self._answer(completion.token_ids)):
            faults.append(f"{problem} | {json.dumps(one.body)}")
        return faults

    def thought_tokens(self, one: Asked, token_ids: Sequence[int]) -> int | None:
        """Count the tokens of a thought by its marks; None: there is no thought."""
        found = list(token_ids)
        if FAMILIES[self.family].opens and self._open_is_last(one.chat.prompt):
            start = 0
        else:
            newline = self._encode("\n")
            start = len(newline) if found[: len(newline)] == newline else 0
            if found[start : start + len(self._open)] != self._open:
                return None
            start += len(self._open)
        for end in range(start, len(found)):
            if found[end : end + len(self._close)] == self._close:
                return end - start
        return len(found) - start

    def _open_is_last(self, prompt: Sequence[int]) -> bool:
        return self._open[-1] in prompt[-2:]

    def _answer(self, token_ids: Sequence[int]) -> str:
        """Return the text behind the thought, without end tokens."""
        ends = self._writer.end_token_ids
        text = self._tokenizer.decode(
            [one for one in token_ids if one not in ends], skip_special_tokens=False
        )
        _, mark, behind = text.partition(_MARKS.get(self.family, _THINK)[1])
        return behind.lstrip("\n") if mark else text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _single_tokens(self, texts: Iterable[str]) -> list[int]:
        found = map(self._encode, texts)
        return sorted({one[0] for one in found if len(one) == 1})


def _reason(error: InvalidRequestError) -> str:
    """Return an error without its parts that belong to a single request."""
    return re.sub(r"'[^']*'|/\S+|\d+", "*", f"{error.field}: {error.problem}")[:120]


def _finished(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the counts of each family and form, in Markdown."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        for key in ((row["family"], row["form"]), ("all", "all")):
            total = totals.setdefault(key, Counter())
            total.update(row["counts"])
            total["schemas"] += row["num_schemas"]
            total["faults"] += len(row["faults"])
    names = ("schemas", "outputs", "cut", "refused", "faults", "thoughts", "calls", "tokens")
    lines = [f"| family | form | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for (family, form), total in sorted(totals.items()):
        lines.append(f"| {family} | {form} | {' | '.join(str(total[one]) for one in names)} |")
    reasons = totals.get(("all", "all"), Counter())
    lines += [f"{count} x {name}" for name, count in reasons.most_common() if ": " in name]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run batches until all are done or the time is over; returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--schemas", type=int, default=1000, help="of each family and form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by", default="engine", choices=WRITERS.names())
    parser.add_argument("--results", type=Path, required=True, help="a line for each batch")
    parser.add_argument("--time-limit-s", type=float, default=float("inf"))
    parser.add_argument("--table", action="store_true", help="print what the results say, and end")
    given = parser.parse_args(arguments)
    if given.table:
        sys.stdout.write(table(_finished(given.results)) + "\n")
        return 0
    ends_at = time.monotonic() + given.time_limit_s
    done = {
        (row["by"], row["family"], row["form"], row["first"], row["seed"])
        for row in _finished(given.results)
    }
    num_faults = 0
    for family in given.families:
        todo = [
            (form, first)
            for first in range(0, given.schemas, BATCH)
            for form in given.forms
            if (given.by, family, form, first, given.seed) not in done
        ]
        if not todo or time.monotonic() > ends_at:
            continue
        with tempfile.TemporaryDirectory() as folder:
            forms = DrawnForms(family, Path(folder), given.seed, given.by)
            for form, first in todo:
                if time.monotonic() > ends_at:
                    break
                last = min(first + BATCH, given.schemas)
                counts, faults = forms.run(form, range(first, last))
                row = {
                    "by": given.by, "family": family, "form": form, "first": first,
                    "seed": given.seed, "num_schemas": last - first, "counts": counts,
                    "faults": faults,
                }  # fmt: skip
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                num_faults += len(faults)
                sys.stderr.writelines(f"{fault[:1500]}\n" for fault in faults)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
