"""Files that routers accept are decoded with the size that routers read, or refused in one line."""

from __future__ import annotations

import contextlib
import warnings

from baton.api.errors import InvalidRequestError
from baton.media.image_header import read_header
from models.vision.preprocess import decode
from router.intake.images.image_options import ImageOptions
from tests.fakes.outside.hostile_images import hostile_files


def test_decoded_files_have_the_size_of_their_header() -> None:
    sizes = []
    for case in hostile_files():
        with contextlib.suppress(InvalidRequestError), warnings.catch_warnings(action="ignore"):
            header = read_header(case.data)
            ImageOptions().check_size("image", header.width, header.height)
            image = decode(case.data)
            assert image.size == (header.width, header.height), case.name
            sizes.append(image.size)
    assert len(sizes) > 30
