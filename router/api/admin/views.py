"""Convert the state of nodes, requests and rollouts to protobuf messages for operators."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

from baton.link import wire
from baton.link.words import NodeRegistration
from baton.v1 import admin_pb2
from baton.wire import types as wire_types
from baton.wire.fields import to_message
from router.api.admin.request_stats import NodeFigures, Percentiles, WindowStats
from router.calls.decisions import Decision
from router.calls.recovery.suspects import Suspects
from router.calls.request_log import RequestLog, RequestRecord
from router.fleet.load.forecast import PrefillForecast
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.gate.admission import AdmissionState
from router.gate.overload import OverloadState


def describe_node(pool: NodePool, node: Node) -> admin_pb2.NodeDescription:
    """Describe a joined node: its registration, its load and its connections to peers."""
    description = _describe(node.registration)
    load = node.load
    if load.has_beat:
        description.beat.CopyFrom(wire.beat_to_proto(node.beat))
    description.num_requests = len(node.legs)
    description.weight = load.weight
    if load.prefill.is_known and load.prefill.per_unit > 0:
        description.prefill_tokens_per_s = 1 / (load.prefill.per_unit * load.units_per_token)
    if load.step.num_measured:
        description.step_s = load.step_base_s
    description.health, description.health_why = node.health.state.value, node.health.why
    if node.is_stuck:
        description.health = "stuck"
        description.health_why = f"its {node.beat.stalled_thread} thread stands still"
    if problem := pool.identity.problem(node):
        description.health, description.health_why = "not serving", problem
    peers = [
        (peer.name, report)
        for engine_id, report in node.reports.items()
        if (peer := pool.node(engine_id)) is not None
        # Nodes of different revisions are never paired, so a missing connection is no problem.
        and peer.load.revision == node.load.revision
    ]
    for name, report in sorted(peers, key=lambda one: one[0]):
        description.peers.append(to_message(admin_pb2.PeerDescription, report, node_name=name))
    return description


async def describe_nodes(pool: NodePool, nodes: Iterable[Node]) -> list[admin_pb2.NodeDescription]:
    """Describe nodes.

    Lets other tasks run in between, because each description lists the node's connections: there
    may be 65,536 pairs of nodes.
    """
    described = []
    for node in nodes:
        described.append(describe_node(pool, node))
        await asyncio.sleep(0)
    return described


def describe_rollout(pool: NodePool) -> admin_pb2.RolloutDescription:
    """Describe the revisions of a pool's nodes, the newest last."""
    fleet = pool.fleet  # `pool.fleet` updates the rollout, which is read below
    views = pool.rollout.view((node.load for node in pool.nodes), fleet)
    names: dict[str, list[str]] = {}
    for node in pool.nodes:
        names.setdefault(node.registration.revision, []).append(node.name)
    return admin_pb2.RolloutDescription(
        state=pool.rollout.state,
        revisions=[
            admin_pb2.RevisionDescription(
                revision=view.name,
                state=view.state,
                share=view.share,
                num_prefill=view.num_prefill,
                num_decode=view.num_decode,
                num_placed=view.num_placed,
                nodes=names[view.name],
            )
            for view in views
        ],
    )


def describe_lost(registration: NodeRegistration) -> admin_pb2.NodeDescription:
    """Describe a node that left unexpectedly and has not returned."""
    description = _describe(registration)
    description.lost = True
    return description


def _describe(registration: NodeRegistration) -> admin_pb2.NodeDescription:
    return to_message(
        admin_pb2.NodeDescription,
        registration,
        revision=registration.revision,
        role=wire.role_to_proto(registration.role),
    )


def describe_request(record: RequestRecord) -> admin_pb2.RequestTrace:
    """Describe the states of a request from its arrival until now."""
    trace = to_message(
        admin_pb2.RequestTrace,
        record,
        state=record.state,
        finish_reason=record.finish_reason.value if record.finish_reason else "",
        attempts=[to_message(admin_pb2.AttemptTrace, attempt) for attempt in record.attempts],
    )
    if record.receipt is not None:
        trace.receipt.CopyFrom(wire_types.receipt_to_proto(record.receipt))
    return trace


def describe_quarantine(of_models: Sequence[Suspects]) -> admin_pb2.ListQuarantineResponse:
    """Describe the requests that are refused because an equal request crashed a node.

    Args:
        of_models: each base model's `Suspects`, which know the quarantined requests.
    """
    now = of_models[0].clock()
    return admin_pb2.ListQuarantineResponse(
        requests=[
            to_message(admin_pb2.QuarantinedRequest, one, left_s=one.expires_at - now)
            for suspects in of_models
            for one in suspects.quarantined
        ],
        num_ended=sum(suspects.num_ended_total for suspects in of_models),
        num_refused=sum(suspects.num_refused_total for suspects in of_models),
    )


