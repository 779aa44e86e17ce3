"""Files that routers accept are decoded with the size that routers read, or refused in one line."""

from __future__ import annotations

import warnings

from baton.api.errors import InvalidRequestError
from baton.media.image_header import read_header
from models.vision.preprocess import decode
from router.intake.images.image_options import ImageOptions
from tests.fakes.outside.hostile_images import hostile_files

# Files whose headers are right, but whose pixels are not.
BROKEN_CODES = (
    *("gif with a frame of 8 x 8", "gif with a frame of 0 x 0", "gif with a code of 255 bits"),
    "png that claims 0 frames",
)


def test_decoded_files_have_the_size_of_their_header() -> None:
    sizes, problems = [], dict[str, str]()
    for case in hostile_files():
        try:
            with warnings.catch_warnings(action="ignore"):
                header = read_header(case.data)
                ImageOptions().check_size("image", header.width, header.height)
                image = decode(case.data)
        except InvalidRequestError as error:
            problems[case.name] = str(error)
        else:
            assert image.size == (header.width, header.height), case.name
            sizes.append(image.size)
    assert len(sizes) > 30
    assert not [problem for problem in problems.values() if "\n" in problem]
    for name in BROKEN_CODES:
        assert problems[name].endswith("the file cannot be decoded"), (name, problems[name])
