"""PrefixSources: which node sends a cached prefix to the node that computes a prompt.

    seconds to compute the tokens    measured on the node that computes the prompt: the reader
    seconds to fetch them            measured between the two nodes; first by the pair's probe

A prefix is fetched if fetching takes less time than computing. A fetch costs no time while the
reader computes earlier prompts, because the prompt must wait for them anyway. If the router is
wrong, the reader computes the missing tokens, which costs only time. Refuses to know: links,
attempts.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.api.outputs import DecodeReceipt, PrefillReceipt
from baton.kv.prefixes import is_fetch_end
from baton.link.words import PeerReport
from router.fleet.load.measured_line import MeasuredLine
from router.fleet.load.prompt_units import prompt_units, tokens_until, units_until
from router.fleet.node import Node
from router.fleet.peers.pairing import Reach

# Minimum number of tokens of a fetch; fewer tokens do not save the time of the messages.
MIN_TOKENS = 32
# Maximum expected seconds of a fetch; of a longer prefix, only the beginning is fetched. A longer
# fetch could reach the reader's `--fetch-timeout-s` and bring nothing.
LONGEST_S = 1.0
# Assumed seconds for the messages of a fetch, and bytes per second, until these are measured.
LATENCY_S, DEFAULT_BYTES_PER_S = 0.005, 1e9
# Maximum number of holders that `add_fetchable` considers: it runs for each request, and looks at
# each pair of a holder and a reader.
MAX_HOLDERS = 4
# After a lost prefix, the holder sends the same reader no prefixes for this many seconds.
BARRED_S = 5.0
# Seconds without a measurement after which the measurements of a pair are forgotten. Otherwise, a
# pair that was slow for a while would never be used again, and so never be measured again.
STALE_S = 60.0
_LONG_PREFIX = 4096


class SourceTerms(NamedTuple):
    """The expected times to fetch a cached prefix from a node and to compute it.

    Attributes:
        node: name of the node that holds the prefix.
        num_lacking: number of the prefix's tokens that the reader lacks and can receive in time.
        fetch_s: seconds of the fetch that remain when the reader's earlier prompts are computed.
        compute_s: seconds to compute the lacking tokens instead.
        is_chosen: whether the node will send the prefix, because this saves the most time.
    """

    node: str
    num_lacking: int
    fetch_s: float
    compute_s: float
    is_chosen: bool = False

    @property
    def saved_s(self) -> float:
        """Seconds that the fetch saves; less than 0: computing is faster."""
        return self.compute_s - self.fetch_s


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A node that sends a cached prefix to the node that computes an attempt's prompt.

    Attributes:
        node: the node that holds the prefix.
        reader_engine_id: the node that computes the prompt.
        num_tokens: tokens of the prefix.
        sources: measures the fetch.
        terms: the expected times.
    """

    node: Node
    reader_engine_id: str
    num_tokens: int
    sources: PrefixSources = field(repr=False)
    terms: SourceTerms

    def note_receipt(self, receipt: PrefillReceipt | DecodeReceipt) -> None:
        """Measure the fetch from the reader's receipt."""
        self.sources.note_receipt(self, receipt)


