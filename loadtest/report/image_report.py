"""ImageReport: the images of a run, and where their encodings came from, by Baton's receipts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.outputs import PrefillReceipt
from loadtest.load.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingReport:
    """Where the images of requests with a prefill node's receipt were encoded.

    Attributes:
        num_images: images of these requests.
        num_received: images that encode nodes encoded, or had in their caches.
        num_lost: images that encode nodes were asked for, and that prefill nodes then encoded or
            had.
        num_made: images that prefill nodes encoded; includes lost ones.
        num_cached: images whose encodings were in the prefill nodes' encoder caches.
        num_in_prefix: images whose KV blocks were cached, so that no encoding was needed.
    """

    num_images: int
    num_received: int
    num_lost: int
    num_made: int
    num_cached: int

    @property
    def num_in_prefix(self) -> int:
        return max(self.num_images - self.num_received - self.num_made - self.num_cached, 0)

    def line(self) -> str:
        """Return a line that all reports print."""
        return (
            f"encodings: {self.num_received} received from encode nodes, "
            f"{self.num_made} made on prefill nodes ({self.num_lost} lost), "
            f"{self.num_cached} cached, {self.num_in_prefix} in cached prefixes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReport:
    """The images of the measured requests.

    Attributes:
        num_requests: requests with images.
        num_different: different images.
        encodings: None without receipts of prefill nodes.
    """

    num_requests: int
    num_images: int
    num_different: int
    encodings: EncodingReport | None

    def line(self) -> str:
        """Return a line that all reports print."""
        return (
            f"images: {self.num_images}, of which {self.num_different} different, "
            f"in {self.num_requests} requests"
        )


def report_images(records: Sequence[RequestRecord]) -> ImageReport | None:
    """Report the images of requests; None if none has any."""
    shown = [record for record in records if record.planned.images]
    if not shown:
        return None
    images = [image for record in shown for image in record.planned.images]
    receipts = [
        (len(record.planned.images), record.receipt.prefill)
        for record in shown
        if record.receipt is not None and record.receipt.prefill is not None
    ]
    return ImageReport(
        num_requests=len(shown),
        num_images=len(images),
        num_different=len(set(images)),
        encodings=_report_encodings(receipts) if receipts else None,
    )


def _report_encodings(receipts: Sequence[tuple[int, PrefillReceipt]]) -> EncodingReport:
    """Add up receipts, each beside the number of images of its prompt."""
    return EncodingReport(
        num_images=sum(number for number, _ in receipts),
        num_received=sum(receipt.num_encodings_received for _, receipt in receipts),
        num_lost=sum(receipt.num_encodings_lost for _, receipt in receipts),
        num_made=sum(receipt.num_images_encoded for _, receipt in receipts),
        num_cached=sum(receipt.num_encodings_cached for _, receipt in receipts),
    )
