"""Records this version's protobuf messages, for compatibility tests of later versions.

    python -m tools.record_wire tests/contract/wire/0.1.0

The script writes the descriptors of ``proto/``, and a message of every kind with every field
filled, as bytes and as JSON. Run it once per release, on the release's commit; its files are never
changed later.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

DESCRIPTORS, MESSAGES = "descriptors.binpb", "messages.json"
FILES = ("types", "inference", "node", "admin")
_MAX_DEPTH = 6


def sample(descriptor: Descriptor, *, seed: int = 1, member: str = "", depth: int = 0) -> Message:
    """Make a message with every field filled; of a oneof, the first member or ``member``.

    All values differ from each other and from the fields' defaults. Messages that are nested deeper
    than Baton's messages are left out.
    """
    message: Any = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            wanted = member if member in {one.name for one in oneof.fields} else ""
            if field.name != (wanted or oneof.fields[0].name):
                continue
        value = _value(field, seed + field.number, depth)
        if value is None:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, seed, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend([value, value])
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message  # type: ignore[no-any-return]  # made by a factory


def _fill_map(message: Any, field: FieldDescriptor, seed: int, depth: int) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    made = _value(value, seed + 1, depth)
    into = getattr(message, field.name)
    if value.message_type is not None:
        into[_value(key, seed, depth)].CopyFrom(made)
    else:
        into[_value(key, seed, depth)] = made


def _value(field: FieldDescriptor, seed: int, depth: int) -> Any:
    if field.message_type is not None:
        if depth >= _MAX_DEPTH:
            return None
        return sample(field.message_type, seed=seed, depth=depth + 1)
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return f"{field.name}-{seed}".encode() if field.type == field.TYPE_BYTES else f"s{seed}"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return seed + 0.5
    return seed


def top_messages() -> list[tuple[str, Message]]:
    """Make named samples of all messages of calls and links: one for each member of a oneof."""
    from baton.v1 import admin_pb2, inference_pb2, node_pb2

    found: dict[str, Message] = {}
    for module in (inference_pb2, node_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                for descriptor in (method.input_type, method.output_type):
                    for member in _members(descriptor):
                        name = f"{descriptor.full_name}{'.' if member else ''}{member}"
                        found[name] = sample(descriptor, member=member)
    # these messages are sent as bytes inside other messages
    for name in ("NodeAdminRequest", "NodeAdminResponse"):
        descriptor = admin_pb2.DESCRIPTOR.message_types_by_name[name]
        for member in _members(descriptor):
            found[f"{descriptor.full_name}.{member}"] = sample(descriptor, member=member)
    return sorted((found | _commands()).items())


def _commands() -> dict[str, Message]:
    """Make samples of commands to nodes, with plausible values, because nodes check values."""
    from baton.api.images import ImageSpan, PromptImage
    from baton.api.sampling_params import SamplingParams
    from baton.link import wire
    from baton.link.words import DecodeCommand, PrefillCommand

    params = SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=("a", "b"), logprobs=2
    )
    common: dict[str, Any] = {
        "request_id": "r",
        "epoch": 5,
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": params,
        "timeout_s": 9.5,
        "output_token_ids": (4, 5),
        "cache_salt": b"salt",
        "images": (PromptImage(ImageSpan(1, 2, b"digest", (1, 1, 2)), b"file"),),
    }
    prefill = PrefillCommand(decode_engine_id="d0-1", **common)
    decode = DecodeCommand(prefill_engine_id="p0-1", **common)
    return {
        "baton.v1.RouterMessage.prefill": wire.command_to_proto(prefill),
        "baton.v1.RouterMessage.decode": wire.command_to_proto(decode),
    }


def _members(descriptor: Descriptor) -> list[str]:
    return [
        field.name for oneof in descriptor.oneofs if len(oneof.fields) > 1 for field in oneof.fields
    ] or [""]


def main(folder: Path) -> None:
    """Write the descriptors and sample messages of this version."""
    from baton.v1 import admin_pb2, inference_pb2, node_pb2, types_pb2

    folder.mkdir(parents=True)
    files = descriptor_pb2.FileDescriptorSet()
    for module in (types_pb2, inference_pb2, node_pb2, admin_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    (folder / DESCRIPTORS).write_bytes(files.SerializeToString(deterministic=True))
    messages = [
        {
            "name": name,
            "type": message.DESCRIPTOR.full_name,
            "hex": message.SerializeToString(deterministic=True).hex(),
            "json": json_format.MessageToDict(message, preserving_proto_field_name=True),
        }
        for name, message in top_messages()
    ]
    lines = ",\n".join(json.dumps(one, sort_keys=True) for one in messages)
    (folder / MESSAGES).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
