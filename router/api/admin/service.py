"""Admin service: answers operators' questions and makes their changes; logs each change."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections.abc import Callable

from baton.access.identity import Principal, Role
from baton.api.errors import (
    BatonError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from baton.link import wire_admin
from baton.link.words import DrainCommand, NodeRegistration, scoped_id
from baton.serving.call_gate import Context
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton.version import __version__
from router.api.admin.adapters import AdapterAdmin
from router.api.admin.explain import explain_now
from router.api.admin.names import describe_name, describe_names, name_from_proto
from router.api.admin.node_calls import NodeCalls
from router.api.admin.request_stats import DEFAULT_WINDOW_S, window_stats
from router.api.admin.views import (
    audits_of,
    describe_decision,
    describe_lost,
    describe_node,
    describe_nodes,
    describe_overload,
    describe_quarantine,
    describe_request,
    describe_rollout,
    describe_stats,
)
from router.api.admin.weights import WeightsChanges
from router.calls.request_log import RequestRecord
from router.fleet.lost_nodes import no_such_node
from router.fleet.node import Node
from router.gate.overload import Overload
from router.intake.cache_hints import send_hint, session_hint
from router.names.base_model import BaseModel
from router.names.table import NameTable
from router.policies import POLICIES

logger = logging.getLogger(__name__)

ROUTER_THREAD = "MainThread"
# Seconds for which calls wait for the return of a node that was just lost. Nodes are lost for a
# moment if they or the router stand still for more than a second.
RETURN_S = 5.0
_DEFAULT_LIMIT = 20
_DEFAULT_MAX_TOKENS = 128


class AdminService(admin_pb2_grpc.AdminServicer):
    """Serves all calls of `proto/baton/v1/admin.proto`.

    Args:
        names: table of the names that clients may use, and of the base models with their pools
            of nodes and their request logs.
        policy: name of the current routing policy.
        overload: the router's overload state.
        adapters: changes the adapters; by default an `AdapterAdmin` without a root.
        on_policy: called with the name of a newly chosen policy.
    """

    def __init__(
        self,
        names: NameTable,
        *,
        policy: str,
        overload: Overload | None = None,
        adapters: AdapterAdmin | None = None,
        on_policy: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._names = names
        self._bases = names.bases
        self._policy = policy
        self._overload = overload or Overload()
        self._adapters = adapters or AdapterAdmin(names)
        self._on_policy = on_policy
        self._weights = WeightsChanges(names.bases)

    @property
    def policy(self) -> str:
        """Name of the current routing policy."""
        return self._policy

    # ------------------------------------------------------------------ nodes

    async def ListNodes(  # gRPC prescribes this name
        self, request: admin_pb2.ListNodesRequest, context: Context
    ) -> admin_pb2.ListNodesResponse:
        """Return all joined nodes with their load and peers, and the nodes that are missing."""
        nodes: list[admin_pb2.NodeDescription] = []
        for base in self._bases:
            described = [
                *await describe_nodes(base.pool, base.pool.nodes),
                *map(describe_lost, base.pool.lost),
            ]
            for one in described:
                one.model = base.model
            nodes += described
        models = ", ".join(base.model for base in self._bases)
        return admin_pb2.ListNodesResponse(nodes=nodes, model=models)

    async def GetNode(  # gRPC prescribes this name
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Return one node, joined or missing."""
        for base in self._bases:
            for registration in base.pool.lost:
                if request.node in (registration.node_name, registration.engine_id):
                    return describe_lost(registration)
        return self._describe(await self._find(request.node))

    async def Drain(  # gRPC prescribes this name
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Let a node take no new requests and finish its own; return without waiting for that."""
        node = await self._find(request.node)
        _note(context, f"drain {node.name}")
        node.send(DrainCommand())
        return self._describe(node)

    async def Resume(  # gRPC prescribes this name
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Let a node that drains or has drained take new requests again."""
        node = await self._find(request.node)
        _note(context, f"resume {node.name}")
        node.send(DrainCommand(resume=True))
        return self._describe(node)

    async def Remove(  # gRPC prescribes this name
        self, request: admin_pb2.RemoveRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Drain a node and stop its process; with ``force``, disconnect it at once and for good."""
        if request.force:
            gone = self._expel(request.node)
            _note(context, f"remove {gone.node_name} by force")
            return describe_lost(gone)
        node = await self._find(request.node)
        _note(context, f"remove {node.name}")
        node.send(DrainCommand(stop=True))
        return self._describe(node)

    # ------------------------------------------------------------------ requests

    async def GetStats(  # gRPC prescribes this name
        self, request: admin_pb2.GetStatsRequest, context: Context
    ) -> admin_pb2.GetStatsResponse:
        """Return request counts since the start, and latencies of recently finished requests."""
        bases = [self._names.find_base(request.model)] if request.model else self._bases
        logs = [base.dispatcher.log for base in bases]
        window = window_stats(logs, request.window_s or DEFAULT_WINDOW_S)
        states = [base.dispatcher.admission.state() for base in bases]
        response = describe_stats(logs, window, states)
        response.policy = self._policy
        response.overload.CopyFrom(describe_overload(self._overload.state()))
        return response

    async def ListRequests(  # gRPC prescribes this name
        self, request: admin_pb2.ListRouterRequestsRequest, context: Context
    ) -> admin_pb2.ListRouterRequestsResponse:
        """Return the last requests of this router, newest first."""
        tenant = _whose(context, "", Role.LOOK)
        logs = [base.dispatcher.log for base in self._bases]
        of_each = [reversed(log.open) if request.open_only else log.latest() for log in logs]
        records = heapq.merge(*of_each, key=lambda one: one.started_at, reverse=True)
        own = (one for one in records if tenant in (None, one.tenant))
        chosen = itertools.islice(own, request.limit or _DEFAULT_LIMIT)
        return admin_pb2.ListRouterRequestsResponse(requests=map(describe_request, chosen))

    async def Trace(  # gRPC prescribes this name
        self, request: admin_pb2.TraceRequest, context: Context
    ) -> admin_pb2.RequestTrace:
        """Return when and where each stage of a recent request took place."""
        tenant = _whose(context, request.tenant, Role.LOOK)
        return describe_request(self._record(request.request_id, tenant)[1])

    async def Explain(  # gRPC prescribes this name
        self, request: admin_pb2.ExplainRequest, context: Context
    ) -> admin_pb2.ExplainResponse:
        """Return why a past request was placed on its nodes, or where a prompt would go now."""
        max_tokens = request.max_tokens or _DEFAULT_MAX_TOKENS
        tenant = _whose(context, request.tenant, Role.LOOK)
        what = request.WhichOneof("what")
        if what in ("prompt", "num_prompt_tokens") and not context.principal.is_operator:
            raise PermissionDeniedError(
                "what: must be a request_id without the role look: where a prompt would go tells "
                "about the requests of others"
            )
        match what:
            case "request_id":
                base, record = self._record(request.request_id, tenant)
                decisions = base.dispatcher.placer.decisions.get(
                    scoped_id(record.request_id, record.tenant)
                )
            case "prompt":
                base = self._names.find_base(request.model)
                token_ids = await base.intake.reader.tokenize_only(
                    request.prompt, context.principal
                )
                whose = Principal(tenant=tenant) if tenant else context.principal
                salt = base.intake.answers.salts.of(whose)
                adapter, num_tokens = self._names.find_adapter(request.model), len(token_ids)
                decisions = [
                    explain_now(base.dispatcher, num_tokens, max_tokens, token_ids, salt, adapter)
                ]
            case "num_prompt_tokens" if request.num_prompt_tokens:
                base = self._names.find_base(request.model)
                adapter, num_tokens = (
                    self._names.find_adapter(request.model),
                    request.num_prompt_tokens,
                )
                decisions = [explain_now(base.dispatcher, num_tokens, max_tokens, adapter=adapter)]
            case _:
                raise InvalidRequestError(
                    "what", "one of request_id, prompt or num_prompt_tokens is needed"
                )
        return admin_pb2.ExplainResponse(
            decisions=[describe_decision(decision) for decision in decisions], policy=self._policy
        )

    async def Abort(  # gRPC prescribes this name
        self, request: admin_pb2.AbortRequest, context: Context
    ) -> admin_pb2.AbortResponse:
        """Cancel an open request on the router and its nodes; its client gets CANCELLED."""
        tenant = _whose(context, request.tenant, Role.OPERATE)
        why = "an operator ended the request" if tenant is None else "the request was ended"
        aborted = [
            base.dispatcher.abort(request.request_id, why, tenant=tenant) for base in self._bases
        ]
        if not any(aborted):
            raise NotFoundError(f"request {request.request_id!r} is not open")
        _note(context, f"abort {request.request_id}")
        return admin_pb2.AbortResponse()

    async def ListQuarantine(  # gRPC prescribes this name
        self, request: admin_pb2.ListQuarantineRequest, context: Context
    ) -> admin_pb2.ListQuarantineResponse:
        """Return the requests that are refused because an equal request crashed a node."""
        return describe_quarantine([base.dispatcher.recoveries.suspects for base in self._bases])

    async def ReleaseQuarantine(  # gRPC prescribes this name
        self, request: admin_pb2.ReleaseQuarantineRequest, context: Context
    ) -> admin_pb2.ReleaseQuarantineResponse:
        """Accept quarantined requests again: some of them, or all."""
        num_released = sum(
            base.dispatcher.recoveries.suspects.release(request.fingerprint) for base in self._bases
        )
        _note(context, f"release {request.fingerprint or 'all'}: {num_released}")
        return admin_pb2.ReleaseQuarantineResponse(num_released=num_released)

    # ------------------------------------------------------------------ the router

    async def GetPolicy(  # gRPC prescribes this name
        self, request: admin_pb2.GetPolicyRequest, context: Context
    ) -> admin_pb2.PolicyDescription:
        """Return the name of the routing policy in use, and the names of all available policies."""
        return admin_pb2.PolicyDescription(policy=self._policy, known=POLICIES.names())

    async def SetPolicy(  # gRPC prescribes this name
        self, request: admin_pb2.SetPolicyRequest, context: Context
    ) -> admin_pb2.PolicyDescription:
        """Use another routing policy from now on; requests that are placed stay on their nodes."""
        try:
            policies = [POLICIES.load(request.policy)() for _ in self._bases]
        except ConfigError as error:
            raise InvalidRequestError("policy", str(error)) from None
        _note(context, f"policy set {request.policy}, was {self._policy}")
        for base, policy in zip(self._bases, policies, strict=True):
            base.dispatcher.placer.policy = policy
        self._policy = request.policy
        self._on_policy(request.policy)
        return await self.GetPolicy(admin_pb2.GetPolicyRequest(), context)

    async def GetRollout(  # gRPC prescribes this name
        self, request: admin_pb2.GetRolloutRequest, context: Context
    ) -> admin_pb2.RolloutDescription:
        """Return the revisions of a base model's nodes, and each revision's share of requests."""
        return _describe_rollout(self._names.find_base(request.model))

    async def ChangeRollout(  # gRPC prescribes this name
        self, request: admin_pb2.ChangeRolloutRequest, context: Context
    ) -> admin_pb2.RolloutDescription:
        """Freeze revisions' shares of requests, undo a revision, or let shares follow capacity."""
        base = self._names.find_base(request.model)
        rollout, revision = base.pool.rollout, ""
        match request.action:
            case admin_pb2.ROLLOUT_ACTION_PAUSE:
                rollout.pause()
                what = "pause"
            case admin_pb2.ROLLOUT_ACTION_RESUME:
                rollout.resume()
                what = "resume"
            case admin_pb2.ROLLOUT_ACTION_UNDO:
                named = request.revision if request.HasField("revision") else None
                what, revision = "undo", rollout.undo(named)
            case _:
                raise InvalidRequestError("action", "must be pause, resume or undo")
        _note(context, " ".join(filter(None, ("rollout", what, revision))))
        base.pool.note_eligibility_change()
        return _describe_rollout(base)

    async def GetVersion(  # gRPC prescribes this name
        self, request: admin_pb2.GetVersionRequest, context: Context
    ) -> admin_pb2.GetVersionResponse:
        """Return the versions of Baton that this router and its nodes run."""
        nodes = {node.name: node.registration.version for node in self._nodes()}
        return admin_pb2.GetVersionResponse(router=__version__, nodes=nodes)

    # ------------------------------------------------------------------ names

    async def ListNames(  # gRPC prescribes this name
        self, request: admin_pb2.ListNamesRequest, context: Context
    ) -> admin_pb2.ListNamesResponse:
        """Return the model names that clients may use, the default name first."""
        return describe_names(self._names)

    async def SetName(  # gRPC prescribes this name
        self, request: admin_pb2.SetNameRequest, context: Context
    ) -> admin_pb2.NameDescription:
        """Map a name to another model or adapter; its running requests continue unchanged."""
        served = name_from_proto(self._names, request)
        await self._names.set_name(served)
        _note(context, f"name {served.name!r} is {served.base.model} {served.adapter}".rstrip())
        return describe_name(served)

    async def RemoveName(  # gRPC prescribes this name
        self, request: admin_pb2.RemoveNameRequest, context: Context
    ) -> admin_pb2.ListNamesResponse:
        """Remove a name; its running requests continue."""
        await self._names.remove(request.name)
        _note(context, f"remove the name {request.name!r}")
        return describe_names(self._names)

    # ------------------------------------------------------------------ adapters

    async def ListAdapters(  # gRPC's naming
        self, request: admin_pb2.AdminListAdaptersRequest, context: Context
    ) -> admin_pb2.AdminListAdaptersResponse:
        """Return the adapters that have names or are in a node's memory."""
        return await self._adapters.list_adapters(_calls(context))

    async def LoadAdapter(  # gRPC's naming
        self, request: admin_pb2.AdminLoadAdapterRequest, context: Context
    ) -> admin_pb2.AdapterChange:
        """Load an adapter on all nodes of a base model, and map a name to the adapter."""
        change = await self._adapters.load(
            _calls(context),
            request.name,
            request.source,
            digest=request.digest,
            model=request.model,
            pinned=request.pinned,
        )
        _note(context, f"load the adapter {change.digest} as {request.name!r}")
        return change

    async def PinAdapter(  # gRPC's naming
        self, request: admin_pb2.AdminPinAdapterRequest, context: Context
    ) -> admin_pb2.AdapterChange:
        """Pin or unpin an adapter on nodes: a pinned adapter stays in the nodes' memory."""
        change = await self._adapters.pin(_calls(context), request.name, pinned=request.pinned)
        _note(context, f"{'pin' if request.pinned else 'unpin'} the adapter {request.name!r}")
        return change

    async def ChangeWeights(  # gRPC's naming
        self, request: admin_pb2.AdminWeightsRequest, context: Context
    ) -> admin_pb2.NodeWeights:
        """Begin a change of a node's weights, or only describe them."""
        return await self._weights.change(
            _calls(context), await self._find(request.node), request.request
        )

    async def UnloadAdapter(  # gRPC's naming
        self, request: admin_pb2.AdminUnloadAdapterRequest, context: Context
    ) -> admin_pb2.AdapterChange:
        """Remove a name; its adapter is unloaded from nodes once its requests have ended."""
        change = await self._adapters.unload(_calls(context), request.name)
        _note(context, f"unload the adapter {change.previous} of {request.name!r}")
        return change

    # ------------------------------------------------------------------ calls that ask nodes

    async def ListNodeRequests(  # gRPC prescribes this name
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """Return the open requests of one node, which may come from several routers."""
        return await _calls(context).list_requests(await self._find(request.node))

    async def Audit(  # gRPC prescribes this name
        self, request: admin_pb2.AuditRequest, context: Context
    ) -> admin_pb2.AuditResponse:
        """Return which requests hold which KV blocks, on one node or all."""

        async def ask(node: Node) -> list[admin_pb2.NodeAudit]:
            try:
                return audits_of(node.name, await _calls(context).list_ledgers(node))
            except BatonError as error:
                return [admin_pb2.NodeAudit(node_name=node.name, problem=str(error))]

        asked = await asyncio.gather(*map(ask, await self._chosen(request.node)))
        return admin_pb2.AuditResponse(nodes=[audit for audits in asked for audit in audits])

    async def FlushCache(  # gRPC prescribes this name
        self, request: admin_pb2.AdminFlushCacheRequest, context: Context
    ) -> admin_pb2.AdminFlushCacheResponse:
        """Empty the prefix cache of one node or all."""
        nodes = await self._chosen(request.node)
        _note(context, f"flush-cache {request.node or 'of all nodes'}")

        async def ask(node: Node) -> admin_pb2.NodeFlush:
            flush = admin_pb2.NodeFlush(node_name=node.name)
            try:
                flush.num_prefixes = (await _calls(context).flush_cache(node)).num_prefixes
            except BatonError as error:
                flush.problem = str(error)
            return flush

        return admin_pb2.AdminFlushCacheResponse(nodes=await asyncio.gather(*map(ask, nodes)))

    async def SetLogLevel(  # gRPC prescribes this name
        self, request: admin_pb2.AdminSetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        """Set the log level of the router or of one node."""
        if not request.node:
            return wire_admin.set_log_level(
                admin_pb2.SetLogLevelRequest(level=request.level, module=request.module)
            )
        node = await self._find(request.node)
        _note(context, f"log-level {request.level!r} {request.module!r} on {node.name}")
        return await _calls(context).set_log_level(node, request.level, request.module)

    async def Profile(  # gRPC prescribes this name
        self, request: admin_pb2.AdminProfileRequest, context: Context
    ) -> admin_pb2.ProfileResponse:
        """Profile the router process, or the engine of a node, for some seconds."""
        node = await self._find(request.node) if request.node else None
        _note(context, f"profile {node.name if node else 'the router'} for {request.seconds:g} s")
        if node is None:
            return await wire_admin.profile(ROUTER_THREAD, request.seconds)
        return await _calls(context).profile(node, request.seconds)

    async def DropPins(  # gRPC prescribes this name
        self, request: admin_pb2.AdminDropPinsRequest, context: Context
    ) -> admin_pb2.AdminDropPinsResponse:
        """End the pins of one session of a tenant; an operator may name any tenant."""
        tenant = _whose(context, request.tenant, Role.OPERATE)
        whose = context.principal if tenant is None else Principal(tenant=tenant)
        hint = session_hint(whose, request.session_id, request.prompt_cache_key)
        if not context.principal.may(Role.OPERATE):
            self._bases[0].intake.admission.charge_hint(context.principal)
        bases = [self._names.find_base(request.model)] if request.model else self._bases
        num_nodes = sum(send_hint(base.pool, hint) for base in bases)
        _note(context, f"drop the pins of a session of {tenant or 'its own tenant'}")
        return admin_pb2.AdminDropPinsResponse(num_nodes=num_nodes)

    # ------------------------------------------------------------------ inside

    def _describe(self, node: Node) -> admin_pb2.NodeDescription:
        base = next(one for one in self._bases if one.pool.node(node.engine_id) is node)
        description = describe_node(base.pool, node)
        description.model = base.model
        return description

    def _nodes(self) -> list[Node]:
        """Return the nodes of all base models."""
        return [node for base in self._bases for node in base.pool.nodes]

    async def _find(self, name: str) -> Node:
        """Return a node by its name or engine id; wait a moment for a node that may join again.

        Raises NotFoundError, with the reason why the node is not here.
        """
        pools = [base.pool for base in self._bases]
        searches = [asyncio.ensure_future(one.find_or_await_node(name, RETURN_S)) for one in pools]
        try:
            for search in asyncio.as_completed(searches):
                if (node := await search) is not None:
                    return node
        finally:
            for search in searches:
                search.cancel()
        raise no_such_node(name, *(pool.lost_nodes for pool in pools))

    async def _chosen(self, name: str) -> list[Node]:
        """Return the node with this name, or all nodes if the name is empty."""
        return [await self._find(name)] if name else self._nodes()

    def _expel(self, name: str) -> NodeRegistration:
        """Remove a node at once, whichever base model it serves; raises NotFoundError."""
        for base in self._bases[:-1]:
            with contextlib.suppress(NotFoundError):
                return base.pool.expel(name)
        return self._bases[-1].pool.expel(name)

    def _record(self, request_id: str, tenant: str | None) -> tuple[BaseModel, RequestRecord]:
        """Return a request's newest log record and its base model; raises NotFoundError."""
        found = [
            (base, record)
            for base in self._bases
            if (record := base.dispatcher.log.get(request_id, tenant)) is not None
        ]
        if not found:
            raise NotFoundError(f"request {request_id!r} is not among the last ones of this router")
        return max(found, key=lambda one: one[1].started_at)


def _whose(context: Context, tenant: str, role: Role) -> str | None:
    """Return the tenant whose requests a caller may access; None: the requests of all tenants.

    Args:
        tenant: tenant that the caller asks about; empty: the caller names no tenant.
        role: role that a caller needs to access other tenants' requests.

    Raises PermissionDeniedError if the caller lacks the role and has no tenant, or names another
    tenant.
    """
    principal = context.principal
    if principal.is_operator if role is Role.LOOK else principal.may(role):
        return tenant or None
    if not principal.tenant:
        raise PermissionDeniedError(f"authorization: the role {role} is needed for this")
    if tenant not in ("", principal.tenant):
        raise PermissionDeniedError(f"tenant: {principal.name} may name only its own requests")
    return principal.tenant


def _describe_rollout(base: BaseModel) -> admin_pb2.RolloutDescription:
    description = describe_rollout(base.pool)
    description.model = base.model
    return description


def _calls(context: Context) -> NodeCalls:
    return NodeCalls(context.principal.name)


def _note(context: Context, what: str) -> None:
    """Log a change that an operator made, in one line with the operator's name and address."""
    logger.info("admin %s %s: %s", context.address, context.principal.name, what)
