"""BaseModel: one base model's own fleet, queue, tokenizer and metrics in this router."""

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
    """Hold the parts that serve one base model; no part is shared with another base model.

    Attributes:
        model: the model as given to ``--model``.
        dispatcher: runs calls on the nodes of this base model only.
        intake: has its tokenizer, parsers and sampling defaults.
        metrics: count its requests.
    """

    model: str
    dispatcher: Dispatcher
    intake: Intake
    metrics: RouterMetrics

    @property
    def pool(self) -> NodePool:
        """Nodes of this base model."""
        return self.dispatcher.pool

    def check_nodes(self) -> None:
        """Raise NodeUnavailableError if there is no node, and none is expected back.

        A request would otherwise wait for nodes that may never come.
        """
        pool = self.pool
        if not pool.num_nodes and not pool.awaits_nodes(
            self.dispatcher.recoveries.options.return_timeout_s
        ):
            with self.metrics.accepting():
                raise NodeUnavailableError(f"model: no node of {self.model!r} has joined")

    def check_adapter(self, adapter: str) -> None:
        """Raise NodeUnavailableError if no pair of nodes has an adapter or can load it.

        Args:
            adapter: digest of the adapter's bytes, 64 hex characters.
        """
        if not self.pool.can_load_adapter(adapter):
            with self.metrics.accepting():
                why = self.pool.adapters.why_not((node.load for node in self.pool.nodes), adapter)
                raise NodeUnavailableError(
                    f"model: no node of {self.model!r} can load the adapter "
                    f"{shorten_digest(adapter)}: {why}"
                )
