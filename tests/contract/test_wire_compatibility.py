"""Contract: this version and the last release understand each other's messages.

``wire/<release>/`` is what the release said, recorded by `tools/record_wire.py` on its commit: its
descriptors, and a message of every kind with every field filled. Nothing writes them anew.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.api.errors import ConfigError
from baton.link import wire, words
from baton.link.node_end import NodeEnd
from baton.link.words import NodeRole, protocol_problem
from baton.v1 import admin_pb2, inference_pb2, node_pb2, node_pb2_grpc, types_pb2
from router.api.grpc.link_service import NodeLinkService
from tests.fakes.router.nodes import make_pool, make_registration
from tools.record_wire import DESCRIPTORS, MESSAGES, top_messages

RELEASES = sorted(path for path in (Path(__file__).parent / "wire").iterdir() if path.is_dir())
NOW = descriptor_pool.Default()
MODULES = (types_pb2, inference_pb2, node_pb2, admin_pb2)


def pool_of(release: Path) -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString((release / DESCRIPTORS).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def said_by(release: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((release / MESSAGES).read_text())
    return found


CASES = [
    pytest.param(release, one, id=f"{release.name}-{one['name']}")
    for release in RELEASES
    for one in said_by(release)
]

LINK_CASES = [
    case
    for case in CASES
    if "Message." in case.values[1]["name"] and "register" not in case.values[1]["name"]  # type: ignore[index]
]


def test_there_is_a_release() -> None:
    assert RELEASES
    assert len(CASES) > 60


@pytest.mark.parametrize(("release", "said"), CASES)
def test_what_the_last_release_says_is_read_as_it_was_meant(
    release: Path, said: dict[str, Any]
) -> None:
    message = GetMessageClass(NOW.FindMessageTypeByName(said["type"]))()
    message.ParseFromString(bytes.fromhex(said["hex"]))
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == said["json"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_the_last_release_reads_what_we_say_but_for_what_is_new(release: Path) -> None:
    theirs = pool_of(release)
    num_read = 0
    for name, message in top_messages():
        try:
            descriptor = theirs.FindMessageTypeByName(message.DESCRIPTOR.full_name)
        except KeyError:  # a call that it does not know: it says so
            continue
        read = GetMessageClass(descriptor)()
        read.ParseFromString(message.SerializeToString())
        assert is_part_of(to_dict(read), to_dict(message)), name
        num_read += 1
    assert num_read > 60


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_no_field_has_changed_its_number_its_type_or_its_name(release: Path) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString((release / DESCRIPTORS).read_bytes())
    problems = []
    for file in files.file:
        for message in file.message_type:
            now = NOW.FindMessageTypeByName(f"{file.package}.{message.name}")
            for field in message.field:
                found = now.fields_by_number.get(field.number)
                kept = found is not None and (found.name, found.type) == (field.name, field.type)
                if not kept:
                    problems.append(f"{message.name}.{field.name}")
        for enum in file.enum_type:
            numbers = NOW.FindEnumTypeByName(f"{file.package}.{enum.name}").values_by_number
            problems += [
                f"{enum.name}.{value.name}"
                for value in enum.value
                if value.number not in numbers or numbers[value.number].name != value.name
            ]
    assert not problems


@pytest.mark.parametrize(("release", "said"), LINK_CASES)
def test_events_and_commands_of_the_last_release_become_ours_and_are_said_alike(
    release: Path, said: dict[str, Any]
) -> None:
    kind = said["type"].removeprefix("baton.v1.")
    data = bytes.fromhex(said["hex"])
    again: Message | None
    if kind == "NodeMessage":
        event = wire.node_event_from_proto(node_pb2.NodeMessage.FromString(data))
        assert event is not None
        if isinstance(event, words.StepDeltas):  # nodes say deltas, routers hear rows
            assert event.epochs
            assert event.deltas
            return
        again = wire.node_event_to_proto(event)
    else:
        command = wire.command_from_proto(node_pb2.RouterMessage.FromString(data))
        assert command is not None
        again = wire.command_to_proto(command)
    theirs = GetMessageClass(pool_of(release).FindMessageTypeByName(said["type"]))()
    theirs.ParseFromString(again.SerializeToString())
    assert to_dict(theirs) == said["json"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_node_of_the_last_release_joins_a_router_of_ours(release: Path) -> None:
    """Send the old release's bytes over a real connection, and read the answer with its schema."""
    registration = make_registration("p0", NodeRole.PREFILL)
    said = wire.registration_to_proto(registration)
    theirs = pool_of(release)
    register = GetMessageClass(theirs.FindMessageTypeByName("baton.v1.NodeMessage"))()
    register.ParseFromString(said.SerializeToString())
    register.DiscardUnknownFields()  # as it would have said it
    answer_of = GetMessageClass(theirs.FindMessageTypeByName("baton.v1.RouterMessage"))

    async def run() -> tuple[Any, list[str]]:
        server, pool = grpc.aio.server(), make_pool()
        node_pb2_grpc.add_NodeLinkServicer_to_server(_open(NodeLinkService(pool)), server)  # type: ignore[no-untyped-call]  # generated
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                link: Any = channel.stream_stream(
                    "/baton.v1.NodeLink/Link",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=answer_of.FromString,
                )
                call = link()
                await call.write(register)
                answer = await call.read()
                names = [node.name for node in pool.nodes]
                call.cancel()
                return answer, names
        finally:
            await server.stop(0)

    answer, names = asyncio.run(run())
    assert names == ["p0"]
    plain = to_dict(answer)["registered"]
    assert plain["router_id"]
    assert "problem" not in plain


