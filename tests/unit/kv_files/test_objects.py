"""Runs of KV as objects of an S3 server: spoilt objects, bounds, faulty servers, several nodes."""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from obstore.exceptions import GenericError

from baton import LLM, SamplingParams
from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage import objects
from engine.kv_files.storage.objects import ObjectStorage
from engine.kv_files.storage.storage import StorageTerms, UnreachableError
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.kv_file_stores import BLOCK_SIZE, IDENTITY, Blocks, chain_of, read, write
from tests.fakes.outside.s3_server import BUCKET, SECRET_KEY, S3Server, secret_file
from tests.fakes.time.waiting import wait_until
from tests.unit.kv_files.test_file_tier import stop_time, tier_of
from tests.unit.kv_files.test_run_store import KINDS, NUM_BLOCKS, file_of_another, spoil

PROMPT = [5 + (7 * i) % 200 for i in range(8 * 16 + 3)]  # eight blocks
ANSWER = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that this process uses, whose listings follow one another at once."""
    server = S3Server()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "LIST_EVERY_S", 0.0)
    yield server
    server.stop()


@dataclass
class Place:
    """A bucket's prefix, and the file with the key."""

    terms: StorageTerms

    def open(self, limit_bytes: int = 2**30) -> tuple[RunStore, Blocks]:
        blocks = Blocks()
        store = RunStore(ObjectStorage(self.terms), limit_bytes, blocks, BLOCK_SIZE)
        store.scan()
        return store, blocks

    def llm(self, **options: Any) -> LLM:
        where = {"kv_files": self.terms.location, "kv_files_secret": self.terms.secret_file}
        llm = LLM(str(DEMO_MODEL), num_blocks=64, num_threads=1, **where, **options)
        wait_until(tier_of(llm.engine)._is_scanned.is_set, "the bucket is listed")
        return llm


@pytest.fixture
def place(server: S3Server, tmp_path: Path) -> Place:
    return Place(StorageTerms(f"s3://{BUCKET}/kv", secret_file(tmp_path), 20.0))


def runs(server: S3Server) -> list[str]:
    return [key for key in server.object_names() if key.endswith(".kv")]


# ---------------------------------------------------------------- spoilt objects


@pytest.mark.medium
def test_a_thousand_spoilt_objects_are_refused(
    server: S3Server, place: Place, tmp_path: Path
) -> None:
    rng, counted, client = random.Random(5), dict.fromkeys(KINDS, 0), server.client()
    secret = Path(place.terms.secret_file).read_bytes()
    for seed in range(4):
        chain = chain_of(seed, NUM_BLOCKS)
        store, blocks = place.open()
        write(store, blocks, chain)
        ((_, run),) = store.index.runs_of(IDENTITY, chain)
        (key,) = runs(server)
        content = bytes(obstore.get(client, key).bytes())
        for kind, allowed in KINDS.items():
            other = file_of_another(tmp_path / f"{kind}-{seed}", secret, kind, seed)
            for draw in range(28):
                obstore.put(client, key, spoil(rng, content, other, kind))
                store.index.add(run)
                job = read(store, blocks, chain)
                assert job.num_done == 0, (seed, kind, draw)
                assert len(set(job.causes) & allowed) == 1, (seed, kind, draw, job.causes)
                counted[kind] += 1
            assert runs(server) == [], "spoilt objects are removed"
    assert sum(counted.values()) == 1008


def test_a_node_with_another_key_reads_nothing(
    server: S3Server, place: Place, tmp_path: Path
) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*place.open(), chain)
    key = tmp_path / "other"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    other = Place(StorageTerms(place.terms.location, str(key), 20.0))
    store, blocks = other.open()
    assert read(store, blocks, chain).causes == ("damaged",)


# ---------------------------------------------------------------- bounds


