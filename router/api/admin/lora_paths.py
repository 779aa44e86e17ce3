"""`POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`: load and unload adapters as vLLM does.

Callers always need the role ``operate``, even on a router without keys, because any web page could
send requests to a router without keys.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web

from baton.api.errors import InvalidRequestError
from router.api.admin.adapters import AdapterAdmin
from router.api.admin.node_calls import NodeCalls
from router.api.http.exchange import PRINCIPAL, read_fields


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``.

    Attributes:
        lora_name: name for the adapter. If another adapter has the name, the name is switched to
            the adapter in ``lora_path``.
        lora_path: path of the adapter's folder: absolute and below ``--adapter-root``, or relative
            to ``--adapter-root``.
        base_model_name: base model or a name of it; needed if the router serves several.
        load_inplace: accepted without effect: a name that exists can always be switched.
    """

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``: the adapter's name, which is removed."""

    lora_name: str


class LoraPaths:
    """Answers both paths; `web.middleware` turns the errors that methods raise into responses."""

    def __init__(self, adapters: AdapterAdmin) -> None:
        self._adapters = adapters

    async def load(self, request: web.Request) -> web.Response:
        """Answer ``POST /v1/load_lora_adapter``: load an adapter, and map a name to it."""
        body = await read_fields(request, LoadLoraRequest, strict=False)
        name = body.lora_name
        try:
            await self._adapters.load(
                NodeCalls(request[PRINCIPAL].name),
                name,
                self._relative(body.lora_path),
                model=body.base_model_name or "",
            )
        except InvalidRequestError as error:
            fields = {"name": "lora_name", "adapter": "lora_path", "model": "base_model_name"}
            raise error.of_field(fields.get(error.field, error.field)) from None
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """Remove a name; its adapter is unloaded from nodes once its requests have ended."""
        body = await read_fields(request, UnloadLoraRequest, strict=False)
        name = body.lora_name
        try:
            await self._adapters.unload(NodeCalls(request[PRINCIPAL].name), name)
        except InvalidRequestError as error:
            raise error.of_field("lora_name") from None
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _relative(self, path: str) -> str:
        """Return a path relative to the router's root if it lies below the root, else unchanged."""
        root, given = self._adapters.root, Path(path)
        if root and given.is_absolute() and given.is_relative_to(Path(root).absolute()):
            return str(given.relative_to(Path(root).absolute()))
        return path