class PrefixSources:
    """Chooses sources for the nodes of one base model.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reach = Reach()
        # Reports by holder, reader, and whether the holder reported.
        self._reports: dict[tuple[str, str, bool], PeerReport] = {}
        self._lines: dict[tuple[str, str], MeasuredLine] = {}  # by holder and reader
        self._measured_at: dict[tuple[str, str], float] = {}  # by holder and reader
        # By holder and reader: the time until which the holder sends the reader nothing.
        self._barred: dict[tuple[str, str], float] = {}
        # For each node: the nodes on which it has reported, and the nodes that have reported on it
        self._partners: dict[str, set[str]] = {}

    def note_report(self, node: Node, peer: Node, report: PeerReport) -> None:
        """Note a node's report on the connection to a peer's end for prefixes."""
        by_holder = is_fetch_end(report.engine_id)
        holder, reader = (node, peer) if by_holder else (peer, node)
        pair = holder.engine_id, reader.engine_id
        self._reports[*pair, by_holder] = report
        for one, other in (pair, pair[::-1]):
            self._partners.setdefault(one, set()).add(other)
        there, back = (self._reports.get((*pair, which)) for which in (True, False))
        # A reader that is not connected to the holder yet would give up the prefix, so the pair
        # counts as connected only once both report it.
        self._reach.note(*pair, there if back is not None and back.connected else None, back)

    def forget(self, engine_id: str) -> None:
        """Forget a node that left."""
        self._reach.forget(engine_id)
        for other in self._partners.pop(engine_id, ()):
            self._partners[other].discard(engine_id)
            for pair in ((engine_id, other), (other, engine_id)):
                self._reports.pop((*pair, False), None)
                self._reports.pop((*pair, True), None)
                self._lines.pop(pair, None)
                self._measured_at.pop(pair, None)
                self._barred.pop(pair, None)

    def compare(
        self,
        reader: Node,
        holders: Iterable[Node],
        cached: Mapping[str, int],
        num_prompt_tokens: int,
    ) -> list[PrefixSource]:
        """Return the sources of a prompt's prefix; the source that saves the most time comes first.

        Only the first source can be chosen. Sources that save no time are included.

        Args:
            reader: the node that is to compute the prompt.
            holders: nodes that may send prefixes.
            cached: leading prompt tokens that each node has in its cache, by engine id.
        """
        block_size = reader.registration.block_size
        # The reader computes at least the last token.
        most = (num_prompt_tokens - 1) // block_size * block_size
        own, found = cached.get(reader.engine_id, 0), []
        for node in holders:
            num_tokens = min(cached.get(node.engine_id, 0), most)
            if num_tokens - own >= MIN_TOKENS and self._may_send(node.engine_id, reader.engine_id):
                terms = self._terms(node.engine_id, node.name, reader, own, num_tokens - own)
                num_tokens = own + terms.num_lacking
                found.append(PrefixSource(node, reader.engine_id, num_tokens, self, terms))
        found.sort(key=lambda source: -source.terms.saved_s)
        if found and found[0].terms.saved_s > 0:
            terms = found[0].terms._replace(is_chosen=True)
            found[0] = dataclasses.replace(found[0], terms=terms)
        return found

    def add_fetchable(
        self, cached: Mapping[str, int], readers: Mapping[str, Node]
    ) -> Mapping[str, int]:
        """Return how many tokens each node need not compute, because it has them or can fetch them.

        A fetch takes time, so its tokens count only in part: as many as the reader could compute in
        the time that the fetch saves. Only the holders with the most cached tokens are considered.

        Args:
            cached: leading prompt tokens that each node has in its cache, by engine id.
            readers: the nodes that may fetch, by engine id.
        """
        counts, reach = dict(cached), self._reach.bandwidths
        holders = heapq.nlargest(MAX_HOLDERS, filter(reach.get, cached), key=cached.__getitem__)
        for holder_id in holders:
            for reader in filter(None, map(readers.get, reach[holder_id])):
                own = cached.get(reader.engine_id, 0)
                num_lacking = cached[holder_id] - own
                if num_lacking < MIN_TOKENS or not self._may_send(holder_id, reader.engine_id):
                    continue
                saved_s = self._terms(holder_id, "", reader, own, num_lacking).saved_s
                if saved_s > 0:
                    share = reader.load.attention_share
                    units = units_until(share, own) + saved_s / reader.load.prefill.per_unit
                    num_saved = int(tokens_until(share, units))
                    counts[reader.engine_id] = max(counts.get(reader.engine_id, 0), num_saved)
        return counts

    def note_receipt(self, source: PrefixSource, receipt: PrefillReceipt | DecodeReceipt) -> None:
        """Measure a fetch by its receipt; bar its pair of nodes for a while if it was lost."""
        pair = source.node.engine_id, source.reader_engine_id
        line = self._lines.get(pair)
        if line is None:  # one of the nodes has left since
            return
        if receipt.num_fetches_lost:
            self._barred[pair] = self._clock() + BARRED_S
        # A fetch that ends while the reader computes earlier prompts is noticed only between the
        # reader's steps, so its time shows little about the path.
        if receipt.num_fetched_tokens and source.terms.fetch_s > 0:
            line.measure(receipt.num_fetched_tokens, receipt.fetch_wait_s)
            line.refresh()
            self._measured_at[pair] = self._clock()

    def __bool__(self) -> bool:
        """Return whether any node can send prefixes."""
        return bool(self._reach.bandwidths)

    def _may_send(self, holder_id: str, reader_id: str) -> bool:
        """Return whether two nodes are connected and lost no prefix between them lately."""
        barred_until = self._barred.get((holder_id, reader_id), -math.inf)
        is_reached = reader_id in self._reach.bandwidths.get(holder_id, {})
        return is_reached and barred_until <= self._clock()

    def _terms(
        self, holder_id: str, name: str, reader: Node, own: int, num_lacking: int
    ) -> SourceTerms:
        """Return the expected times of a fetch, cut to the tokens that arrive in `LONGEST_S`.

        Args:
            own: number of the prompt's first tokens that the reader has.
            num_lacking: number of tokens behind these that the reader lacks.
        """
        line, block_size = self._line(holder_id, reader), reader.registration.block_size
        if line.per_unit and line.seconds(num_lacking) > LONGEST_S:
            num_in_time = int((LONGEST_S - line.base) / line.per_unit)
            num_lacking = min(num_lacking, max(num_in_time, MIN_TOKENS))
            num_lacking -= num_lacking % block_size
        units = prompt_units(reader.load.attention_share, num_lacking, own)
        compute_s = reader.load.prefill.per_unit * units
        fetch_s = max(line.seconds(num_lacking) - reader.load.prefill_queue_s, 0.0)
        return SourceTerms(name, num_lacking, fetch_s, compute_s)

    def _line(self, holder_id: str, reader: Node) -> MeasuredLine:
        """Return the line of fetch times between two nodes, in seconds by number of tokens."""
        pair = holder_id, reader.engine_id
        line = self._lines.get(pair)
        if self._clock() - self._measured_at.get(pair, math.inf) > STALE_S:
            del self._measured_at[pair]
            line = None
        if line is None:
            bandwidth = self._reach.bandwidths[pair[0]][pair[1]] or DEFAULT_BYTES_PER_S
            s_per_token = reader.load.shared.kv_bytes_per_token / bandwidth
            points = [(float(num), LATENCY_S + num * s_per_token) for num in (1, _LONG_PREFIX)]
            line = self._lines[pair] = MeasuredLine(points)
        return line
