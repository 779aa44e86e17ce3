"""Starts `baton up` in a fresh system, asks one question and prints what happened as a JSON line.

`fresh_installs.py` runs this file in the system that it made, with that system's interpreter.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

READY_TIMEOUT_S = 600
QUESTION = "What is the capital of France? Answer in one short sentence."
LOGS = Path("/tmp/logs")


def main(model: str) -> int:
    """Ask the model; return the exit code."""
    command = [sys.executable, "-m", "baton", "up", "--model", model, "--log-folder", str(LOGS)]
    command += ["--dtype", "float32", "--ready-timeout-s", str(READY_TIMEOUT_S)]
    began = time.monotonic()
    with Path("/tmp/output").open("w", encoding="utf-8") as output:
        up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while "ready  " not in (shown := Path("/tmp/output").read_text(encoding="utf-8")):
            if up.poll() is not None or time.monotonic() > began + READY_TIMEOUT_S:
                logs = [path.read_text(encoding="utf-8")[-1500:] for path in LOGS.glob("*.log")]
                raise SystemExit(" | ".join((shown[-1500:], *logs)).replace("\n", " / "))
            time.sleep(0.05)
        ready_s = time.monotonic() - began
        answer = ask(model)
        answered_s = time.monotonic() - began
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(60)
        except subprocess.TimeoutExpired:
            up.kill()
    lines = [line for path in LOGS.glob("*") for line in path.read_text("utf-8").splitlines()]
    kernels = sorted({line.partition("native kernels")[2] for line in lines if "kernels" in line})
    told = {
        "ready_s": round(ready_s, 1),
        "answered_s": round(answered_s, 1),
        "answer": answer,
        "kernels": [line.lstrip(": ") for line in kernels if line],
    }
    print(json.dumps(told))
    return 0


def ask(model: str) -> str:
    """Send the question over HTTP, without sampling; return the answer's text."""
    is_chat = model != "/demo_model"
    body: dict[str, object] = {"model": model, "temperature": 0, "max_tokens": 24}
    if is_chat:
        body["messages"] = [{"role": "user", "content": QUESTION}]
    else:
        body["prompt"] = "def add(a, b):"
    path = "chat/completions" if is_chat else "completions"
    request = urllib.request.Request(
        f"http://127.0.0.1:8000/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
        choice = json.load(response)["choices"][0]
    text: str = choice["message"]["content"] if is_chat else choice["text"]
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
