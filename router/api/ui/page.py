"""StatusPage: renders the router's state as HTML, anew for each request. Changes nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import hdrs, web

from baton.api.errors import NotFoundError
from baton.api.printable import printable
from baton.link.words import scoped_id
from baton.telemetry.rates import format_rate
from baton.v1 import admin_pb2
from baton.version import __version__
from router.api.admin.request_stats import DEFAULT_WINDOW_S, window_stats
from router.api.admin.views import (
    describe_decision,
    describe_lost,
    describe_nodes,
    describe_overload,
    describe_quarantine,
    describe_request,
    describe_rollout,
    describe_stats,
)
from router.api.ui.drawings import meter, spans_of, sparkline, waterfall
from router.api.ui.history import INTERVAL_S, NUM_KEPT, History
from router.calls.dispatcher import Dispatcher
from router.gate.overload import Overload
from router.names.base_model import BaseModel
from router.names.table import NameTable

FOLDER = Path(__file__).parent / "files"
MAX_REQUESTS = 40
MAX_NODES = 256
MAX_PAIRS = 400
# Content security policy: forbids resources of other sites, inline scripts and styles, and framing.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-store",
}
_STATIC = {"ui.css": "text/css", "ui.js": "text/javascript"}
_RATES = (
    ("Requests per second", "requests_per_s"),
    ("Output tokens per second", "output_tokens_per_s"),
    ("Prompt tokens per second", "prompt_tokens_per_s"),
    ("Failed per second", "failures_per_s"),
    ("Open requests", "num_open"),
    ("Waiting at the gate", "num_queued"),
)


class StatusPage:
    """Serves the page ``/ui``, a page for each request below it, and their style sheet and script.

    Args:
        names: table of the names that clients may use, and of the base models with their pools of
            nodes and their request logs.
        policy: returns the name of the current routing policy.
        overload: the router's overload state.
    """

    def __init__(
        self,
        names: NameTable,
        *,
        policy: Callable[[], str],
        overload: Overload,
    ) -> None:
        self._names = names
        self._policy = policy
        self._overload = overload
        self._histories = {base.model: _history_of(base.dispatcher) for base in names.bases}
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(
            meter=meter, waterfall=waterfall, spans_of=spans_of, sparkline=sparkline
        )
        self._templates.filters.update(
            seconds=format_seconds, count=format_count, rate=format_rate, clock=_clock
        )

    @property
    def history(self) -> History:
        """Rates of the first base model's requests over time."""
        return self._histories[self._names.bases[0].model]

    async def run(self) -> None:
        """Record the rates of all base models' requests for ever."""
        await asyncio.gather(*(history.run() for history in self._histories.values()))

    async def show_all(self, request: web.Request) -> web.Response:
        """Return the page of the base model in ``?model=``, or of the first one."""
        base = self._names.find_base(request.query.get("model", ""))
        model = self._name_of(base)
        return self._html(
            "ui.html.j2",
            model=model,
            others=[one.model for one in self._names.bases if one is not base],
            first=first_conversation(request, model),
            **await self._state(base),
        )

    def _name_of(self, base: BaseModel) -> str:
        """Return the first name of a base model, or the model itself if it has no name."""
        named = (one.name for one in self._names.served if one.base is base)
        return next(named, base.model)

    async def show_request(self, request: web.Request) -> web.Response:
        """Return the page of a recent request; raises NotFoundError."""
        request_id = request.match_info["request_id"]
        tenant = request.query.get("tenant")
        found = [
            (record, base)
            for base in self._names.bases
            if (record := base.dispatcher.log.get(request_id, tenant)) is not None
        ]
        if not found:
            raise NotFoundError(f"request {request_id!r} is not among the last ones of this router")
        record, base = max(found, key=lambda one: one[0].started_at)
        dispatcher = base.dispatcher
        decisions = dispatcher.placer.decisions.get(scoped_id(record.request_id, record.tenant))
        return self._html(
            "request.html.j2",
            model=self._name_of(base),
            trace=describe_request(record),
            decisions=[describe_decision(decision) for decision in decisions],
            now_s=dispatcher.log.clock() - record.started_at,
        )

    async def show_file(self, request: web.Request) -> web.Response:
        """Return the page's style sheet or script."""
        name = request.match_info["name"]
        return web.Response(
            body=(FOLDER / name).read_bytes(), content_type=_STATIC[name], headers=_HEADERS
        )

    def _html(self, template: str, **values: Any) -> web.Response:
        text = self._templates.get_template(template).render(
            version=__version__, told_at=time.time(), **values
        )
        return web.Response(text=text, content_type="text/html", headers=_HEADERS)

    async def _state(self, base: BaseModel) -> dict[str, Any]:
        dispatcher, pool, log = base.dispatcher, base.pool, base.dispatcher.log
        joined = pool.nodes
        nodes = await describe_nodes(pool, joined[:MAX_NODES])
        lost = [describe_lost(registration) for registration in pool.lost]
        clock, wall = log.clock(), time.time()
        latest = itertools.islice(log.latest(), MAX_REQUESTS)
        traces = [describe_request(record) for record in latest]
        pairs = _pairs(nodes)
        return {
            "why_not_ready": "" if pool.fleet else pool.why_no_pair(),
            "policy": self._policy(),
            "stats": describe_stats(
                [log], window_stats([log], DEFAULT_WINDOW_S), [dispatcher.admission.state()]
            ),
            "overload": describe_overload(self._overload.state()),
            "series": _series(self._histories[base.model]),
            "series_s": INTERVAL_S * NUM_KEPT,
            "nodes": nodes + lost,
            "num_nodes": len(joined),
            "pairs": _grouped(pairs[:MAX_PAIRS]),
            "max_pairs": MAX_PAIRS,
            "num_pairs": len(pairs),
            "transports": _by_transport(pairs),
            "rollout": describe_rollout(pool),
            "quarantine": describe_quarantine([dispatcher.recoveries.suspects]),
            "traces": traces,
            "ages_s": [wall - trace.received_at for trace in traces],
            "scale_s": max(
                (
                    trace.ended_s if trace.HasField("ended_s") else wall - trace.received_at
                    for trace in traces
                ),
                default=1.0,
            ),
            "uptime_s": clock - log.began_at,
        }


