"""The scripted session: the user's message for each turn, and the model's scripted answers.

Each text of a rule (`after`) occurs in one place of a session only, so the latest one in a prompt
tells how far the session has come. Markers that no command line shows (``sum-42``) prove that a
tool ran.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim_node.scripted_outputs import Rule, Script

FILE = "notes.txt"
FIRST_TEXT = "alpha marker-1\nbeta\n"
SECOND_TEXT = "alpha marker-1\nbeta gamma marker-2\n"
SUM = "sum-42"
LAST_NUMBER = 2000
# Numbers that an answer of MAX_OUTPUT_TOKENS comes to, and others that it does not come to.
REACHED, NOT_REACHED = "number 100;", f"number {LAST_NUMBER};"
WRITTEN, EDITED, ADDED = "I wrote the file.", "I changed the file.", "I added the numbers."
COUNTED, WENT_ON, CAME_BACK = "I counted.", "I went on.", "I am back."


@dataclass(frozen=True, slots=True)
class Tools:
    """How an agent's model writes what it does.

    Attributes:
        write: makes a call that writes a text to a path.
        edit: makes a call that replaces the old text of a path by the new text.
        read: makes a call that reads a path; None: the agent edits files without reading them.
        shell: makes a call that runs a command; None: the agent has no shell.
        mark: text that only prompts which offer these tools have.
    """

    write: Callable[[str, str], str]
    edit: Callable[[str, str, str], str]
    read: Callable[[str], str] | None
    shell: Callable[[str], str] | None
    mark: str = ""


def numbers() -> str:
    """A text longer than any answer may be."""
    return "\n".join(f"number {number};" for number in range(1, LAST_NUMBER + 1))


def script(tools: Tools, folder: str) -> Script:
    """Return what the model says to an agent that works in a folder."""
    path = f"{folder}/{FILE}"
    rules: list[tuple[str, str, str]] = [
        # fields after, needed and say of each `Rule`
        ("TASK-1", tools.mark, tools.write(path, FIRST_TEXT)),
    ]
    edit = tools.edit(path, "beta", "beta gamma marker-2")
    if tools.read is None:
        rules += [("TASK-2", tools.mark, edit)]
    else:
        rules += [("TASK-2", tools.mark, tools.read(path)), ("marker-1", "TASK-2", edit)]
    rules += [("marker-1", "", WRITTEN), ("marker-2", "", EDITED)]
    if tools.shell is not None:
        rules += [("TASK-3", tools.mark, tools.shell("echo sum-$((6*7))")), (SUM, "", ADDED)]
    rules += [
        ("TASK-4", tools.mark, numbers()),
        (REACHED, "", COUNTED),
        ("TASK-5", "", WENT_ON),
        ("TASK-6", tools.mark, numbers().replace("number", "figure")),
        ("TASK-7", "", CAME_BACK),
    ]
    return Script(tuple(Rule(after, say, needed) for after, needed, say in rules))