def describe_stats(
    logs: Sequence[RequestLog], window: WindowStats, admissions: Sequence[AdmissionState]
) -> admin_pb2.GetStatsResponse:
    """Describe the router's counts since its start, and latencies of recently finished requests.

    Args:
        logs: the request log of each base model.
        window: counts and latencies of the recently finished requests.
        admissions: the queue and the counts of refused requests of each base model.
    """
    records = [record for log in logs for record in log.open]
    num_queued = sum(record.state == "queued" for record in records)
    num_failed: Counter[str] = sum((log.num_failed for log in logs), Counter())
    num_refused: Counter[str] = sum((Counter(one.num_refused) for one in admissions), Counter())
    response = admin_pb2.GetStatsResponse(
        uptime_s=logs[0].clock() - logs[0].began_at,
        num_open=len(records),
        num_queued=num_queued,
        num_finished=sum(log.num_finished for log in logs),
        num_retried=sum(log.num_retried for log in logs),
        num_failed=num_failed,
        num_prompt_tokens=sum(log.num_prompt_tokens for log in logs),
        num_output_tokens=sum(log.num_output_tokens for log in logs),
        window_s=window.window_s,
        num_finished_in_window=window.num_finished,
        ttft_s=_percentiles(window.ttft_s),
        time_per_token_s=_percentiles(window.time_per_token_s),
        total_s=_percentiles(window.total_s),
        nodes=[_describe_figures(name, window.nodes[name]) for name in sorted(window.nodes)],
    )
    response.admission.CopyFrom(
        admin_pb2.AdmissionDescription(
            num_queued=sum(one.num_queued for one in admissions),
            num_queued_tokens=sum(one.num_queued_tokens for one in admissions),
            num_begun=sum(one.num_begun for one in admissions),
            expected_wait_s=max(one.expected_wait_s for one in admissions),
            num_refused=num_refused,
        )
    )
    return response


def describe_overload(state: OverloadState) -> admin_pb2.OverloadDescription:
    """Describe how close the router is to the limits of its process."""
    return to_message(
        admin_pb2.OverloadDescription,
        state,
        level=state.level.name.lower(),
        signals=state.signals,
    )


def _describe_figures(name: str, figures: NodeFigures) -> admin_pb2.NodeStats:
    return to_message(
        admin_pb2.NodeStats,
        figures,
        node_name=name,
        ttft_s=_percentiles(Percentiles.of(figures.ttfts_s)),
        time_per_token_s=_percentiles(Percentiles.of(figures.times_per_token_s)),
    )


def describe_decision(decision: Decision) -> admin_pb2.DecisionDescription:
    """Describe the placement of one attempt of a request, and the alternatives."""
    return to_message(
        admin_pb2.DecisionDescription,
        decision,
        candidates=[
            admin_pb2.CandidateDescription(
                prefill_node=candidate.prefill,
                decode_node=candidate.decode,
                cost=candidate.cost,
                num_computed_tokens=candidate.num_computed_tokens,
                terms=[
                    admin_pb2.CostTerm(name=name, value=value)
                    for name, value in candidate.terms.items()
                ],
            )
            for candidate in decision.candidates
        ],
        forecast=_describe_forecast(decision.forecast) if decision.forecast else None,
        prefix_sources=[
            admin_pb2.PrefixSourceDescription(
                node=source.node,
                num_tokens=source.num_lacking,
                fetch_ms=1e3 * source.fetch_s,
                compute_ms=1e3 * source.compute_s,
                is_chosen=source.is_chosen,
            )
            for source in decision.sources
        ],
    )


def _describe_forecast(forecast: PrefillForecast) -> admin_pb2.PrefillForecast:
    wait_s, compute_s = forecast.measured_wait_s, forecast.measured_compute_s
    return admin_pb2.PrefillForecast(
        num_tokens=forecast.num_tokens,
        wait_ms=1e3 * forecast.wait_s,
        compute_ms=1e3 * forecast.compute_s,
        is_measured=compute_s is not None,
        measured_wait_ms=1e3 * (wait_s or 0.0),
        measured_compute_ms=1e3 * (compute_s or 0.0),
    )


def _percentiles(values: Percentiles) -> admin_pb2.Percentiles:
    return to_message(admin_pb2.Percentiles, values)


def audits_of(node_name: str, answer: admin_pb2.NodeAdminResponse) -> list[admin_pb2.NodeAudit]:
    """Return the audit of a node's KV blocks, and that of its memory for encodings if it has one.

    Both memories count their blocks from 0.
    """
    audits = [admin_pb2.NodeAudit(node_name=node_name, ledger=answer.list_blocks)]
    if answer.HasField("encodings"):
        name = f"{node_name} (encodings)"
        audits.append(admin_pb2.NodeAudit(node_name=name, ledger=answer.encodings))
    return audits
