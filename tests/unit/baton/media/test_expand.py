"""Unit tests of `expand_images`: markers become the tokens of images, and each image has a name."""

from __future__ import annotations

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageSpan
from baton.media.expand import DIGEST_BYTES, expand_images, image_digest
from tests.fakes.checkpoints.image_tokenizer import RowsLayout

LAYOUT = RowsLayout(marker_token_id=7, row_token_id=8)


def test_each_marker_becomes_the_tokens_of_its_image_and_text_stays() -> None:
    token_ids, images = expand_images(
        [1, 7, 2, 3, 7, 4], [(b"one", 28, 14), (b"two", 14, 28)], LAYOUT
    )
    assert token_ids == [1, 7, 7, 8, 2, 3, 7, 8, 7, 8, 4]
    first, second = (image.span for image in images)
    assert first == ImageSpan(1, 3, image_digest(b"one", LAYOUT.settings), (1, 1, 2))
    assert second == ImageSpan(6, 4, image_digest(b"two", LAYOUT.settings), (1, 2, 1))
    assert [image.data for image in images] == [b"one", b"two"]
    assert first.digest != second.digest
    assert len(first.digest) == DIGEST_BYTES


def test_neighbouring_images_and_a_prompt_of_images_only() -> None:
    token_ids, images = expand_images([7, 7], [(b"a", 1, 1), (b"b", 1, 1)], LAYOUT)
    assert token_ids == [7, 8, 7, 8]
    assert [image.span.first for image in images] == [0, 2]


def test_a_digest_depends_on_the_file_and_the_settings() -> None:
    assert image_digest(b"a", b"bc") != image_digest(b"a", b"bd")
    assert image_digest(b"a", b"bc") != image_digest(b"b", b"bc")


def test_prompts_with_different_salts_name_an_image_differently() -> None:
    digests = {
        expand_images([7], [(b"a", 1, 1)], LAYOUT, salt)[1][0].span.digest
        for salt in (b"", b"one", b"two")
    }
    assert len(digests) == 3
    (again,) = expand_images([7], [(b"a", 1, 1)], LAYOUT, b"one")[1]
    assert again.span.digest == image_digest(b"a", LAYOUT.settings, b"one")
    assert again.span.digest in digests


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_markers_without_images_and_images_without_markers_are_refused(num_images: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"got 2 for {num_images} images"):
        expand_images([7, 1, 7], [(b"a", 1, 1)] * num_images, LAYOUT)
