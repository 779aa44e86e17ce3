"""Contract of all storages of KV: a folder, and objects on an S3 server over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.kv_files.storage import STORAGES, objects
from engine.kv_files.storage.storage import Storage, StorageTerms
from tests.fakes.outside.s3_server import BUCKET, S3Server, secret_file

FOLDER = "a1/0c"
PATH, OTHER = f"{FOLDER}/0c11-one.kv", f"{FOLDER}/0c22-two.kv"
Open = Callable[[], Storage]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(params=STORAGES.names(), ids=lambda name: name or "folder")
def open_storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Return a function that opens one place as another node does."""
    scheme: str = request.param
    location = str(tmp_path / "kv")
    if scheme == "s3":
        server: S3Server = request.getfixturevalue("server")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(objects, "LIST_EVERY_S", 0.0)
        monkeypatch.setattr(objects, "NOTE_USE_S", 0.0)
        location = f"s3://{BUCKET}/{tmp_path.name}/nodes"
    key = secret_file(tmp_path) if scheme else ""
    return lambda: STORAGES.load(scheme)(StorageTerms(location, key, 20.0))


def put(storage: Storage, path: str, content: bytes) -> None:
    assert storage.write(path, [content[:100], memoryview(content)[100:]], lambda: True)


def get(storage: Storage, path: str, offset: int, num_bytes: int) -> bytes:
    file = storage.open(path)
    found = bytearray(num_bytes)
    whole = memoryview(found)
    third, half = num_bytes // 3, num_bytes // 2
    parts = [whole[:third], whole[third:half], whole[half:]]
    num_read = file.read_into(offset, parts)
    file.close()
    return bytes(found[:num_read])


def list_all(storage: Storage) -> dict[str, dict[str, int]]:
    """Return the sizes of the files of all folders that were listed, by folder and name."""
    return {
        folder: {file.name: file.num_bytes for file in files}
        for folder, files, _ in storage.list_changes()
    }


@pytest.mark.parametrize("size", [0, 1000, 70_000, 9_000_000])
def test_one_node_reads_what_another_node_has_written(open_storage: Open, size: int) -> None:
    one, two = open_storage(), open_storage()
    content = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000)
    put(one, PATH, content)
    assert one.secret == two.secret
    assert get(two, PATH, 0, size + 10) == content
    for offset in (0, 1, size // 2, max(size - 1, 0), size, size + 10):
        for num_bytes in (1, 777, 6_000_000):
            assert get(two, PATH, offset, num_bytes) == content[offset : offset + num_bytes]


@pytest.mark.parametrize("size", [1000, 20_000_000])
def test_a_file_whose_bytes_have_changed_does_not_appear(open_storage: Open, size: int) -> None:
    storage, asked = open_storage(), list[bool]()

    def is_valid() -> bool:
        asked.append(True)
        return False

    assert not storage.write(PATH, [bytes(size // 2)] * 2, is_valid)
    assert asked == [True]
    with pytest.raises(FileNotFoundError):
        get(storage, PATH, 0, 10)
    assert list_all(open_storage()).get(FOLDER, {}) == {}


def test_listings_tell_what_other_nodes_write_and_remove(open_storage: Open) -> None:
    one, two = open_storage(), open_storage()
    assert list_all(one) == {}
    put(two, PATH, b"x" * 200)
    put(two, OTHER, b"x" * 300)
    put(two, "b2/ff/name.kv", b"")
    assert list_all(one) == {
        FOLDER: {"0c11-one.kv": 200, "0c22-two.kv": 300},
        "b2/ff": {"name.kv": 0},
    }
    assert two.remove(PATH) is None
    assert list_all(one)[FOLDER] == {"0c22-two.kv": 300}
    assert two.remove(OTHER) is None
    assert list_all(one)[FOLDER] == {}
    assert two.remove(OTHER) is None, "a file that is gone is no error"
    with pytest.raises(FileNotFoundError):
        get(one, OTHER, 0, 1)


def test_a_use_is_known_to_a_node_that_starts_later(open_storage: Open) -> None:
    one = open_storage()
    put(one, PATH, b"x" * 200)

    def used_at() -> float:
        ((_, (file,), _),) = open_storage().list_changes()
        return file.used_at

    written_at, file = used_at(), one.open(PATH)
    for _ in range(200):  # some servers tell times in whole seconds
        file.note_use()
        list_all(one)
        if used_at() > written_at:
            break
    assert used_at() > written_at
    file.close()
    one.remove(PATH)
    assert list_all(open_storage()).get(FOLDER, {}) == {}, "nothing is left of the file"


def test_all_reads_of_an_open_file_see_one_version(open_storage: Open) -> None:
    storage = open_storage()
    old, new = b"1" * 300_000, b"2" * 300_000
    put(storage, PATH, old)
    file = storage.open(PATH)
    found = bytearray(100)
    assert file.read_into(0, [memoryview(found)]) == 100
    put(storage, PATH, new)
    later = bytearray(200_000)
    try:
        num_read = file.read_into(100_000, [memoryview(later)])
    except FileNotFoundError:
        num_read = 0
    assert later[:num_read] == old[:num_read]
    file.close()
    assert get(storage, PATH, 0, 300_000) == new
