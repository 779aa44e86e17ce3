"""The coding agents that Baton is tested with: how each gets a prompt and calls its tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clients.agents.sessions import Tools

# Functions for `llm`, which has no tools of its own.
_LLM_FUNCTIONS = '''
import pathlib, subprocess
def write(path: str, text: str) -> str:
    """Write a file."""
    pathlib.Path(path).write_text(text)
    return "written"
def edit(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    file = pathlib.Path(path)
    file.write_text(file.read_text().replace(old, new, 1))
    return "changed"
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
'''


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent.

    Attributes:
        package: name of the package for npm or pip.
        program: name of its command.
        ask: makes a turn's arguments from the prompt and whether the conversation goes on.
        tools: how its model calls tools.
        too_long: pattern of its message about a prompt that is too long.
        environment: variables that only a test needs.
    """

    package: str
    program: str
    ask: Callable[[str, bool], list[str]]
    tools: Tools
    too_long: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name that its files have."""
        return self.package.rpartition("/")[2]

    @property
    def is_of_npm(self) -> bool:
        return self.package not in ("aider-chat", "llm")


def call(name: str, **arguments: Any) -> str:
    """Write a call as models of the Hermes family do."""
    content = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{content}\n</tool_call>"


def _patch(body: str) -> str:
    patch = f"*** Begin Patch\n{body}\n*** End Patch"
    return call("exec_command", cmd=f"apply_patch <<'PATCH'\n{patch}\nPATCH")


def _added(path: str, text: str) -> str:
    lines = "\n".join(f"+{line}" for line in text.splitlines())
    return _patch(f"*** Add File: {path}\n{lines}")


_CODEX = Agent(
    package="@openai/codex",
    program="codex",
    ask=lambda prompt, goes_on: [
        "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        *(["resume", "--last"] if goes_on else []), prompt,
    ],
    tools=Tools(
        write=_added,
        edit=lambda path, old, new: _patch(f"*** Update File: {path}\n@@\n-{old}\n+{new}"),
        read=None,
        shell=lambda command: call("exec_command", cmd=command),
        mark='"exec_command"',
    ),
    too_long="context window",
)  # fmt: skip
_CLAUDE = Agent(
    package="@anthropic-ai/claude-code",
    program="claude",
    ask=lambda prompt, goes_on: [
        "-p", "--dangerously-skip-permissions", *(["--continue"] if goes_on else []), prompt,
    ],
    tools=Tools(
        write=lambda path, text: call("Write", file_path=path, content=text),
        edit=lambda path, old, new: call("Edit", file_path=path, old_string=old, new_string=new),
        read=lambda path: call("Read", file_path=path),
        shell=lambda command: call("Bash", command=command, description="Add"),
        mark='"Bash"',
    ),
    too_long="[Pp]rompt is too long",
    environment={"IS_SANDBOX": "1"},
)  # fmt: skip
_OPENCODE = Agent(
    package="opencode-ai",
    program="opencode",
    ask=lambda prompt, goes_on: ["run", *(["--continue"] if goes_on else []), prompt],
    tools=Tools(
        write=lambda path, text: call("write", filePath=path, content=text),
        edit=lambda path, old, new: call("edit", filePath=path, oldString=old, newString=new),
        read=lambda path: call("read", filePath=path),
        shell=lambda command: call("bash", command=command, description="Add"),
        mark='"bash"',
    ),
    too_long="too long",
)
_QWEN = Agent(
    package="@qwen-code/qwen-code",
    program="qwen",
    ask=lambda prompt, goes_on: ["--yolo", *(["--continue"] if goes_on else []), "-p", prompt],
    tools=Tools(
        write=lambda path, text: call("write_file", file_path=path, content=text),
        edit=lambda path, old, new: call("edit", file_path=path, old_string=old, new_string=new),
        read=lambda path: call("read_file", file_path=path),
        shell=lambda command: call("run_shell_command", command=command, is_background=False),
        mark='"run_shell_command"',
    ),
    too_long="too long",
    environment=dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ""),
)


def _block(path: str, old: str, new: str) -> str:
    """Write an edit as aider asks models for it."""
    return f"{path}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```"


_AIDER = Agent(
    package="aider-chat",
    program="aider",
    ask=lambda prompt, goes_on: [
        "--yes-always", "--no-git", "--no-show-model-warnings", "--no-pretty",
        "--edit-format", "diff", *(["--restore-chat-history", "notes.txt"] if goes_on else []),
        "--message", prompt,
    ],
    tools=Tools(
        write=lambda path, text: _block(path, "", text),
        edit=lambda path, old, new: _block(path, old + "\n", new + "\n"),
        read=None,
        shell=None,
    ),
    too_long="context window|too long",
)  # fmt: skip
_LLM = Agent(
    package="llm",
    program="llm",
    ask=lambda prompt, goes_on: [
        "-m", "demo", "--functions", _LLM_FUNCTIONS, *(["-c"] if goes_on else []), prompt,
    ],
    tools=Tools(
        write=lambda path, text: call("write", path=path, text=text),
        edit=lambda path, old, new: call("edit", path=path, old=old, new=new),
        read=None,
        shell=lambda command: call("shell", command=command),
        mark='"shell"',
    ),
    too_long="prompt is too long",
)  # fmt: skip
AGENTS = (_CODEX, _CLAUDE, _OPENCODE, _QWEN, _AIDER, _LLM)
