"""AdapterAdmin: loads, pins, unloads and lists LoRA adapters for operators of one router.

    load      nodes load the adapter first; then the name is switched to it in one step
    unload    the name is removed; nodes unload the adapter after its last request

So a name never maps to an adapter that no node could load. A request is always answered by the
adapter to which its name mapped when the request arrived.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from baton.adapters.digest import NO_ADAPTER, AdapterDigest, check_digest, shorten_digest
from baton.api.errors import BatonError, ConfigError, InvalidRequestError, NodeUnavailableError
from baton.link.words import PAIR_ROLES
from baton.v1 import admin_pb2
from router.api.admin.node_calls import NodeCalls
from router.fleet.node import Node
from router.names.base_model import BaseModel
from router.names.defaults import NO_DEFAULTS, NameDefaults
from router.names.given import read_digest
from router.names.served_name import ServedName
from router.names.table import NameTable

logger = logging.getLogger(__name__)

# A request looks up its name before it is counted as open. An unload therefore waits this many
# seconds after the change of names: then each request that looked up the old entry is counted.
GRACE_S = 1.0
# Seconds that an operator's call to unload an adapter waits for the adapter's requests to end
WAIT_S = 10.0
_LOOK_EVERY_S = 0.05


class AdapterAdmin:
    """Changes the adapters of one router, on the router's event loop.

    Args:
        names: table of names, base models and their nodes.

    Attributes:
        root: folder that contains the adapters' folders that the router may read; empty: the
            router reads no adapters.
    """

    def __init__(self, names: NameTable, root: str = "") -> None:
        self._names, self.root = names, root
        self._leaving: dict[tuple[str, AdapterDigest], asyncio.Task[None]] = {}

    async def load(
        self,
        calls: NodeCalls,
        name: str,
        source: str,
        *,
        digest: AdapterDigest = NO_ADAPTER,
        model: str = "",
        pinned: bool = False,
    ) -> admin_pb2.AdapterChange:
        """Load an adapter on all nodes of a base model, and map a name to the adapter.

        Args:
            name: a new name, or a name of another adapter. Running requests of the name keep the
                other adapter.
            source: where the nodes find the adapter; see `find_named`.
            digest: digest of the adapter; empty: read it from the router's own copy of the files.
            model: base model, or a name of it; empty: the base model of ``name``, or else the first
                one.
            pinned: whether the adapter keeps its slot on nodes.

        Raises:
            InvalidRequestError: a value or a file is wrong, or the adapter fits no node's model.
            NotFoundError: there is no such base model.
            NodeUnavailableError: no node of some role could load the adapter.
        """
        before = self._find(name)
        if before is not None and not before.adapter:
            raise InvalidRequestError("name", f"{name!r:.200} stands for a base model")
        is_kept = before is not None and not model
        base = before.base if before is not None and is_kept else self._names.find_base(model)
        if digest:
            check_digest(digest)
        else:
            digest = await asyncio.to_thread(_read_digest, self.root, source)
        try:
            served = dataclasses.replace(
                before or ServedName(name=name, base=base, defaults=self._defaults_of(base)),
                base=base,
                adapter=digest,
                adapter_source=source,
                pins_adapter=pinned,
            )
        except ConfigError as error:
            raise InvalidRequestError(*str(error).split(": ", 1)) from None
        base.pool.adapters.forget_failures(digest)
        nodes = await self._load_on_nodes(calls, base, served)
        await self._names.set_name(served)
        previous = NO_ADAPTER if before is None else before.adapter
        if before is not None and (previous, before.base) != (digest, base):
            self._let_leave(calls, before.base, previous)
        return admin_pb2.AdapterChange(name=name, digest=digest, previous=previous, nodes=nodes)

    async def pin(self, calls: NodeCalls, name: str, *, pinned: bool) -> admin_pb2.AdapterChange:
        """Pin or unpin the adapter of a name on all nodes that have it; raises NotFoundError."""
        served = dataclasses.replace(self._named(name), pins_adapter=pinned)
        await self._names.set_name(served)
        holders = [node for node in served.base.pool.nodes if served.adapter in node.load.adapters]
        loads = await asyncio.gather(*(_load(calls, node, served) for node in holders))
        nodes = [one.answer for one in loads]
        return admin_pb2.AdapterChange(
            name=name, digest=served.adapter, previous=served.adapter, nodes=nodes
        )

    async def unload(self, calls: NodeCalls, name: str) -> admin_pb2.AdapterChange:
        """Remove a name; once its requests have ended, unload its adapter from all nodes.

        Waits at most `WAIT_S` for the requests. Raises NotFoundError or InvalidRequestError.
        """
        served = self._named(name)
        await self._names.remove(name)
        leaving = self._let_leave(calls, served.base, served.adapter)
        if leaving is not None:
            await asyncio.wait({leaving}, timeout=WAIT_S)
        return admin_pb2.AdapterChange(
            name=name,
            previous=served.adapter,
            num_requests=served.base.dispatcher.count_adapter(served.adapter),
        )

    async def list_adapters(self, calls: NodeCalls) -> admin_pb2.AdminListAdaptersResponse:
        """Return the adapters that have names or are in a node's memory."""
        bases = self._names.bases
        asked = [
            node
            for base in bases
            for node in base.pool.nodes
            if node.load.loads_adapters or node.load.adapters
        ]
        nodes = await asyncio.gather(*(_list(calls, node) for node in asked))
        held = {
            node.engine_id: {one.digest for one in answer.adapters.adapters}
            for node, answer in zip(asked, nodes, strict=True)
        }
        adapters = [one for base in bases for one in self._describe(base, held)]
        return admin_pb2.AdminListAdaptersResponse(adapters=adapters, nodes=nodes)

    # ------------------------------------------------------------------ inside

    def _find(self, name: str) -> ServedName | None:
        return next((one for one in self._names.served if one.name == name), None)

    def _named(self, name: str) -> ServedName:
        """Return what a name maps to; raises InvalidRequestError if the name has no adapter."""
        served = self._names.find(name)
        if not served.adapter:
            raise InvalidRequestError("name", f"{name!r:.200} stands for no adapter")
        return served

    def _defaults_of(self, base: BaseModel) -> NameDefaults:
        """Return the request defaults of a base model's first name that has no adapter."""
        own = (one for one in self._names.served if one.base is base and not one.adapter)
        return next((one.defaults for one in own), NO_DEFAULTS)

    async def _load_on_nodes(
        self, calls: NodeCalls, base: BaseModel, served: ServedName
    ) -> Sequence[admin_pb2.NodeAdapters]:
        """Load an adapter on all prefill and decode nodes of a base model at once.

        Raises:
            InvalidRequestError: all nodes of a role refuse the adapter's files.
            NodeUnavailableError: none of a role's nodes could load the adapter.
        """
        nodes = [node for node in base.pool.nodes if node.registration.role in PAIR_ROLES]
        loads = await asyncio.gather(*(_load(calls, node, served) for node in nodes))
        for role in {node.registration.role for node in nodes}:
            errors = [
                load.error
                for node, load in zip(nodes, loads, strict=True)
                if node.registration.role is role
            ]
            if all(errors):
                problem = str(errors[0]).removeprefix("adapter: ")
                problem = f"no {role.value} node could load it: {problem}"
                if all(isinstance(error, InvalidRequestError) for error in errors):
                    raise InvalidRequestError("adapter", problem)
                raise NodeUnavailableError(f"adapter: {problem}")
        return [load.answer for load in loads]

    def _let_leave(
        self, calls: NodeCalls, base: BaseModel, digest: AdapterDigest
    ) -> asyncio.Task[None] | None:
        """Begin to unload an adapter; return None if a name still maps to the adapter."""
        if self._is_named(base, digest):
            return None
        key = base.model, digest
        task = self._leaving.get(key)
        if task is None:
            task = self._leaving[key] = asyncio.create_task(self._leave(calls, base, digest))
            task.add_done_callback(lambda _: self._leaving.pop(key, None))
        return task

    async def _leave(self, calls: NodeCalls, base: BaseModel, digest: AdapterDigest) -> None:
        """Wait until no request uses an adapter, and unload it on all nodes that have it.

        Unloads nothing if a name maps to the adapter again by then.
        """
        not_before = time.monotonic() + GRACE_S
        while (  # noqa: ASYNC110 - no event is set when the adapter's last request ends
            base.dispatcher.count_adapter(digest) or time.monotonic() < not_before
        ):
            await asyncio.sleep(_LOOK_EVERY_S)
        holders = [node for node in base.pool.nodes if digest in node.load.adapters]
        if self._is_named(base, digest):
            return
        answers = await asyncio.gather(*(_unload(calls, node, digest) for node in holders))
        for problem in filter(None, answers):
            logger.warning("adapter %s stays: %s", shorten_digest(digest), problem)
        logger.info("adapter %s has left %d nodes", shorten_digest(digest), len(holders))

    def _is_named(self, base: BaseModel, digest: AdapterDigest) -> bool:
        return any(one.base is base and one.adapter == digest for one in self._names.served)

    def _describe(
        self, base: BaseModel, held: Mapping[str, Set[AdapterDigest]]
    ) -> Iterable[admin_pb2.NamedAdapter]:
        """Yield a description of each adapter of one base model; adapters with names come first.

        Args:
            held: adapters in nodes' memory, by engine id.
        """
        named = [one for one in self._names.served if one.base is base and one.adapter]
        nodes = {node.name: held.get(node.engine_id, set()) for node in base.pool.nodes}
        found = sorted({digest for digests in nodes.values() for digest in digests})
        for digest in dict.fromkeys([*(one.adapter for one in named), *found]):
            source = base.pool.adapters.source_of(digest)
            yield admin_pb2.NamedAdapter(
                digest=digest,
                model=base.model,
                names=[one.name for one in named if one.adapter == digest],
                source=source.folder,
                pinned=source.is_pinned,
                nodes=[name for name, digests in nodes.items() if digest in digests],
                num_requests=base.dispatcher.count_adapter(digest),
            )


