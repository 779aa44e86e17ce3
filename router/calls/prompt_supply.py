"""PromptSupply: what other nodes send for an attempt's prompt: encodings and a cached prefix.

Refuses to know: why a node is chosen, calls, output tokens.
"""

from __future__ import annotations

from typing import Any

from baton.api.outputs import DecodeReceipt, PrefillReceipt
from baton.link.words import ShareCommand
from router.fleet.encodings.encode_work import EncodeWork
from router.fleet.node import Node
from router.fleet.prefix_sources import PrefixSource


class PromptSupply:
    """The work of other nodes for the prompt of one attempt; often none.

    Args:
        encodings: the attempt's images on encode nodes.
        source: the node that sends a cached prefix; None: no node sends one.
        share_command: the command for this node; None without a source.
    """

    def __init__(
        self,
        encodings: EncodeWork,
        source: PrefixSource | None = None,
        share_command: ShareCommand | None = None,
    ) -> None:
        self._encodings, self._source, self._share_command = encodings, source, share_command

    @property
    def num_fetched_tokens(self) -> int:
        """Number of tokens in the cached prefix; 0: no node sends one."""
        return 0 if self._source is None else self._source.num_tokens

    @property
    def fetch_s(self) -> float:
        """Expected seconds of the prompt's wait for the prefix, after its queue; 0: no prefix."""
        return 0.0 if self._source is None else self._source.terms.fetch_s

    @property
    def encode_fields(self) -> dict[str, Any]:
        """Fields of the `PrefillCommand` about the encode nodes."""
        encodings = self._encodings
        return {
            "encode_engine_ids": encodings.engine_ids,
            "encode_wait_s": encodings.expected_s,
        }

    def fetch_fields(self, node: Node) -> dict[str, Any]:
        """Return the fields of a node's command that give the prefix's holder and length."""
        if self._source is None or node.engine_id != self._source.reader_engine_id:
            return {}
        return {
            "fetch_engine_id": self._source.node.engine_id,
            "fetch_num_tokens": self.num_fetched_tokens,
        }

    def send_commands(self, timeout_s: float) -> None:
        """Command other nodes to send the encodings and the prefix.

        Args:
            timeout_s: seconds after which encode nodes stop encoding for the attempt.
        """
        if self._source is not None and self._share_command is not None:
            self._source.node.send(self._share_command)
        self._encodings.send_commands(timeout_s)

    def note_computed(self, receipt: PrefillReceipt) -> None:
        """Note that the prompt is computed, and measure by the receipt what other nodes sent."""
        if self._source is not None:
            self._source.note_receipt(receipt)
        self._encodings.note_computed(receipt)

    def note_decoded(self, receipt: DecodeReceipt) -> None:
        """Measure the prefix's fetch from the receipt of a decode node that computed the prompt."""
        if self._source is not None:
            self._source.note_receipt(receipt)

    def end(self) -> None:
        """Cancel the images that still wait on encode nodes; safe to repeat."""
        self._encodings.end()
