"""Starts `baton up` in a fresh system, asks one question and prints the results as a JSON line.

    python inside.py MODEL COMMAND...

COMMAND starts `baton`. `fresh_installs.py` runs this file inside the system, with Debian's
interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 900
QUESTION = "What is the capital of France? Answer in one short sentence."
TOY = "/demo_model"
PROMPT = "def add(a, b):"  # for the toy model
API = "http://127.0.0.1:8000/v1"
LOGS, OUTPUT = Path("/tmp/logs"), Path("/tmp/output")


def main(model: str, baton: Sequence[str]) -> int:
    """Start `baton up`, ask the model, and print the results; return the exit code."""
    command = [*baton, "up", "--model", model, "--log-folder", str(LOGS)]
    command += ["--ready-timeout-s", str(READY_TIMEOUT_S)]
    if model == TOY:
        # Float32, so that tokens can be compared between machines
        command += ["--dtype", "float32"]
    began = time.monotonic()
    with OUTPUT.open("w", encoding="utf-8") as output:
        up = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        # A failed start prints the states of all programs, of which some may be ready.
        while "\nready  " not in (shown := OUTPUT.read_text(encoding="utf-8")):
            if up.poll() is not None or time.monotonic() > began + READY_TIMEOUT_S:
                logs = [path.read_text(encoding="utf-8")[-1500:] for path in LOGS.glob("*.log")]
                raise SystemExit(" | ".join((shown[-1500:], *logs)).replace("\n", " / "))
            time.sleep(0.05)
        ready_s = time.monotonic() - began
        answer = ask(is_chat=model != TOY)
        answered_s = time.monotonic() - began
        memory = memory_mib()
    finally:
        if up.poll() is None:
            os.killpg(up.pid, signal.SIGINT)  # the signal that Ctrl-C sends
        try:
            up.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(up.pid, signal.SIGKILL)
    lines = [line for path in LOGS.glob("*") for line in path.read_text("utf-8").splitlines()]
    kernels = sorted({line.partition("native kernels")[2] for line in lines if "kernels" in line})
    told = {
        "ready_s": round(ready_s, 1),
        "answered_s": round(answered_s, 1),
        "memory_mib": memory,
        **answer,
        "kernels": [line.lstrip(": ") for line in kernels if line],
    }
    print(json.dumps(told))
    return 0


def ask(*, is_chat: bool) -> dict[str, object]:
    """Ask the question over HTTP, without sampling; return the answer's text and token ids."""
    model = fetch(f"{API}/models")["data"][0]["id"]
    body: dict[str, object] = {"model": model, "temperature": 0, "max_tokens": 24}
    body["return_token_ids"] = True
    if is_chat:
        body["messages"] = [{"role": "user", "content": QUESTION}]
    else:
        body["prompt"] = PROMPT
    choice = fetch(f"{API}/{'chat/' if is_chat else ''}completions", body)["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    return {"answer": text, "token_ids": choice["token_ids"]}


def fetch(url: str, body: object = None) -> Any:
    """Send a request (with ``body`` as JSON, if given); return the parsed JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
        return json.load(response)


def memory_mib() -> int:
    """Return the MiB of all processes of this system except this one; shared pages count once."""
    kib = 0
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in (os.getpid(), os.getppid()):
            continue
        try:
            text = (process / "smaps_rollup").read_text(encoding="ascii")
        except OSError:  # the process has ended, or belongs to the kernel
            continue
        kib += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return kib // 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
