"""AdapterPlaces: which nodes have an adapter in memory or can load it, and how long loading takes.

A node loads an adapter when a command names the adapter and where its files are. Until the node's
next beat, the adapter counts as loading there. A node that failed to load an adapter is left out
for a while. Refuses to know: names of adapters, requests, files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad

# Seconds for which a node that failed to load an adapter is not asked again.
BARRED_S = 5.0
# Seconds to read and load an adapter, assumed until a node has measured this time.
DEFAULT_LOAD_S = 0.5
# Seconds within which a node that loads an adapter reports it in its beats.
EXPECTED_S = 5.0
# Maximum number of adapters remembered: running requests may use adapters that have lost their name
MAX_SOURCES = 16_384


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where nodes find an adapter's files.

    Attributes:
        folder: path below the nodes' ``--adapter-root``, package or hub id; empty: unknown.
        is_pinned: whether the adapter keeps its slot on nodes when others need one.
    """

    folder: str = ""
    is_pinned: bool = False


NO_SOURCE = AdapterSource()


class AdapterPlaces:
    """Knows which nodes have or can load the adapters of one base model.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, AdapterSource] = OrderedDict()  # sources by digest
        # (engine id, digest): barred until
        self._barred: dict[tuple[str, str], tuple[float, str]] = {}
        # (engine id, digest): loading since; oldest first
        self._asked: dict[tuple[str, str], float] = {}

    def set_sources(self, sources: Mapping[str, AdapterSource]) -> None:
        """Set the sources of named adapters; the sources of other adapters are kept for a while.

        Args:
            sources: source of each adapter, by digest.
        """
        for digest, source in sources.items():
            if self._sources.get(digest) != source:
                self.forget_failures(digest)
            self._sources[digest] = source
            self._sources.move_to_end(digest)
        while len(self._sources) > max(MAX_SOURCES, len(sources)):
            self._sources.popitem(last=False)

    def source_of(self, digest: str) -> AdapterSource:
        """Return where nodes find an adapter's files."""
        return self._sources.get(digest, NO_SOURCE)

    def note_placement(self, node: NodeLoad, digest: str) -> None:
        """Note that a node was asked to compute with an adapter; the node loads it if necessary."""
        now = self._clock()
        while self._asked and now - next(iter(self._asked.values())) > EXPECTED_S:
            del self._asked[next(iter(self._asked))]
        if digest not in node.adapters:
            self._asked.setdefault((node.engine_id, digest), now)

    def bar(self, engine_id: str, digest: str, why: str) -> None:
        """Leave a node out for a while, because it failed to load an adapter."""
        now = self._clock()
        self._barred = {key: one for key, one in self._barred.items() if one[0] > now}
        self._barred[engine_id, digest] = now + BARRED_S, why
        self._asked.pop((engine_id, digest), None)

    def forget_failures(self, digest: str) -> None:
        """Ask every node again, because an adapter's files may have changed."""
        self._barred = {key: one for key, one in self._barred.items() if key[1] != digest}

    def takes(self, node: NodeLoad, digest: str) -> bool:
        """Return whether a node has an adapter in memory or can load it."""
        barred = self._barred.get((node.engine_id, digest))
        if barred is not None and barred[0] > self._clock():
            return False
        return digest in node.adapters or (
            node.loads_adapters and bool(self.source_of(digest).folder)
        )

    def why_not(self, nodes: Iterable[NodeLoad], digest: str) -> str:
        """Return one line on why nodes cannot load an adapter."""
        now = self._clock()
        for node in nodes:
            until, why = self._barred.get((node.engine_id, digest), (now, ""))
            if until > now:
                return f"{node.node_name}: {why}"
        if not self.source_of(digest).folder:
            return "its folder is not known"
        return "no node of a role was started with --max-adapters"

    def narrow(self, fleet: Fleet, digest: str) -> Fleet:
        """Return the nodes of a fleet that have an adapter or can load it."""

        def takes(node: NodeLoad) -> bool:
            return self.takes(node, digest)

        if all(map(takes, _nodes_of(fleet))):
            return fleet
        return fleet.only(takes, takes)

    def load_s(self, fleet: Fleet, digest: str) -> Mapping[str, float]:
        """Return the seconds to load an adapter, by engine id of the nodes that lack it.

        For a node that is already loading, this is the time that remains.
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
