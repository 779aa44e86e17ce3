"""Fleet: the nodes that may get a request now, and which pairs of them are connected.

A fleet never changes, except for the loads of its nodes; `NodePool` makes a new fleet when nodes
come, go or report on peers. A fleet may have 65,536 pairs, so pairs are never listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from router.fleet.load.node_load import DEFAULT_CHUNK_TOKENS, NodeLoad

# Engine ids of a prefill and a decode node; prefill "": the decode node works alone
Pair = tuple[str, str]
_NONE: Set[Pair] = frozenset()
_NOBODY: Mapping[str, float] = {}


class Fleet:
    """The nodes of both roles that may get a request, sorted by name.

    Args:
        prefills, decodes: nodes that may get requests.
        reach: for each prefill node's engine id, the decode nodes that it is connected to, each
            with the bandwidth in bytes per second (0: unknown).
        self_prefilling: decode nodes that may compute a prompt themselves.
        ruled_out: pairs of engine ids that must not be used.

    Attributes:
        prefills: prefill nodes that reach at least one of ``decodes``.
        decodes: decode nodes that at least one of ``prefills`` reaches.
        self_prefilling: decode nodes that may be used without a prefill node.
    """

    def __init__(
        self,
        prefills: Iterable[NodeLoad],
        decodes: Iterable[NodeLoad],
        reach: Mapping[str, Mapping[str, float]],
        *,
        self_prefilling: Iterable[NodeLoad] = (),
        ruled_out: Set[Pair] = _NONE,
    ) -> None:
        self._reach = reach
        self._ruled_out = ruled_out
        by_name = sorted(decodes, key=_name)
        ids = {decode.engine_id for decode in by_name}
        usable = {prefill: self._usable(prefill.engine_id) for prefill in prefills}
        self.prefills: Sequence[NodeLoad] = sorted(
            (prefill for prefill, reached in usable.items() if not reached.isdisjoint(ids)),
            key=_name,
        )
        unreached = set(ids)
        for reached in usable.values():
            # Usually true at the first prefill node, because most prefill nodes reach all decode
            # nodes.
            if not unreached:
                break
            unreached -= reached
        self.decodes: Sequence[NodeLoad] = [d for d in by_name if d.engine_id not in unreached]
        self._decode_ids = ids - unreached
        self._reached: dict[str, Sequence[NodeLoad]] = {}
        self.self_prefilling: Sequence[NodeLoad] = sorted(
            (d for d in self_prefilling if ("", d.engine_id) not in ruled_out), key=_name
        )

    def __bool__(self) -> bool:
        """Return whether the fleet can serve requests, by a pair or by a node that works alone."""
        return bool(self.prefills or self.self_prefilling)

    def reaches(self, prefill: NodeLoad, decode: NodeLoad) -> bool:
        """Return whether two nodes of this fleet are connected and may be used as a pair."""
        pair = (prefill.engine_id, decode.engine_id)
        return pair[1] in self._reach[pair[0]] and pair not in self._ruled_out

    def bandwidth(self, prefill: NodeLoad, decode: NodeLoad) -> float:
        """Return the measured bandwidth between two nodes in bytes per second; 0: unknown."""
        return self._reach[prefill.engine_id].get(decode.engine_id, 0.0)

    def reached_by(self, prefill: NodeLoad) -> Sequence[NodeLoad]:
        """Return the decode nodes that a prefill node can be paired with, sorted; never empty."""
        reached = self._reached.get(prefill.engine_id)
        if reached is None:
            usable = self._usable(prefill.engine_id)
            reached = self.decodes
            # Rare, because most prefill nodes reach all decode nodes and share one list.
            if not usable >= self._decode_ids:
                reached = [decode for decode in self.decodes if decode.engine_id in usable]
            self._reached[prefill.engine_id] = reached
        return reached

    def only(
        self,
        prefill: Callable[[NodeLoad], bool] | None = None,
        decode: Callable[[NodeLoad], bool] | None = None,
        ruled_out: Set[Pair] = _NONE,
        *,
        alone: Callable[[NodeLoad], bool] | None = None,
    ) -> Fleet:
        """Return a fleet of the nodes for which these filters return True.

        Args:
            prefill: filter of prefill nodes; None: keep all.
            decode: filter of decode nodes; None: keep all.
            ruled_out: pairs of engine ids that must not be used, in addition to earlier ones.
            alone: second filter of decode nodes that compute prompts themselves; None: keep all.
        """
        return Fleet(
            filter(prefill, self.prefills),
            filter(decode, self.decodes),
            self._reach,
            self_prefilling=filter(alone, filter(decode, self.self_prefilling)),
            ruled_out=self._ruled_out | ruled_out,
        )

    def encoding_images(self) -> Fleet:
        """Return a fleet in which all nodes that compute prompts can encode images."""

        def encodes(node: NodeLoad) -> bool:
            return node.encodes_images

        if all(map(encodes, (*self.prefills, *self.self_prefilling))):
            return self
        return self.only(prefill=encodes, alone=encodes)

    def by_revision(self) -> dict[str, Fleet]:
        """Return one fleet for each revision of nodes."""
        groups: dict[str, tuple[list[NodeLoad], list[NodeLoad], list[NodeLoad]]] = {}
        for place, nodes in enumerate((self.prefills, self.decodes, self.self_prefilling)):
            for node in nodes:
                groups.setdefault(node.revision, ([], [], []))[place].append(node)
        return {
            name: Fleet(
                prefills,
                decodes,
                self._reach,
                self_prefilling=self_prefilling,
                ruled_out=self._ruled_out,
            )
            for name, (prefills, decodes, self_prefilling) in groups.items()
        }

    def with_room_for(self, num_tokens: int, num_tokens_at_end: int = 0) -> Fleet:
        """Return a fleet of the nodes whose cache and length limit fit this many tokens.

        Args:
            num_tokens: tokens of the prompt, and at least one output token.
            num_tokens_at_end: length that the request may reach. Nodes that would end the output
                early are left out, unless all nodes would.
        """
        at_end = min(num_tokens_at_end, self.max_model_len)
        if num_tokens <= self._least_room and at_end <= self._least_length:
            return self

        def has_room(node: NodeLoad) -> bool:
            return _room(node) >= num_tokens

        def is_long_enough(node: NodeLoad) -> bool:
            return has_room(node) and node.max_model_len >= at_end

        return self.only(is_long_enough, is_long_enough) or self.only(has_room, has_room)

    @functools.cached_property
    def max_model_len(self) -> int:
        """Tokens of the longest request that some pair of nodes can take; 0 without nodes."""
        # Results by the `id` of a list of decode nodes, because prefill nodes share lists
        longest: dict[int, int] = {}
        pairs = [node.max_model_len for node in self.self_prefilling]
        for prefill in self.prefills:
            reached = self.reached_by(prefill)
            if id(reached) not in longest:
                longest[id(reached)] = max(decode.max_model_len for decode in reached)
            pairs.append(min(prefill.max_model_len, longest[id(reached)]))
        return max(pairs, default=0)

    @functools.cached_property
    def is_complete(self) -> bool:
        """Return whether every prefill node is connected to every decode node."""
        return all(self.reached_by(prefill) is self.decodes for prefill in self.prefills)

    @functools.cached_property
    def prefill_places(self) -> Mapping[str, int]:
        """Position of each node in ``prefills``, by engine id."""
        return {node.engine_id: place for place, node in enumerate(self.prefills)}

    @functools.cached_property
    def decode_places(self) -> Mapping[str, int]:
        """Position of each node in ``decodes``, by engine id."""
        return {node.engine_id: place for place, node in enumerate(self.decodes)}

    @functools.cached_property
    def self_prefilling_places(self) -> Mapping[str, int]:
        """Position of each node in ``self_prefilling``, by engine id."""
        return {node.engine_id: place for place, node in enumerate(self.self_prefilling)}

    @functools.cached_property
    def least_chunk_tokens(self) -> int:
        """Smallest `NodeLoad.chunk_tokens` of all prefill nodes."""
        chunks = (node.chunk_tokens for node in self.prefills)
        return min(chunks, default=DEFAULT_CHUNK_TOKENS)

    @functools.cached_property
    def best_bandwidth(self) -> float:
        """Highest known bandwidth of any pair, in bytes per second; 0: unknown."""
        return max(
            (max(reach.values(), default=0.0) for reach in self._reach.values()), default=0.0
        )

    @functools.cached_property
    def _least_length(self) -> int:
        nodes = (*self.prefills, *self.decodes, *self.self_prefilling)
        return min((node.max_model_len for node in nodes), default=0)

    @functools.cached_property
    def _least_room(self) -> int:
        nodes = (*self.prefills, *self.decodes, *self.self_prefilling)
        return min(map(_room, nodes), default=0)

    def _usable(self, prefill: str) -> Set[str]:
        reach = self._reach.get(prefill, _NOBODY).keys()
        ruled_out = {pair[1] for pair in self._ruled_out if pair[0] == prefill}
        return reach - ruled_out if ruled_out else reach


def _name(node: NodeLoad) -> str:
    return node.node_name


def _room(node: NodeLoad) -> int:
    return min(node.num_blocks * node.block_size, node.max_model_len)


NO_FLEET = Fleet((), (), {})
