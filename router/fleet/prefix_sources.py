"""PrefixSources: which node sends a cached prefix of a prompt to its prefill node.

    seconds to compute the tokens    measured on the prefill node
    seconds to fetch them            measured between the two nodes; first by the pair's probe

A prefix is fetched if this takes less time than to compute it. If the router is wrong, the prefill
node computes what does not come, which costs only time. Refuses to know: links, attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from baton.api.outputs import PrefillReceipt
from baton.link.words import NodeRole, PeerReport
from router.fleet.load.measured_line import MeasuredLine
from router.fleet.node import Node
from router.fleet.pairing import Reach

# Fewer tokens are not worth the messages.
MIN_TOKENS = 32
# Seconds for the messages of a fetch, and bytes per second, until a fetch was measured.
LATENCY_S, DEFAULT_BYTES_PER_S = 0.005, 1e9
# After a lost prefix, the holder sends the same prefill node no prefixes for this many seconds.
BARRED_S = 5.0
_LONG_PREFIX = 4096


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A node that sends a cached prefix to the prefill node of an attempt.

    Attributes:
        node: the node that holds the prefix.
        prefill_engine_id: the attempt's prefill node.
        num_tokens: tokens of the prefix.
        sources: measures what becomes of the fetch.
    """

    node: Node
    prefill_engine_id: str
    num_tokens: int
    sources: PrefixSources = field(repr=False)

    def note_receipt(self, receipt: PrefillReceipt) -> None:
        """Measure the fetch by the prefill node's receipt."""
        self.sources.note_receipt(self, receipt)


class PrefixSources:
    """Chooses sources for the prefill nodes of one base model.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reach = Reach()
        self._reports: dict[tuple[str, str], PeerReport] = {}  # by reporting node and peer
        self._lines: dict[tuple[str, str], MeasuredLine] = {}  # by holder and prefill node
        # By holder and prefill node: until when the holder sends nothing to the prefill node.
        self._barred: dict[tuple[str, str], float] = {}

    def note_report(self, node: Node, peer: Node, report: PeerReport) -> None:
        """Note a node's report on the connection to a peer's end for prefixes."""
        is_holder = node.registration.role is NodeRole.DECODE
        holder, reader = (node, peer) if is_holder else (peer, node)
        self._reports[node.engine_id, peer.engine_id] = report
        there = self._reports.get((holder.engine_id, reader.engine_id))
        back = self._reports.get((reader.engine_id, holder.engine_id))
        self._reach.note(holder.engine_id, reader.engine_id, there, back)

    def forget(self, engine_id: str) -> None:
        """Forget a node that left."""
        self._reach.forget(engine_id)
        for table in (self._reports, self._lines, self._barred):
            for pair in [pair for pair in table if engine_id in pair]:
                del table[pair]

    def choose(
        self,
        prefill: Node,
        holders: Iterable[Node],
        cached: Mapping[str, int],
        num_prompt_tokens: int,
    ) -> PrefixSource | None:
        """Return the source that saves most time; None: computing everything is faster.

        Args:
            holders: nodes that may send prefixes now.
            cached: leading prompt tokens that each node has in its cache, by engine id.
        """
        block_size = prefill.registration.block_size
        # The prefill node computes at least the last token.
        most = (num_prompt_tokens - 1) // block_size * block_size
        own, now = cached.get(prefill.engine_id, 0), self._clock()
        best: PrefixSource | None = None
        best_s = 0.0
        for node in holders:
            num_tokens = min(cached.get(node.engine_id, 0), most)
            is_reached = prefill.engine_id in self._reach.bandwidths.get(node.engine_id, {})
            is_barred = self._barred.get((node.engine_id, prefill.engine_id), now) > now
            if is_barred or not is_reached:
                continue
            saved_s = self._saved_s(node.engine_id, prefill, num_tokens - own)
            if saved_s > best_s:
                best_s = saved_s
                best = PrefixSource(node, prefill.engine_id, num_tokens, self)
        return best

    def add_fetchable(
        self, cached: Mapping[str, int], nodes: Mapping[str, Node]
    ) -> Mapping[str, int]:
        """Return how many tokens each node need not compute: cached ones, and those it may fetch.

        Tokens that take time to fetch count in part: as many as could be computed in the saved
        time.

        Args:
            cached: leading prompt tokens that each node has in its cache, by engine id.
            nodes: all nodes by engine id.
        """
        now, counts = self._clock(), dict(cached)
        for holder_id, reached in self._reach.bandwidths.items():
            num_tokens = cached.get(holder_id, 0)
            if num_tokens < MIN_TOKENS:
                continue
            for prefill in filter(None, map(nodes.get, reached)):
                if self._barred.get((holder_id, prefill.engine_id), now) > now:
                    continue
                own = cached.get(prefill.engine_id, 0)
                saved_s = self._saved_s(holder_id, prefill, num_tokens - own)
                if saved_s > 0:
                    num_saved = own + int(saved_s / prefill.load.prefill.per_unit)
                    counts[prefill.engine_id] = max(counts.get(prefill.engine_id, 0), num_saved)
        return counts

    def note_receipt(self, source: PrefixSource, receipt: PrefillReceipt) -> None:
        """Measure a fetch, or bar its pair of nodes for a while if nothing came."""
        if receipt.num_fetches_lost:
            pair = source.node.engine_id, source.prefill_engine_id
            self._barred[pair] = self._clock() + BARRED_S
        line = self._lines.get((source.node.engine_id, source.prefill_engine_id))
        if receipt.num_fetched_tokens and line is not None:
            line.measure(receipt.num_fetched_tokens, receipt.fetch_wait_s)
            line.refresh()

    def __bool__(self) -> bool:
        """Return whether any node can send prefixes."""
        return bool(self._reach.bandwidths)

    def _saved_s(self, holder_id: str, prefill: Node, num_tokens: int) -> float:
        """Return how many seconds fetching tokens saves; 0 for too few tokens."""
        if num_tokens < MIN_TOKENS:
            return 0.0
        compute_s = prefill.load.prefill.per_unit * num_tokens
        return compute_s - self._line(holder_id, prefill).seconds(num_tokens)

    def _line(self, holder_id: str, prefill: Node) -> MeasuredLine:
        """Return the seconds of a fetch between two nodes, by its number of tokens."""
        pair = holder_id, prefill.engine_id
        line = self._lines.get(pair)
        if line is None:
            bandwidth = self._reach.bandwidths[pair[0]][pair[1]] or DEFAULT_BYTES_PER_S
            s_per_token = prefill.load.shared.kv_bytes_per_token / bandwidth
            points = [(float(num), LATENCY_S + num * s_per_token) for num in (1, _LONG_PREFIX)]
            line = self._lines[pair] = MeasuredLine(points)
        return line