def _open(service: NodeLinkService) -> NodeLinkService:
    """The service without the gate in front of it, which knows who calls."""
    inner = service.Link

    async def link(messages: Any, context: Any) -> Any:
        async for message in inner(messages, cast("Any", _Caller())):
            yield message

    service.Link = link  # type: ignore[method-assign, assignment]  # of one test
    return service


class _Caller:
    """A caller as the gate would have identified it."""

    from baton.access.identity import ANYBODY as principal

    address = "127.0.0.1"
    certificate = None

    def auth_context(self) -> dict[str, Any]:
        return {}


# ------------------------------------------------------------------ versions of the protocol


@pytest.mark.parametrize(
    ("node", "router", "may"),
    [(1, 1, True), (1, 2, True), (2, 1, True), (1, 3, False), (3, 1, False), (7, 7, True)],
)
def test_a_version_talks_with_those_next_to_it_and_refuses_others_in_one_line(
    node: int, router: int, may: bool
) -> None:
    problem = protocol_problem(node, own=router)
    assert (problem == "") is may
    assert "\n" not in problem
    if problem:
        assert f"versions {node} and {router}" in problem


def test_a_router_refuses_a_node_two_versions_ahead_and_a_node_such_a_router() -> None:
    ahead = make_registration("p0", NodeRole.PREFILL)
    ahead = type(ahead)(**{**fields_of(ahead), "protocol": words.PROTOCOL + 2})
    refusal = make_pool().refusal(ahead)
    assert "more than one apart" in refusal
    end = NodeEnd(make_registration("p0", NodeRole.PREFILL))
    welcome = node_pb2.Registered(router_id="r", protocol=words.PROTOCOL + 2)
    with pytest.raises(ConfigError, match="update the older one first"):
        end.take_first(node_pb2.RouterMessage(registered=welcome))
    assert not end.joined


def test_who_says_nothing_of_a_version_speaks_the_first() -> None:
    message = wire.registration_to_proto(make_registration("p0", NodeRole.PREFILL)).register
    message.ClearField("protocol")
    registration = wire.registration_from_proto(message)
    assert registration is not None
    assert registration.protocol == words.FIRST_PROTOCOL


def fields_of(registration: words.NodeRegistration) -> dict[str, Any]:
    names = type(registration).__dataclass_fields__
    return {name: getattr(registration, name) for name in names}


def to_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def is_part_of(one: Any, other: Any) -> bool:
    """Whether all that one says the other says, too."""
    if isinstance(one, dict):
        return all(key in other and is_part_of(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_part_of, one, other))
    if isinstance(one, int) and isinstance(other, str):
        return True  # the number of an enum's value that the older release has no name for
    return bool(one == other)
