"""Image parts: the image files of a chat request's messages, decoded or fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from aiohttp import web

from baton.api.errors import InvalidRequestError
from router.api.http.conversation import chat_prompt, is_image
from router.api.http.images.data_urls import decode_data_url, is_data_url
from router.api.http.images.image_fetch import ImageFetcher
from router.api.http.schema import ChatRequest, ContentPart, ImageUrl, Message
from router.intake.images.image_reader import ImageFile
from router.intake.texts import ChatPrompt
from router.names.served_name import ServedName

FETCHER = web.AppKey("images", ImageFetcher)


async def read_chat_prompt(
    request: web.Request, body: ChatRequest, served: ServedName
) -> ChatPrompt:
    """Return the input of the chat template with the files of its images.

    Raises:
        InvalidRequestError: a message is wrong, the model takes no images, or an image is refused.
    """
    prompt = chat_prompt(body, served.chat_template)
    found = list(_images_of(body.messages))
    if not found:
        return prompt
    fetcher = request.app[FETCHER]
    reader = served.intake.reader.image_reader(found[0][0])
    reader.options.check_count("messages", len(found))
    files: list[ImageFile] = []
    num_bytes = 0
    for field, part in found:
        url = _url_of(part, field)
        if is_data_url(url):
            data = decode_data_url(url, field, reader.options, num_bytes)
        else:
            data = await fetcher.fetch(url, field, num_bytes)
        num_bytes += len(data)
        files.append(ImageFile(data, field))
    return dataclasses.replace(prompt, images=files)


def _images_of(messages: Sequence[Message]) -> Iterator[tuple[str, ContentPart]]:
    """Yield each image with its field, in order."""
    for index, message in enumerate(messages):
        if message.role == "tool" or not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if is_image(part):
                yield f"messages[{index}].content[{number}]", part


def _url_of(part: ContentPart, field: str) -> str:
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if not url:
        raise InvalidRequestError(f"{field}.image_url", "is needed")
    return url
