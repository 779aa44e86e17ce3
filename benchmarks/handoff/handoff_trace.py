"""Draw real hand-offs from times that the processes recorded.

    python -m benchmarks handoff_trace --save        (needs the extra `report`)

A router, a prefill node and a decode node run as usual. The nodes record when each layer was
computed, when each write was posted and complete, when the decode node handled the commit, and when
its steps began and ended. All processes read the same clock. The picture shows two prompts, one
pushed layer by layer and one pushed after the prefill; each is the prompt with the median hand-off
time among several.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from baton import Client, SamplingParams
from baton.deployment import local_deployment
from benchmarks.handoff.handoff_modes import make_checkpoint
from benchmarks.runner.deployments import deployed
from benchmarks.runner.own_process import call_words, own_environment
from benchmarks.runner.run import Document, Run
from engine.engine import Engine
from kvconnector.base import TransferEventKind
from kvconnector.ends import Receiver
from kvconnector.transports.nixl.transport import NixlTransport
from loadtest.page.palette import LIGHT, render, style
from prefill_node.push_tracker import PushTracker

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "handoff.svg"
TRACE_VARIABLE = "HANDOFF_TRACE_FOLDER"
MODES = ("layers", "after-prefill")
PROMPT_TOKENS = 4096
NUM_PROMPTS = 5
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

Span = tuple[str, float, float]  # name, begin, end; times on the machine's clock


def record_process(folder: Path) -> None:
    """Record, from now on, the work of this Baton process."""
    spans: list[Span] = []
    clock = time.monotonic

    def save() -> None:
        path = folder / f"{os.getpid()}.json"
        path.write_text(json.dumps(spans), encoding="utf-8")

    atexit.register(save)
    before_step, write = PushTracker.before_step, NixlTransport.write
    execute, poll = Engine.execute, Receiver.poll

    def note_layers(self: PushTracker, scheduled: Any) -> Callable[[int], None]:
        after_layer = before_step(self, scheduled)
        last = clock()

        def note(layer: int) -> None:
            nonlocal last
            spans.append(("layer", last, clock()))
            if after_layer is not None:  # None: all blocks are pushed after the prefill
                after_layer(layer)
            last = clock()

        return note

    class NotedWrite:
        def __init__(self, pending: Any, began: float) -> None:
            self.pending, self.began, self.noted = pending, began, False

        def is_done(self) -> bool:
            done = bool(self.pending.is_done())
            if done and not self.noted:
                self.noted = True
                spans.append(("write", self.began, clock()))
            return done

    def note_write(self: NixlTransport, *arguments: Any) -> Any:
        began = clock()
        return NotedWrite(write(self, *arguments), began)

    def note_step(self: Engine, scheduled: Any, after_layer: Any = None) -> Any:
        began = clock()
        result = execute(self, scheduled, after_layer)
        if scheduled.scheduled and after_layer is None:
            spans.append(("step", began, clock()))
        return result

    def note_commit(self: Receiver) -> Any:
        events = poll(self)
        if any(event.kind is TransferEventKind.COMMITTED for event in events):
            spans.append(("commit", clock(), clock()))
        return events

    PushTracker.before_step = note_layers  # type: ignore[method-assign]
    NixlTransport.write = note_write  # type: ignore[assignment, method-assign]
    Engine.execute = note_step  # type: ignore[method-assign]
    Receiver.poll = note_commit  # type: ignore[assignment, method-assign]


def trace(model: Path, mode: str) -> list[dict[str, list[tuple[float, float]]]]:
    """Return each prompt's spans by name, in ms since its first layer began."""
    asked: list[tuple[float, float, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TRACE_VARIABLE] = folder
        node_args = ["--kv-cache-memory", "256M", "--no-prefix-cache"]
        draw = random.Random(0)
        with (
            deployed(model, node_args=node_args, prefill_args=["--push", mode]) as deployment,
            Client(deployment.config.listen) as client,
        ):
            for _ in range(NUM_PROMPTS + 1):  # the first prompt warms up
                began, tokens = time.monotonic(), []
                prompt = draw.choices(range(2, 500), k=PROMPT_TOKENS)
                for delta in client.stream(prompt, PARAMS):
                    tokens += [time.monotonic()] * len(delta.token_ids)
                asked.append((began, time.monotonic(), tokens))
                time.sleep(0.2)
        files = sorted(Path(folder).glob("*.json"))
        spans = [span for path in files for span in json.loads(path.read_text(encoding="utf-8"))]
    found = []
    for began, ended, tokens in asked[1:]:
        own = sorted((start, end, what) for what, start, end in spans if began <= start <= ended)
        zero = own[0][0]
        lanes: dict[str, list[tuple[float, float]]] = {}
        for start, end, what in own:
            lanes.setdefault(what, []).append(((start - zero) * 1e3, (end - zero) * 1e3))
        lanes["token"] = [((at - zero) * 1e3, (at - zero) * 1e3) for at in tokens]
        found.append(lanes)
    return found


def exposed_ms(lanes: dict[str, list[tuple[float, float]]]) -> float:
    """Return the ms from the last layer's end until the decode node has handled the commit."""
    return lanes["commit"][0][1] - lanes["layer"][-1][1]


def draw_lanes(axes: Axes, lanes: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the spans of layers, writes and steps, in one row each."""
    rows = (("layer", 2, LIGHT.blue), ("write", 1, LIGHT.orange), ("step", 0, LIGHT.green))
    for what, place, color in rows:
        bars = [(start, max(end - start, 1e-3)) for start, end in lanes[what]]
        axes.broken_barh(
            bars, (place - 0.32, 0.64), facecolors=color, edgecolor=LIGHT.paper, linewidth=0.15
        )
    axes.axvline(lanes["commit"][0][1], color=LIGHT.red, linewidth=1.2, linestyle="--")
    axes.set_yticks([2, 1, 0], ["p0 computes layers", "p0 writes into d0", "d0 decodes"])
    axes.set_ylim(-0.5, 2.5)
    axes.grid(visible=False, axis="y")


def draw(chosen: dict[str, dict[str, list[tuple[float, float]]]]) -> bytes:
    """Draw both modes on one time axis, and the last milliseconds of each enlarged."""
    with style(LIGHT):
        figure = LIGHT.figure(1.7)
        panels = figure.subplots(2, 2, gridspec_kw={"width_ratios": [2, 1]}, squeeze=False)
        end_ms = max(lanes["step"][-1][1] for lanes in chosen.values())
        tail_ms = 1.3 * max(exposed_ms(lanes) for lanes in chosen.values())
        titles = {"layers": "written while it is computed", "after-prefill": "written afterwards"}
        for (whole, close), (mode, lanes) in zip(panels, chosen.items(), strict=True):
            prefill_ms = lanes["layer"][-1][1]
            whole.set_title(f"{titles[mode]} (--push {mode})")
            close.set_title(f"{exposed_ms(lanes):.1f} ms until d0 has it all")
            for axes in (whole, close):
                draw_lanes(axes, lanes)
            whole.set_xlim(0, end_ms * 1.01)
            close.set_xlim(prefill_ms - tail_ms / 4, prefill_ms + tail_ms)
            close.set_yticks([])
            close.axvspan(prefill_ms, lanes["commit"][0][1], color=LIGHT.shade, zorder=0)
        for axes in panels[-1]:
            axes.set_xlabel("ms")
        return render(figure, "svg")


def run_process(*words: str) -> None:
    """Run the program of a node or router in this process, and record its work."""
    from baton.cli.app import main as run_baton

    record_process(Path(os.environ[TRACE_VARIABLE]))
    sys.argv = list(words)  # "baton" and its arguments
    run_baton()


def run(run: Run) -> Document:
    """Trace prompts in both modes, and draw the median prompt of each."""
    call = call_words("benchmarks.handoff.handoff_trace:run_process")
    vars(local_deployment)["PYTHON_MODULE"] = tuple(call)
    os.environ.update(own_environment())
    chosen, results = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder))
        for mode in MODES:
            traces = sorted(trace(model, mode), key=exposed_ms)
            chosen[mode] = traces[len(traces) // 2]
            results[mode] = {
                "exposed_ms": [round(exposed_ms(one), 3) for one in traces],
                "median_exposed_ms": round(statistics.median(map(exposed_ms, traces)), 3),
                "drawn": chosen[mode],
            }
            print(f"{mode}: {results[mode]['median_exposed_ms']} ms behind the last layer")
    PICTURE.write_bytes(draw(chosen))
    return {"prompt_tokens": PROMPT_TOKENS, "modes": results}
