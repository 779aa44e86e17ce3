"""ImageFetcher: fetches image files by URL, limited in size, time and number.

A data URL holds its file. Other URLs are fetched only from hosts that the operator lists, at the
addresses that `ImageHosts` has checked. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Sequence

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from baton.api.errors import InvalidRequestError
from router.api.images.data_urls import decode_data_url, is_data_url
from router.api.images.image_hosts import ImageHosts, PinnedUrl
from router.intake.images.image_options import ImageOptions
from router.intake.images.image_reader import ImageFile, ImageReader

MAX_FETCHES = 16  # maximum number of fetches at once, for all callers together
# If hosts never answer, one tenant's fetches must leave room for other tenants' images.
MAX_FETCHES_OF_CALLER = 8  # maximum number of fetches at once for one tenant
_PIECE_BYTES = 2**16
_MAX_HEADER_BYTES = 8_190
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"}


class _Pinned(AbstractResolver):
    """Resolves every host name to the addresses that `ImageHosts` checked for the URL."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


class ImageFetcher:
    """Fetches the images that requests name by URL.

    Raises ConfigError if an entry of ``options.image_hosts`` is not a host.
    """

    def __init__(self, options: ImageOptions | None = None) -> None:
        self.options = options or ImageOptions()
        self._hosts = ImageHosts(self.options.image_hosts)
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        # Turns by tenant. A tenant's entry lives only as long as its fetches run or wait.
        self._turns_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    async def read_files(
        self, urls: Sequence[tuple[str, str]], reader: ImageReader, caller: str = ""
    ) -> list[ImageFile]:
        """Return the image files of a request.

        Args:
            urls: the client's field and the URL of each image, in order.
            reader: has the model's limits for images.
            caller: the tenant whose request this is.

        Raises:
            InvalidRequestError: a URL or its file is refused.
        """
        files: list[ImageFile] = []
        num_bytes = 0
        for field, url in urls:
            if is_data_url(url):
                data = decode_data_url(url, field, reader.options, num_bytes)
            else:
                data = await self.fetch(url, field, num_bytes, caller)
            num_bytes += len(data)
            files.append(ImageFile(data, field))
        return files

    async def fetch(self, url: str, field: str, num_before: int = 0, caller: str = "") -> bytes:
        """Return the file at a URL.

        Args:
            field: the client's field that has the URL, for errors.
            num_before: bytes of the images that precede this one in the request.
            caller: the tenant whose request this is.

        Raises:
            InvalidRequestError: the URL may not be fetched, or the file was incomplete, too large
                or too late.
        """
        if not self._hosts:
            raise InvalidRequestError(
                field, "must be a data URL: this server fetches no images (--image-hosts)"
            )
        timeout_s = self.options.image_timeout_s
        turns = self._turns_of.setdefault(caller, asyncio.Semaphore(MAX_FETCHES_OF_CALLER))
        try:
            async with asyncio.timeout(timeout_s), turns, self._turns:
                pinned = await self._hosts.resolve(url, field)
                return await self._get(pinned, field, num_before)
        except TimeoutError:
            raise InvalidRequestError(
                field, f"the image did not come within {timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError):
            raise InvalidRequestError(field, "the image could not be fetched") from None

    async def _get(self, pinned: PinnedUrl, field: str, num_before: int) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(pinned.addresses), use_dns_cache=False, force_close=True
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Bodies are not decompressed, because a few bytes could inflate to gigabytes
                auto_decompress=False,
                # Use no proxy: a proxy would connect to an address that was not checked.
                trust_env=False,
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            ) as session,
            session.get(pinned.url, headers=_HEADERS, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise InvalidRequestError(field, f"the host answered with {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise InvalidRequestError(field, "the host sent a compressed answer")
            if response.content_length is not None:
                self.options.check_bytes(field, response.content_length, num_before)
            data = bytearray()
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                data += piece
                self.options.check_bytes(field, len(data), num_before)
            self.options.check_bytes(field, len(data), num_before)
            return bytes(data)


FETCHER = web.AppKey("images", ImageFetcher)