def _read_digest(root: str, source: str) -> AdapterDigest:
    """Return the digest of the adapter in the folder ``source``; raises InvalidRequestError."""
    try:
        return read_digest(root, source)
    except ConfigError as error:
        raise InvalidRequestError(*str(error).split(": ", 1)) from None


class _Load(NamedTuple):
    """The adapters that a node has after it was asked to load one, and the error if it failed."""

    answer: admin_pb2.NodeAdapters
    error: BatonError | None = None


async def _load(calls: NodeCalls, node: Node, served: ServedName) -> _Load:
    """Ask a node to load a name's adapter; return the node's adapters, or the error."""
    answer = admin_pb2.NodeAdapters(node_name=node.name)
    try:
        loaded = await calls.load_adapter(
            node, served.adapter, served.adapter_source, pinned=served.pins_adapter
        )
        answer.adapters.CopyFrom(loaded)
    except BatonError as error:
        answer.problem = str(error)
        return _Load(answer, error)
    return _Load(answer)


async def _unload(calls: NodeCalls, node: Node, digest: AdapterDigest) -> str:
    """Ask a node to unload an adapter; return why the node did not, or an empty text."""
    try:
        await calls.unload_adapter(node, digest)
    except BatonError as error:
        return str(error)
    return ""


async def _list(calls: NodeCalls, node: Node) -> admin_pb2.NodeAdapters:
    """Return the adapters in a node's memory, or why the node did not answer."""
    answer = admin_pb2.NodeAdapters(node_name=node.name)
    try:
        answer.adapters.CopyFrom(await calls.list_adapters(node))
    except BatonError as error:
        answer.problem = str(error)
    return answer
