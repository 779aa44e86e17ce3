"""BaseModel: one base model's nodes, gate, tokenizer and metrics in this router."""

from __future__ import annotations

from dataclasses import dataclass

from baton.adapters.digest import shorten_digest
from baton.api.errors import NodeUnavailableError
from router.calls.dispatcher import Dispatcher
from router.fleet.node_pool import NodePool
from router.intake.intake import Intake
from router.intake.metrics import RouterMetrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseModel:
    """The parts that serve one base model; no two base models share any of them.

    Attributes:
        model: the base model as the option ``--model`` names it.
        dispatcher: runs calls on the nodes of this base model only.
        intake: has the model's tokenizer, parsers and sampling defaults.
        metrics: counts the model's requests.
    """

    model: str
    dispatcher: Dispatcher
    intake: Intake
    metrics: RouterMetrics

    @property
    def pool(self) -> NodePool:
        """The pool of the nodes that serve this base model."""
        return self.dispatcher.pool

    def check_nodes(self) -> None:
        """Raise NodeUnavailableError if no node has joined and none is expected back.

        Without this check, a request would wait for nodes that may never join.
        """
        pool = self.pool
        if not pool.num_pair_nodes and not pool.awaits_nodes(
            self.dispatcher.recoveries.options.return_timeout_s
        ):
            with self.metrics.accepting():
                raise NodeUnavailableError(f"model: no node of {self.model!r} has joined")

    def check_adapter(self, adapter: str) -> None:
        """Raise NodeUnavailableError if the nodes of some role can neither use nor load an adapter.

        Returns right after the router's start in any case, because other nodes may still join; see
        `LostNodes`.

        Args:
            adapter: digest of the adapter's files, 64 hex characters.
        """
        if not (self.pool.can_load_adapter(adapter) or self.pool.lost_nodes.expects_newcomers):
            with self.metrics.accepting():
                why = self.pool.adapters.why_not((node.load for node in self.pool.nodes), adapter)
                raise NodeUnavailableError(
                    f"model: no node of {self.model!r} can load the adapter "
                    f"{shorten_digest(adapter)}: {why}"
                )
