"""Admin service: serves operators' questions and changes. Logs every change."""

from __future__ import annotations

import asyncio
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
from baton.link.words import DrainCommand, scoped_id
from baton.serving.call_gate import Context
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton.version import __version__
from router.api.admin.explain import explain_now
from router.api.admin.node_calls import NodeCalls
from router.api.admin.request_stats import DEFAULT_WINDOW_S, window_stats
from router.api.admin.views import (
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
from router.calls.dispatcher import Dispatcher
from router.calls.request_log import RequestRecord
from router.fleet.node import Node
from router.gate.overload import Overload
from router.intake.intake import Intake
from router.policies import POLICIES

logger = logging.getLogger(__name__)

ROUTER_THREAD = "MainThread"
_DEFAULT_LIMIT = 20
_DEFAULT_MAX_TOKENS = 128


class AdminService(admin_pb2_grpc.AdminServicer):
    """Serve `Admin`.

    Args:
        dispatcher: the router's; has its pool, policy and logs.
        intake: tokenizes prompts.
        model: name that clients use.
        policy: name of the current routing policy.
        overload: the router's overload state.
        on_policy: called with the name of a newly chosen policy.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        intake: Intake,
        *,
        model: str,
        policy: str,
        overload: Overload | None = None,
        on_policy: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._intake = intake
        self._model = model
        self._policy = policy
        self._overload = overload or Overload()
        self._on_policy = on_policy

    @property
    def policy(self) -> str:
        """Name of the current routing policy."""
        return self._policy

    # ------------------------------------------------------------------ nodes

    async def ListNodes(  # gRPC's naming
        self, request: admin_pb2.ListNodesRequest, context: Context
    ) -> admin_pb2.ListNodesResponse:
        """Return all joined nodes with load and peers, and missing nodes."""
        return admin_pb2.ListNodesResponse(
            nodes=[
                *await describe_nodes(self._pool, self._pool.nodes),
                *map(describe_lost, self._pool.lost),
            ],
            model=self._model,
        )

    async def GetNode(  # gRPC's naming
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Return one node, joined or missing."""
        for registration in self._pool.lost:
            if request.node in (registration.node_name, registration.engine_id):
                return describe_lost(registration)
        return self._describe(self._find(request.node))

    async def Drain(  # gRPC's naming
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Drain a node: it takes nothing new and finishes what it has. Returns at once."""
        node = self._find(request.node)
        _note(context, f"drain {node.name}")
        node.send(DrainCommand())
        return self._describe(node)

    async def Resume(  # gRPC's naming
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Let a draining or drained node serve again."""
        node = self._find(request.node)
        _note(context, f"resume {node.name}")
        node.send(DrainCommand(resume=True))
        return self._describe(node)

    async def Remove(  # gRPC's naming
        self, request: admin_pb2.RemoveRequest, context: Context
    ) -> admin_pb2.NodeDescription:
        """Drain a node and stop its process; by force, disconnect it now and for good."""
        if request.force:
            gone = self._pool.expel(request.node)
            _note(context, f"remove {gone.node_name} by force")
            return describe_lost(gone)
        node = self._find(request.node)
        _note(context, f"remove {node.name}")
        node.send(DrainCommand(stop=True))
        return self._describe(node)

    # ------------------------------------------------------------------ requests

    async def GetStats(  # gRPC's naming
        self, request: admin_pb2.GetStatsRequest, context: Context
    ) -> admin_pb2.GetStatsResponse:
        """Return counts since the start, and latencies of recently finished requests."""
        log = self._dispatcher.log
        window = window_stats(log, request.window_s or DEFAULT_WINDOW_S)
        response = describe_stats(log, window, self._dispatcher.admission.state())
        response.policy = self._policy
        response.overload.CopyFrom(describe_overload(self._overload.state()))
        return response

    async def ListRequests(  # gRPC's naming
        self, request: admin_pb2.ListRouterRequestsRequest, context: Context
    ) -> admin_pb2.ListRouterRequestsResponse:
        """Return the last requests of this router, newest first."""
        log, tenant = self._dispatcher.log, _whose(context, "", Role.LOOK)
        records = reversed(log.open) if request.open_only else log.latest()
        own = (one for one in records if tenant in (None, one.tenant))
        chosen = itertools.islice(own, request.limit or _DEFAULT_LIMIT)
        return admin_pb2.ListRouterRequestsResponse(requests=map(describe_request, chosen))

    async def Trace(  # gRPC's naming
        self, request: admin_pb2.TraceRequest, context: Context
    ) -> admin_pb2.RequestTrace:
        """Return the life of a recent request."""
        tenant = _whose(context, request.tenant, Role.LOOK)
        return describe_request(self._record(request.request_id, tenant))

    async def Explain(  # gRPC's naming
        self, request: admin_pb2.ExplainRequest, context: Context
    ) -> admin_pb2.ExplainResponse:
        """Return why a past request was placed where it was, or where a prompt would go now."""
        max_tokens = request.max_tokens or _DEFAULT_MAX_TOKENS
        dispatcher, tenant = self._dispatcher, _whose(context, request.tenant, Role.LOOK)
        what = request.WhichOneof("what")
        if what in ("prompt", "num_prompt_tokens") and not context.principal.is_operator:
            raise PermissionDeniedError(
                "what: must be a request_id without the role look: where a prompt would go tells "
                "about the requests of others"
            )
        match what:
            case "request_id":
                record = self._record(request.request_id, tenant)
                decisions = dispatcher.placer.decisions.get(
                    scoped_id(record.request_id, record.tenant)
                )
            case "prompt":
                token_ids = await self._intake.tokenize_only(request.prompt, context.principal)
                whose = Principal(tenant=tenant) if tenant else context.principal
                salt = self._intake.cache_salts.of(whose)
                num_tokens = len(token_ids)
                decisions = [explain_now(dispatcher, num_tokens, max_tokens, token_ids, salt)]
            case "num_prompt_tokens" if request.num_prompt_tokens:
                decisions = [explain_now(dispatcher, request.num_prompt_tokens, max_tokens)]
            case _:
                raise InvalidRequestError(
                    "what", "one of request_id, prompt or num_prompt_tokens is needed"
                )
        return admin_pb2.ExplainResponse(
            decisions=[describe_decision(decision) for decision in decisions], policy=self._policy
        )

    async def Abort(  # gRPC's naming
        self, request: admin_pb2.AbortRequest, context: Context
    ) -> admin_pb2.AbortResponse:
        """Cancel an open request, also on its nodes; its client gets CANCELLED."""
        tenant = _whose(context, request.tenant, Role.OPERATE)
        why = "an operator ended the request" if tenant is None else "the request was ended"
        if not self._dispatcher.abort(request.request_id, why, tenant=tenant):
            raise NotFoundError(f"request {request.request_id!r} is not open")
        _note(context, f"abort {request.request_id}")
        return admin_pb2.AbortResponse()

    async def ListQuarantine(  # gRPC's naming
        self, request: admin_pb2.ListQuarantineRequest, context: Context
    ) -> admin_pb2.ListQuarantineResponse:
        """Return the requests that are refused because equal ones crashed nodes."""
        return describe_quarantine(self._dispatcher.recoveries.suspects)

    async def ReleaseQuarantine(  # gRPC's naming
        self, request: admin_pb2.ReleaseQuarantineRequest, context: Context
    ) -> admin_pb2.ReleaseQuarantineResponse:
        """Stop refusing some quarantined requests, or all."""
        num_released = self._dispatcher.recoveries.suspects.release(request.fingerprint)
        _note(context, f"release {request.fingerprint or 'all'}: {num_released}")
        return admin_pb2.ReleaseQuarantineResponse(num_released=num_released)

    # ------------------------------------------------------------------ the router

    async def GetPolicy(  # gRPC's naming
        self, request: admin_pb2.GetPolicyRequest, context: Context
    ) -> admin_pb2.PolicyDescription:
        """Return the routing policy in use, and those available."""
        return admin_pb2.PolicyDescription(policy=self._policy, known=POLICIES.names())

    async def SetPolicy(  # gRPC's naming
        self, request: admin_pb2.SetPolicyRequest, context: Context
    ) -> admin_pb2.PolicyDescription:
        """Use another routing policy from now on; placed requests stay where they are."""
        try:
            policy = POLICIES.load(request.policy)()
        except ConfigError as error:
            raise InvalidRequestError("policy", str(error)) from None
        _note(context, f"policy set {request.policy}, was {self._policy}")
        self._dispatcher.placer.policy, self._policy = policy, request.policy
        self._on_policy(request.policy)
        return await self.GetPolicy(admin_pb2.GetPolicyRequest(), context)

    async def GetRollout(  # gRPC's naming
        self, request: admin_pb2.GetRolloutRequest, context: Context
    ) -> admin_pb2.RolloutDescription:
        """Return the nodes' revisions and their shares of requests."""
        return describe_rollout(self._pool)

    async def ChangeRollout(  # gRPC's naming
        self, request: admin_pb2.ChangeRolloutRequest, context: Context
    ) -> admin_pb2.RolloutDescription:
        """Freeze revisions' shares, undo a revision, or let shares follow capacity."""
        rollout, revision = self._pool.rollout, ""
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
        self._pool.note_eligibility_change()
        return describe_rollout(self._pool)

    async def GetVersion(  # gRPC's naming
        self, request: admin_pb2.GetVersionRequest, context: Context
    ) -> admin_pb2.GetVersionResponse:
        """Return the versions of this router and its nodes."""
        nodes = {node.name: node.registration.version for node in self._pool.nodes}
        return admin_pb2.GetVersionResponse(router=__version__, nodes=nodes)

    # ------------------------------------------------------------------ asked of nodes

    async def ListNodeRequests(  # gRPC's naming
        self, request: admin_pb2.NodeRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """Return one node's open requests, of all routers."""
        return await _calls(context).list_requests(self._find(request.node))

    async def Audit(  # gRPC's naming
        self, request: admin_pb2.AuditRequest, context: Context
    ) -> admin_pb2.AuditResponse:
        """Return which requests hold which blocks, on one node or all."""

        async def ask(node: Node) -> admin_pb2.NodeAudit:
            audit = admin_pb2.NodeAudit(node_name=node.name)
            try:
                audit.ledger.CopyFrom(await _calls(context).list_blocks(node))
            except BatonError as error:
                audit.problem = str(error)
            return audit

        return admin_pb2.AuditResponse(
            nodes=await asyncio.gather(*map(ask, self._chosen(request.node)))
        )

    async def FlushCache(  # gRPC's naming
        self, request: admin_pb2.AdminFlushCacheRequest, context: Context
    ) -> admin_pb2.AdminFlushCacheResponse:
        """Empty the prefix cache of one node or all."""
        nodes = self._chosen(request.node)
        _note(context, f"flush-cache {request.node or 'of all nodes'}")

        async def ask(node: Node) -> admin_pb2.NodeFlush:
            flush = admin_pb2.NodeFlush(node_name=node.name)
            try:
                flush.num_prefixes = (await _calls(context).flush_cache(node)).num_prefixes
            except BatonError as error:
                flush.problem = str(error)
            return flush

        return admin_pb2.AdminFlushCacheResponse(nodes=await asyncio.gather(*map(ask, nodes)))

    async def SetLogLevel(  # gRPC's naming
        self, request: admin_pb2.AdminSetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        """Set the log level of the router or of one node."""
        if not request.node:
            return wire_admin.set_log_level(
                admin_pb2.SetLogLevelRequest(level=request.level, module=request.module)
            )
        node = self._find(request.node)
        _note(context, f"log-level {request.level!r} {request.module!r} on {node.name}")
        return await _calls(context).set_log_level(node, request.level, request.module)

    async def Profile(  # gRPC's naming
        self, request: admin_pb2.AdminProfileRequest, context: Context
    ) -> admin_pb2.ProfileResponse:
        """Profile the router, or a node's engine, for some seconds."""
        node = self._find(request.node) if request.node else None
        _note(context, f"profile {node.name if node else 'the router'} for {request.seconds:g} s")
        if node is None:
            return await wire_admin.profile(ROUTER_THREAD, request.seconds)
        return await _calls(context).profile(node, request.seconds)

    # ------------------------------------------------------------------ inside

    def _describe(self, node: Node) -> admin_pb2.NodeDescription:
        return describe_node(self._pool, node)

    def _find(self, name: str) -> Node:
        for node in self._pool.nodes:
            if name in (node.name, node.engine_id):
                return node
        raise NotFoundError(f"there is no node {name!r}")

    def _chosen(self, name: str) -> list[Node]:
        """Return one node, or all if no name is given."""
        return [self._find(name)] if name else self._pool.nodes

    def _record(self, request_id: str, tenant: str | None) -> RequestRecord:
        record = self._dispatcher.log.get(request_id, tenant)
        if record is None:
            raise NotFoundError(f"request {request_id!r} is not among the last ones of this router")
        return record


def _whose(context: Context, tenant: str, role: Role) -> str | None:
    """Return the tenant whose requests a caller may access; None: every tenant's.

    Args:
        tenant: tenant that the caller named; empty: none.
        role: role that allows access to other tenants' requests.

    Raises PermissionDeniedError.
    """
    principal = context.principal
    if principal.is_operator if role is Role.LOOK else principal.may(role):
        return tenant or None
    if not principal.tenant:
        raise PermissionDeniedError(f"authorization: the role {role} is needed for this")
    if tenant not in ("", principal.tenant):
        raise PermissionDeniedError(f"tenant: {principal.name} may name only its own requests")
    return principal.tenant


def _calls(context: Context) -> NodeCalls:
    return NodeCalls(context.principal.name)


def _note(context: Context, what: str) -> None:
    """Log a change together with what the router does because of it."""
    logger.info("admin %s %s: %s", context.address, context.principal.name, what)
