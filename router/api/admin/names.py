"""Convert served names to protobuf for operators, and operators' requests to served names."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.api.errors import BatonError, ConfigError, InvalidRequestError
from baton.v1 import admin_pb2
from router.names.defaults import read_name_defaults
from router.names.served_name import ServedName
from router.names.table import NameTable


def describe_names(names: NameTable) -> admin_pb2.ListNamesResponse:
    """Describe all names, the default one first."""
    return admin_pb2.ListNamesResponse(names=map(describe_name, names.served))


def describe_name(served: ServedName) -> admin_pb2.NameDescription:
    """Describe a served name; if its requests would be refused now, also say why."""
    pool = served.base.pool
    problem = "" if pool.fleet else pool.why_no_pair()
    try:
        if served.adapter:
            served.base.check_adapter(served.adapter)
    except BatonError as error:
        problem = problem or str(error)
    return admin_pb2.NameDescription(
        name=served.name,
        model=served.base.model,
        adapter=served.adapter,
        request_defaults=served.defaults.text,
        chat_template=served.chat_template,
        num_nodes=pool.num_nodes,
        adapter_source=served.adapter_source,
        pins_adapter=served.pins_adapter,
        problem=problem,
    )


def name_from_proto(names: NameTable, request: admin_pb2.SetNameRequest) -> ServedName:
    """Return the served name that an operator's request describes.

    Raises:
        NotFoundError: the target is neither a served name nor a base model.
        InvalidRequestError: a value is wrong.
    """
    changed: dict[str, Any] = {"name": request.name}
    try:
        if request.HasField("adapter"):
            changed["adapter"] = request.adapter
            changed["adapter_source"] = _source_of(names, request.adapter)
        if request.HasField("adapter_source"):
            changed["adapter_source"] = request.adapter_source
        if request.HasField("pins_adapter"):
            changed["pins_adapter"] = request.pins_adapter
        if request.HasField("request_defaults"):
            changed["defaults"] = read_name_defaults(request.request_defaults)
        if request.HasField("chat_template"):
            changed["chat_template"] = request.chat_template
        if request.target in names.names:
            return dataclasses.replace(names.find(request.target), **changed)
        return ServedName(base=names.find_base(request.target), **changed)
    except ConfigError as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidRequestError(field, problem) from None


def _source_of(names: NameTable, digest: str) -> str:
    """Return the folder of an adapter that a served name uses; empty: no name uses the adapter."""
    return next((one.adapter_source for one in names.served if one.adapter == digest), "")
