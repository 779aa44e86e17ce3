"""AdapterPlaces: which nodes have an adapter in memory or can load it, and how long loading takes.

A command to a node names the adapter and the folder of its files, and the node loads the adapter if
it lacks it. Until the node's next beat, the router takes the adapter as being loaded there. A node
that failed to load an adapter gets no requests for it for a while. `AdapterPlaces` knows neither
names of adapters nor requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad

# A node that failed to load an adapter gets no requests for this adapter for this many seconds.
BARRED_S = 5.0
# Assumed seconds to read and load an adapter, until a node has measured them.
DEFAULT_LOAD_S = 0.5
# A node that loads an adapter reports the adapter in its beats within this many seconds.
EXPECTED_S = 5.0
# Maximum number of adapters whose files are remembered, including adapters without a name, which
# running requests may still use.
MAX_SOURCES = 16_384


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where nodes find an adapter's files.

    Attributes:
        folder: path below the nodes' ``--adapter-root``, or a package or hub id; empty: unknown.
        is_pinned: whether nodes keep the adapter in memory when other adapters need its slot.
    """

    folder: str = ""
    is_pinned: bool = False


NO_SOURCE = AdapterSource()


class AdapterPlaces:
    """Knows which nodes have or can load the adapters of one base model.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, AdapterSource] = OrderedDict()  # sources by digest
        # (engine id, digest): barred until
        self._barred: dict[tuple[str, str], tuple[float, str]] = {}
        # by engine id and digest: when the node was asked to load it; oldest first
        self._asked: dict[tuple[str, str], float] = {}

    def set_sources(self, sources: Mapping[str, AdapterSource]) -> None:
        """Set where the adapters that have names are found.

        The sources of adapters without a name are kept for a while.

        Args:
            sources: source of each adapter that has a name, by digest.
        """
        for digest, source in sources.items():
            if self._sources.get(digest) != source:
                self.forget_failures(digest)
            self._sources[digest] = source
            self._sources.move_to_end(digest)
        while len(self._sources) > max(MAX_SOURCES, len(sources)):
            self._sources.popitem(last=False)

    def source_of(self, digest: str) -> AdapterSource:
        """Return where nodes find the files of the adapter with this digest."""
        return self._sources.get(digest, NO_SOURCE)

    def note_placement(self, node: NodeLoad, digest: str) -> None:
        """Note that a request for an adapter was placed on a node.

        The node loads the adapter if the adapter is not in its memory.
        """
        now = self._clock()
        while self._asked and now - next(iter(self._asked.values())) > EXPECTED_S:
            del self._asked[next(iter(self._asked))]
        if digest not in node.adapters:
            self._asked.setdefault((node.engine_id, digest), now)

    def bar(self, engine_id: str, digest: str, why: str) -> None:
        """Give a node no requests for an adapter for a while, because loading it failed there."""
        now = self._clock()
        self._barred = {key: one for key, one in self._barred.items() if one[0] > now}
        self._barred[engine_id, digest] = now + BARRED_S, why
        self._asked.pop((engine_id, digest), None)

    def forget_failures(self, digest: str) -> None:
        """Allow an adapter on every node again, because the adapter's files may have changed."""
        self._barred = {key: one for key, one in self._barred.items() if key[1] != digest}

    def takes(self, node: NodeLoad, digest: str) -> bool:
        """Return whether a node has an adapter in memory or can load it now."""
        barred = self._barred.get((node.engine_id, digest))
        if barred is not None and barred[0] > self._clock():
            return False
        return digest in node.adapters or (
            node.loads_adapters and bool(self.source_of(digest).folder)
        )

    def why_not(self, nodes: Iterable[NodeLoad], digest: str) -> str:
        """Return a reason, in one line, why none of these nodes can load an adapter."""
        now = self._clock()
        for node in nodes:
            until, why = self._barred.get((node.engine_id, digest), (now, ""))
            if until > now:
                return f"{node.node_name}: {why}"
        if not self.source_of(digest).folder:
            return "its folder is not known"
        return "no node of a role was started with --max-adapters"

    def narrow(self, fleet: Fleet, digest: str) -> Fleet:
        """Return the fleet of only those nodes that have an adapter or can load it."""

        def takes(node: NodeLoad) -> bool:
            return self.takes(node, digest)

        if all(map(takes, _nodes_of(fleet))):
            return fleet
        return fleet.only(takes, takes)

    def load_s(self, fleet: Fleet, digest: str) -> Mapping[str, float]:
        """Return how many seconds each node without an adapter needs to load it, by engine id.

        For a node that is loading the adapter already, these are the seconds that remain.
        """
        now = self._clock()
        found: dict[str, float] = {}
        for node in _nodes_of(fleet):
            if digest not in node.adapters:
                load_s = node.beat.adapter_load_s or DEFAULT_LOAD_S
                since = self._asked.get((node.engine_id, digest), now)
                is_expected = now - since <= EXPECTED_S
                found[node.engine_id] = max(load_s - (now - since), 0.0) if is_expected else load_s
        return found


def _nodes_of(fleet: Fleet) -> Iterable[NodeLoad]:
    return (*fleet.prefills, *fleet.decodes, *fleet.self_prefilling)
