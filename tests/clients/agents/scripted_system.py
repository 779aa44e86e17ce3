"""ScriptedSystem: a real router over simulated nodes whose model follows a test's script."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from baton.processes.free_address import free_address
from sim_node.cluster import SimCluster
from sim_node.options import SimOptions
from sim_node.scripted_outputs import Script, ScriptedOutputs, scripted_outputs
from sim_node.sim_model import TokenAt
from sim_node.timing import preset
from tests.clients.agents.recorder import Recorder
from tests.fakes.time.waiting import wait_until

NAME = "demo"
MAX_MODEL_LEN = 65_536
MAX_OUTPUT_TOKENS = 1500
BLOCK_SIZE = 16
ROOT = Path(__file__).parents[3]
_TEMPLATE = ROOT / "tests" / "fakes" / "answers" / "chat_templates" / "qwen2_5.jinja"
_START_TIMEOUT_S = 150.0
_METRIC = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Output:
    """The answer to a prompt.

    Attributes:
        prompt: token ids of the prompt.
        output: token ids of the answer, as far as it was computed.
    """

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


class RecordedOutputs:
    """The outputs of a script, which remember for which prompts they were asked."""

    def __init__(self, outputs: ScriptedOutputs) -> None:
        self._outputs = outputs
        self.script = outputs.script
        self.tokenizer = outputs.tokenizer
        self.eos_token_ids = outputs.eos_token_ids
        self.asked: dict[tuple[int, ...], Output] = {}

    def say(self, script: Script) -> None:
        """Follow another script from the next prompt on."""
        self._outputs = ScriptedOutputs(script, self.tokenizer, self.eos_token_ids)

    def has_ended(self, output: Output) -> bool:
        """Return whether an answer came to its end, and no client left before."""
        tokens = output.output
        return len(tokens) >= MAX_OUTPUT_TOKENS or not self.eos_token_ids.isdisjoint(tokens)

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        prompt = tuple(prompt_token_ids)
        asked = self.asked.setdefault(prompt, Output(prompt))
        source = self._outputs.output_of(prompt)

        def token_at(index: int) -> int:
            token = source(index)
            if index == len(asked.output):
                asked.output.append(token)
            return token

        return token_at


class ScriptedSystem:
    """A router and its nodes, which live while this is used as a context manager.

    Args:
        tokenizer: folder of a model, whose tokenizer counts.
        folder: where the model's folder is made.
        num_prefill: prefill nodes; with none the decode node computes all.
        script: the model's first script.

    Attributes:
        address: host:port of the HTTP API, which a recorder stands before.
        recorder: keeps all requests and answers.
        outputs: keeps all prompts with the tokens of their answers.
    """

    def __init__(self, tokenizer: Path, folder: Path, *, num_prefill: int, script: Script) -> None:
        make_model_folder(tokenizer, folder)
        self._folder = folder
        self._num_prefill = num_prefill
        self._grpc, self._http, self.address = free_address(), free_address(), free_address()
        self.outputs = RecordedOutputs(scripted_outputs(script, folder))
        self.recorder = Recorder(self._http)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nodes")

    def __enter__(self) -> ScriptedSystem:
        command = [sys.executable, "-m", "baton", "router", "--model", str(self._folder)]
        command += ["--listen", self._grpc, "--http-listen", self._http]
        command += ["--served-model-name", NAME]
        command += ["--request-defaults", f"max_tokens_limit={MAX_OUTPUT_TOKENS}"]
        self._router = subprocess.Popen(command, cwd=ROOT)
        self._thread.start()
        ready = 'baton_router_nodes{role="decode",state="ready"}'
        try:
            wait_until(
                lambda: self.metric(ready) == 1,
                "that the nodes serve",
                timeout_s=_START_TIMEOUT_S,
            )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
        self._router.terminate()
        self._router.wait(timeout=30)

    def metric(self, name: str) -> float:
        """Return a metric of the router; 0 while there is none."""
        try:
            with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return float(dict(_METRIC.findall(text)).get(name, 0))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._nodes_and_recorder())

    async def _nodes_and_recorder(self) -> None:
        self._task = asyncio.create_task(self._serve())
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._task.cancelled():
            self._task.result()

    async def _serve(self) -> None:
        options = SimOptions(
            timing=preset("h100-8b"), block_size=BLOCK_SIZE, num_blocks=MAX_MODEL_LEN
        )
        async with SimCluster(
            self._grpc,
            str(self._folder),
            num_prefill=self._num_prefill,
            num_decode=1,
            options=options,
            join_timeout_s=_START_TIMEOUT_S,
            outputs=self.outputs,
        ) as cluster:
            await asyncio.gather(cluster.run(), self.recorder.serve(self.address))


def make_model_folder(tokenizer: Path, folder: Path) -> None:
    """Make a model without weights that takes tools and long prompts, with a given tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    config = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_bytes(_TEMPLATE.read_bytes())
