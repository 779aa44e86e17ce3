"""ImageOptions: limits of the images in requests, and the hosts that images may come from."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import InvalidRequestError
from baton.options import check_limits, option

# An image must fit into a command to a node, whose size is limited (`MAX_MESSAGE_BYTES`, 64 MiB).
MOST_BYTES = 48 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Limits of the images in requests, which are checked before memory is allocated."""

    max_images: int = option(16, least=0, most=1024, help="Most images of a request; 0: none.")
    max_image_bytes: int = option(
        16 * 2**20,
        least=1,
        most=MOST_BYTES,
        help="Most bytes of an image file, and of all image files of a request together.",
    )
    max_open_image_bytes: int = option(
        4 * 2**30,
        least=1,
        help="Most bytes of the image files of all open requests; more requests with images are "
        "refused until others end. One tenant may have half of them.",
    )
    max_image_pixels: int = option(
        2**25,
        least=1,
        most=2**28,
        help="Most pixels of an image, width times height. A node needs about 16 bytes per pixel "
        "while it reads the file.",
    )
    max_image_aspect: float = option(
        200.0, least=1, help="Most times that an image may be wider than high, or the reverse."
    )
    image_hosts: str = option(
        "",
        help="Hosts from which the router fetches images that requests name by http(s) URL, "
        "separated by commas: host names, or HOST:PORT. Names that stand for private addresses "
        "are refused unless the address or its network, such as 10.0.0.0/8, is listed too. "
        'Empty: images come in requests only. "*": any public host.',
    )
    image_timeout_s: float = option(
        10.0, above=0, help="Time to fetch one image, seconds; redirects are not followed."
    )

    def __post_init__(self) -> None:
        check_limits(self)

    def check_count(self, field: str, num_images: int) -> None:
        """Raise InvalidRequestError if a request has too many images."""
        if num_images > self.max_images:
            raise InvalidRequestError(
                field, f"a request may have {self.max_images} images, got {num_images}"
            )

    def check_bytes(self, field: str, num_bytes: int, num_before: int = 0) -> None:
        """Raise InvalidRequestError if a request's image files are too large.

        Args:
            field: the client's field with the image, for the error.
            num_bytes: bytes of an image file, or how many it may have.
            num_before: bytes of the images that precede it in the request.
        """
        if not num_bytes:
            raise InvalidRequestError(field, "the image must have at least 1 byte, got 0")
        if num_before + num_bytes > self.max_image_bytes:
            got = f"{num_bytes}" if not num_before else f"{num_bytes} after {num_before}"
            raise InvalidRequestError(
                field,
                f"images of a request must have at most {self.max_image_bytes} bytes together, "
                f"got {got}",
            )

    def check_size(self, field: str, width: int, height: int) -> None:
        """Raise InvalidRequestError if an image has too many pixels, or is too long and narrow."""
        if min(width, height) < 1 or width * height > self.max_image_pixels:
            raise InvalidRequestError(
                field,
                f"the image must have 1 to {self.max_image_pixels} pixels, got {width} x {height}",
            )
        if max(width, height) > self.max_image_aspect * min(width, height):
            raise InvalidRequestError(
                field,
                f"the image may be at most {self.max_image_aspect:g} times as long as wide, "
                f"got {width} x {height}",
            )
