"""EncodeWork: what one attempt asks of encode nodes, from its commands to its prompt's end.

Refuses to know: why a node was chosen, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.images import PromptImage
from baton.api.outputs import PrefillReceipt
from baton.link.words import CancelCommand, EncodeCommand
from router.fleet.encodings.encode_places import EncodePlaces, EncodePlan


class EncodeWork:
    """The images that encode nodes encode for one attempt; often none.

    Args:
        request_id: the call's id on nodes.
        images: all images of the prompt.
        plan: where the images are encoded; None: the node that computes the prompt encodes.
        places: the table that counts this work.

    Attributes:
        plan: the argument; None once the work has ended.
    """

    def __init__(
        self,
        request_id: str,
        images: Sequence[PromptImage],
        plan: EncodePlan | None,
        places: EncodePlaces,
    ) -> None:
        self._request_id = request_id
        self._images, self.plan, self._places = images, plan, places

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """Engine ids for the prefill node's command; see `EncodePlan`. Empty without a plan."""
        return () if self.plan is None else self.plan.engine_ids

    @property
    def expected_s(self) -> float:
        """Seconds in which all encodings are expected on the prefill node; 0 without a plan."""
        return 0.0 if self.plan is None else self.plan.expected_s

    def send_commands(self, timeout_s: float) -> None:
        """Tell encode nodes to encode the images and send them to the prefill node."""
        if self.plan is None:
            return
        for node, images in self.plan.by_node:
            node.send(
                EncodeCommand(
                    request_id=self._request_id,
                    epoch=self.plan.epoch,
                    prefill_engine_id=self.plan.prefill_engine_id,
                    timeout_s=timeout_s,
                    images=images,
                )
            )

    def note_computed(self, receipt: PrefillReceipt) -> None:
        """Note that the prompt is computed, so that nothing more is encoded for it."""
        plan, self.plan = self.plan, None
        if plan is None:
            return
        self._places.note_computed(plan, self._images, receipt)
        if receipt.num_encodings_lost:  # encode nodes may still have images in their queues
            self._cancel(plan)

    def end(self) -> None:
        """Cancel the images that still wait on encode nodes; safe to repeat."""
        plan, self.plan = self.plan, None
        if plan is not None:
            self._places.close(plan)
            self._cancel(plan)

    def _cancel(self, plan: EncodePlan) -> None:
        for node, _ in plan.by_node:
            node.send(CancelCommand(self._request_id, plan.epoch))