def test_a_full_bucket_loses_the_runs_that_no_node_has_used(
    server: S3Server, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "NOTE_USE_S", 0.0)
    store, blocks = place.open(limit_bytes=36_000)
    for seed in (1, 2):
        write(store, blocks, chain_of(seed, 30))  # about 12 kB
    other, more = place.open()

    def used_at(seed: int) -> float:
        ((_, run),) = store.index.runs_of(IDENTITY, chain_of(seed, 30))
        return run.used_at

    def is_used_later() -> bool:  # the server tells times in whole seconds
        assert read(other, more, chain_of(1, 30)).num_done == 30
        other.scan()
        store.scan()
        return used_at(1) > used_at(2)

    wait_until(is_used_later, "the other node's use is known")
    write(store, blocks, chain_of(3, 40))
    found = {key.rpartition("/")[2].partition("-")[0] for key in runs(server)}
    assert found == {chain_of(1, 1)[0].hex(), chain_of(3, 1)[0].hex()}
    assert store.counts.files_evicted == 1
    assert store.counts.bytes_stored == store.index.num_bytes <= 36_000


def test_a_bucket_with_too_many_objects_is_listed_in_part(
    server: S3Server,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(objects, "_PAGE", 5)
    monkeypatch.setattr(objects, "_PAGES_PER_CALL", 2)
    store, blocks = place.open()
    for seed in range(30):
        write(store, blocks, chain_of(seed, 4))
    again, _ = place.open()
    assert 0 < len(again.index) <= 10, "one call lists two pages"
    for _ in range(3):
        again.scan()
    assert len(again.index) == 30
    monkeypatch.setattr(objects, "MOST_OBJECTS", 12)
    cut, _ = place.open()
    for _ in range(8):
        cut.scan()
    assert 10 <= len(cut.index) <= 15
    assert caplog.text.count("more than 12 objects") == 1


def test_markers_without_an_object_are_removed(
    server: S3Server, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_ORPHAN_S", -10.0)
    store, blocks = place.open()
    write(store, blocks, chain_of(1, NUM_BLOCKS))
    (key,) = server.object_names()
    obstore.put(server.client(), f"{key}{objects.USED}", b"")
    obstore.put(server.client(), f"{key}x{objects.USED}", b"")
    obstore.put(server.client(), "kv/stranger", b"x")
    store.scan()
    assert server.object_names() == [key, f"{key}{objects.USED}", "kv/stranger"]


@pytest.mark.parametrize("most_objects", [100, 6])
def test_names_that_change_all_the_time_do_not_fill_the_memory(
    most_objects: int, server: S3Server, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_OBJECTS", most_objects)
    monkeypatch.setattr(objects, "_PAGE", 4)
    store, _ = place.open()
    client, at = server.client(), time.time()
    monkeypatch.setattr(time, "time", lambda: at)
    for number in range(12):
        for key in server.object_names():
            obstore.delete(client, key)
        for name in range(8):  # the first ones are in folders that their names do not name
            first = f"{name:02x}{number:02x}"
            folder = first[:2] if name > 1 else "ff"
            obstore.put(client, f"kv/{99 - number}x/{folder}/{first}-00-0-8-64.kv", b"")
        at += 100.0
        for _ in range(4):
            store.scan()
    index = store.index
    assert 0 < len(index) <= 16
    assert len(index._by_folder) <= 16
    assert len(index.most_blocks) == len(index.longest_chain) == len(index._num_runs) <= 3


# ---------------------------------------------------------------- several nodes, one process


def test_a_restarted_llm_reads_its_earlier_answer_from_objects(
    server: S3Server, place: Place
) -> None:
    first = place.llm()
    said = first.generate([PROMPT], ANSWER)[0].token_ids
    first.engine.close()
    assert len(runs(server)) == 1
    again = place.llm()
    stop_time(again.engine)
    prompt = [*PROMPT, *said, 9, 10]
    tokens = again.generate([prompt], ANSWER)[0].token_ids
    known = (len(PROMPT) + 40 - 1) // 16 * 16  # the answer's last token was not computed
    assert again.metrics().cached_prompt_tokens_total == known
    again.engine.close()
    plain = LLM(str(DEMO_MODEL), num_blocks=64, num_threads=1)
    assert plain.generate([prompt], ANSWER)[0].token_ids == tokens
    plain.engine.close()


def test_two_nodes_share_a_bucket(server: S3Server, place: Place) -> None:
    (one, blocks), (two, more) = place.open(), place.open()
    chain, later = chain_of(1, NUM_BLOCKS), chain_of(3, NUM_BLOCKS)
    write(one, blocks, chain)
    write(two, more, chain)  # the second writer replaces an object of the same name
    assert len(runs(server)) == 1
    assert read(one, blocks, chain).num_done == NUM_BLOCKS
    write(two, more, later)
    one.scan()
    assert read(one, blocks, later).num_done == NUM_BLOCKS
    two._drop(two.index.runs_of(IDENTITY, later)[0][1])
    assert read(one, blocks, later).causes == ("gone",)


@pytest.mark.medium
def test_each_rank_has_objects_of_its_own(server: S3Server, place: Place) -> None:
    first = place.llm(tensor_parallel_size=2)
    said = first.generate([PROMPT], ANSWER)[0].token_ids
    first.engine.close()
    identities = {name.split("/")[1] for name in runs(server)}
    assert sorted(name.rpartition("-")[2] for name in identities) == ["0", "1"]
    again = place.llm(tensor_parallel_size=2)
    stop_time(again.engine)
    assert again.generate([PROMPT], ANSWER)[0].token_ids == said
    assert again.metrics().cached_prompt_tokens_total == 8 * 16
    again.engine.close()


# ---------------------------------------------------------------- faulty servers


@pytest.mark.parametrize("fault", ["denied", "status 503", "slow"])
def test_a_faulty_server_costs_no_object(fault: str, server: S3Server, place: Place) -> None:
    """Regression: after two errors, objects were forgotten until the next listing."""
    chain = chain_of(1, NUM_BLOCKS)
    store, blocks = Place(dataclasses.replace(place.terms, timeout_s=0.3)).open()
    write(store, blocks, chain)
    server.status = 503 if fault == "status 503" else 0
    if fault == "denied":
        server.deny(is_on=True)
    if fault == "slow":
        server.gate.clear()
    try:
        for _ in range(3):
            with pytest.raises(UnreachableError):
                read(store, blocks, chain)
    finally:
        server.status = 0
        server.gate.set()
        if fault == "denied":
            server.deny(is_on=False)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


@pytest.mark.parametrize("fault", ["dead", "denied", "status 503", "slow", "bucket missing"])
def test_a_faulty_server_delays_no_answer(
    fault: str, server: S3Server, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.llm()
    said = first.generate([PROMPT], ANSWER)[0].token_ids
    first.engine.close()
    again = place.llm(kv_files_timeout_s=0.3)
    tier = tier_of(again.engine)
    if fault == "dead":
        server.stop()
    elif fault == "denied":
        server.deny(is_on=True)
    elif fault == "status 503":
        server.status = 503
    elif fault == "slow":
        server.gate.clear()
    else:
        for key in server.object_names():
            obstore.delete(server.client(), key)
        server.post(BUCKET, method="DELETE")
    with caplog.at_level(logging.WARNING):
        assert again.generate([PROMPT], ANSWER)[0].token_ids == said
        misses = tier.counts().misses
        assert sum(misses.values()) >= 1, misses
        assert again.metrics().cached_prompt_tokens_total == 0
        assert again.generate([PROMPT[::-1]], ANSWER)[0].token_ids
        server.gate.set()
        wait_until(lambda: all(read.has_ended for read in tier._reads), "the reads end")
        again.engine.features.settle_files()
        again.engine.close()
    if fault == "denied":
        server.deny(is_on=False)
    if fault != "bucket missing":
        assert not tier._reading.is_on or misses["late"], "reading pauses"
    assert SECRET_KEY not in caplog.text


@pytest.mark.parametrize("fault", ["denied", "bucket missing", "status 403"])
def test_a_node_without_access_does_not_start(fault: str, server: S3Server, place: Place) -> None:
    if fault == "denied":
        server.deny(is_on=True)
    elif fault == "bucket missing":
        server.post(BUCKET, method="DELETE")
    else:
        server.status = 403
    problem = "no such bucket" if fault == "bucket missing" else "access denied"
    with pytest.raises(ConfigError, match=rf"^kv_files: s3://kv-runs/kv: {problem}") as error:
        place.open()
    server.deny(is_on=False)
    assert SECRET_KEY not in str(error.value)


@pytest.mark.parametrize("num_more", [2**17, 2**27])
def test_an_answer_that_is_too_long_is_not_read_to_its_end(
    num_more: int, server: S3Server, place: Place
) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*place.open(), chain)
    store, blocks = place.open()
    server.num_more = num_more
    with pytest.raises(OSError, match="read: another number of bytes than asked for"):
        read(store, blocks, chain)
    assert server.num_sent < 2**26
    server.num_more = 0
    assert read(store, blocks, chain).num_done == NUM_BLOCKS


def test_a_listing_that_does_not_begin_has_a_short_error(
    server: S3Server, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise GenericError(f"an answer that quotes {SECRET_KEY}")

    store, _ = place.open()
    monkeypatch.setattr(obstore, "list", fail)
    with pytest.raises(OSError, match="list: no answer in time, or no connection"):
        store.scan()


def test_a_read_does_not_wait_for_the_marker_of_its_use(server: S3Server, place: Place) -> None:
    chain = chain_of(1, NUM_BLOCKS)
    write(*place.open(), chain)
    store, blocks = place.open()
    num_before = len(server.requests)
    assert read(store, blocks, chain).num_done == NUM_BLOCKS
    assert [one.split()[0] for one in server.requests[num_before:]] == ["GET"]
    store.close()  # also the markers of the last reads are written
    assert any(name.endswith(objects.USED) for name in server.object_names())


def test_a_node_starts_while_the_server_is_down(server: S3Server, place: Place) -> None:
    server.status = 500
    store = RunStore(ObjectStorage(place.terms), 2**30, Blocks(), BLOCK_SIZE)
    with pytest.raises(OSError, match="list: status 500"):
        store.scan()
    server.status = 0
    store.scan()
    write(store, Blocks(), chain_of(1, NUM_BLOCKS))
    assert len(runs(server)) == 1


def test_a_name_that_the_library_cannot_list_is_named(server: S3Server, place: Place) -> None:
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(BUCKET, "kv/a//b", b"")
    with pytest.raises(OSError, match="list: the name of an object has an empty part, as in a//b"):
        place.open()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_files": "s3://b/p"}, "kv_files_secret: s3:// needs a file with the key"),
        ({"kv_files": "s3:///p"}, "kv_files: must be a folder or s3://BUCKET/PREFIX"),
        ({"kv_files": "gs://b/p"}, "kv_files: must be a folder or s3://BUCKET/PREFIX"),
        ({"kv_files_secret": "f"}, "kv_files_secret: needs kv_files"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(**options)


@pytest.mark.parametrize("kind", ["missing", "short", "long", "open to all"])
def test_a_key_that_cannot_be_used_is_named(kind: str, tmp_path: Path) -> None:
    path = Path(secret_file(tmp_path))
    if kind == "missing":
        path.unlink()
    elif kind != "open to all":
        path.write_bytes(b"k" * (31 if kind == "short" else 33))
    else:
        path.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"^kv_files_secret: {path}: "):
        ObjectStorage(StorageTerms("s3://b/p", str(path)))


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "engine.kv_files.storage.objects")
    from engine.kv_files.storage import STORAGES

    with pytest.raises(ConfigError, match=r"^kv_files: .*pip install 'baton-serve\[s3\]'"):
        STORAGES.load("s3")