def _history_of(dispatcher: Dispatcher) -> History:
    return History(dispatcher.log, lambda: dispatcher.admission.num_queued)


def _series(history: History) -> list[tuple[str, float, list[float]]]:
    """Return (name, last value, all values) of each figure that the page draws over time."""
    series = []
    for title, name in _RATES:
        values = [float(getattr(interval, name)) for interval in history.intervals]
        series.append((title, values[-1] if values else 0.0, values))
    return series


@dataclass(frozen=True, slots=True)
class FirstConversation:
    """A command for a first question to the model, shown while there have been no requests.

    Attributes:
        root: this router's URL as the reader's browser wrote it.
        command: shell command that sends a prompt to the model.
        needs_key: whether the command takes an API key from the environment.
    """

    root: str
    command: str
    needs_key: bool


def first_conversation(request: web.Request, model: str) -> FirstConversation:
    """Return a shell command that sends a first prompt to this router's model."""
    root = f"{request.scheme}://{printable(request.host)}"
    # The page itself was requested with a key, so the API needs a key, too
    needs_key = hdrs.AUTHORIZATION in request.headers
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
    lines = [f"curl {shlex.quote(f'{root}/v1/chat/completions')}"]
    lines += ["-H 'Content-Type: application/json'"]
    lines += ['-H "Authorization: Bearer $BATON_API_KEY"'] if needs_key else []
    lines += [f"-d {shlex.quote(json.dumps(body))}"]
    return FirstConversation(root, " \\\n  ".join(lines), needs_key)


def _pairs(nodes: list[admin_pb2.NodeDescription]) -> list[tuple[str, admin_pb2.PeerDescription]]:
    """List each pair of a prefill and a decode node once, as the prefill node describes it."""
    encoders = {node.node_name for node in nodes if node.role == 3}
    prefills = (node for node in nodes if node.role == 1)
    return [
        (node.node_name, peer)
        for node in prefills
        for peer in node.peers
        if peer.node_name not in encoders
    ]


@dataclass(frozen=True, slots=True)
class Reached:
    """Decode nodes with the same transport, or the same pairing problem, to one prefill node.

    Attributes:
        prefill: name of the prefill node.
        problem: why the nodes cannot be paired; empty: they are paired.
        decodes: name of each decode node, and its bandwidth in bytes per second (0: unknown).
    """

    prefill: str
    transport: str
    problem: str
    decodes: list[tuple[str, float]]


def _grouped(pairs: list[tuple[str, admin_pb2.PeerDescription]]) -> list[Reached]:
    groups: dict[tuple[str, str, str], Reached] = {}
    for prefill, peer in pairs:
        transport = peer.transport if peer.connected else "not connected yet"
        # Only the problem's kind, before the colon, is compared, because the rest names both nodes.
        problem = peer.problem.partition(": ")[0] if peer.problem else ""
        key = (prefill, transport, problem)
        group = groups.setdefault(key, Reached(prefill, transport, peer.problem, []))
        group.decodes.append((peer.node_name, peer.bandwidth_bytes_per_s))
    return list(groups.values())


def _by_transport(
    pairs: list[tuple[str, admin_pb2.PeerDescription]],
) -> list[tuple[str, int, float, float]]:
    """Return, per transport, (name, number of pairs, lowest and highest known bandwidth)."""
    counts: Counter[str] = Counter()
    rates: dict[str, list[float]] = {}
    for _, peer in pairs:
        name = peer.transport if peer.connected else "not connected"
        counts[name] += 1
        known = rates.setdefault(name, [])
        if peer.bandwidth_bytes_per_s:
            known.append(peer.bandwidth_bytes_per_s)
    return [
        (name, count, min(rates[name], default=0.0), max(rates[name], default=0.0))
        for name, count in counts.most_common()
    ]


def format_seconds(seconds: float) -> str:
    """Format a duration: ``12.3 ms``, ``4.56 s``, ``2 min 5 s``, ``3 h 4 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_count(number: float) -> str:
    """Format a number in few characters: ``0.32``, ``843``, ``12,340``, ``4.56M``."""
    if number and abs(number) < 9.95 and not float(number).is_integer():
        return f"{number:.2g}"
    return f"{number:,.0f}" if abs(number) < 1e6 else f"{number / 1e6:,.3g}M"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S")
