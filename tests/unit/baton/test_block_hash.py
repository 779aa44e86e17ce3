"""Unit tests of block hashes: names that router and node compute alike, and only for equal KV."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from baton.api.errors import ConfigError
from baton.api.images import ImageSpan
from baton.kv.block_hash import (
    CACHE_KEYS,
    DEFAULT_HASH_ALGORITHM,
    HASH_ALGORITHMS,
    BlockHash,
    BlockHasher,
    cache_namespace,
    extra_keys_of,
    shorten,
)

TOKENS = [5, 70_000, 0, 2**31 - 1, 9, 8, 7, 6, 1, 2, 3, 4]

every_algorithm = pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)


def hash_all(
    token_ids: Sequence[int],
    *,
    block_size: int = 4,
    algorithm: str = DEFAULT_HASH_ALGORITHM,
    extra_keys: tuple[bytes, ...] = (),
) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(block_size, algorithm).extend(hashes, token_ids, extra_keys)
    return hashes


def test_the_one_that_is_used_unless_told_otherwise_stands_up_to_chosen_prompts() -> None:
    assert set(HASH_ALGORITHMS) == {"blake2b", "sha256", "xxh3_128"}
    assert DEFAULT_HASH_ALGORITHM in ("blake2b", "sha256")
    assert len(hash_all(TOKENS[:4])[0]) >= 32  # bytes: 128 bits against collisions


# Made once by `hash_all` and checked below against its definition: router and nodes of different
# versions must agree, so a change here is a change of the protocol.
@pytest.mark.parametrize(
    ("algorithm", "extra_keys", "expected"),
    [
        (
            "xxh3_128",
            (),
            [
                "45d374b18e180acbc5b6e6acdafd6d62",
                "0deafe57fa20ba0ced0d57fd41a92c92",
            ],
        ),
        (
            "xxh3_128",
            (b"tenant-1", b"lora"),
            [
                "8bf2758e44dd097404d70b925fb84706",
                "15d1f7ff55b0426143b9f2e5fa11f7f7",
            ],
        ),
        (
            "sha256",
            (),
            [
                "7d21f674a8b44b29c9a247561d5970d72c885d1af8689b7a1069dbca61ace5af",
                "64b4482d5fcbe7814921d080ad0f74832d57f7e80fc30f40cb292bf25876791e",
            ],
        ),
        (
            "sha256",
            (b"tenant-1", b"lora"),
            [
                "d08a397f07243af092cca7ec5e7787513b763ae3f365961c9b58cf84cae96739",
                "3441d8c84ac49263ccb0e99459389d0ed85fb2a9df56fcab9247c44b81422f2d",
            ],
        ),
    ],
)
def test_hashes_are_the_ones_that_were_agreed_on(
    algorithm: str, extra_keys: tuple[bytes, ...], expected: list[str]
) -> None:
    found = hash_all(TOKENS[:8], algorithm=algorithm, extra_keys=extra_keys)
    assert [block_hash.hex() for block_hash in found] == expected


def test_a_hash_is_that_of_its_parent_and_its_tokens_as_32_bit_little_endian() -> None:
    def frame(key: bytes) -> bytes:
        return struct.pack("<I", len(key)) + key

    root = hashlib.sha256(b"baton/2" + frame(b"n") + frame(b"\xc3\xa4") + frame(b"b")).digest()
    first = hashlib.sha256(root + struct.pack("<4I", *TOKENS[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *TOKENS[4:8])).digest()
    found: list[BlockHash] = []
    BlockHasher(4, "sha256", namespace=b"n").extend(found, TOKENS[:8], (b"\xc3\xa4", b"b"))
    assert found == [first, second]


def test_names_depend_on_all_that_equal_tokens_kv_depends_on_and_on_nothing_else() -> None:
    entries = {
        "model": "config",
        "weights": "digest",
        "dtype": "bfloat16",
        "linear_weights": "auto",
        "kv_cache_dtype": "float8_e4m3fn",
        "kv_layout": "0123",
        "drafter": "none",
        "version": "1",
        "adapters": "none",
        "tokenizer": "t",
    }
    assert set(CACHE_KEYS) < set(entries)
    changed = {key: cache_namespace(entries | {key: "other"}) for key in entries}
    differing = {key for key, name in changed.items() if name != cache_namespace(entries)}
    assert differing == set(CACHE_KEYS)
    assert len({changed[key] for key in CACHE_KEYS}) == len(CACHE_KEYS)
    names = [cache_namespace({"model": "ab", "weights": "c"}), cache_namespace({"model": "a"})]
    names += [cache_namespace({"model": "a", "weights": "bc"}), cache_namespace({})]
    assert len(set(names)) == 4


@every_algorithm
@pytest.mark.parametrize("num_tokens", range(13))
def test_only_full_blocks_have_a_hash(algorithm: str, num_tokens: int) -> None:
    assert len(hash_all(TOKENS[:num_tokens], algorithm=algorithm)) == num_tokens // 4


@every_algorithm
@pytest.mark.parametrize("changed", range(12))
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(
    algorithm: str, changed: int
) -> None:
    tokens = list(TOKENS)
    tokens[changed] += 1 if tokens[changed] < 100 else -1
    pairs = zip(
        hash_all(TOKENS, algorithm=algorithm), hash_all(tokens, algorithm=algorithm), strict=True
    )
    assert [one == other for one, other in pairs] == [index < changed // 4 for index in range(3)]


@every_algorithm
def test_equal_blocks_behind_different_prefixes_have_different_hashes(algorithm: str) -> None:
    hashes = hash_all([1, 2, 3, 4] * 3, algorithm=algorithm)
    assert len(set(hashes)) == 3


@every_algorithm
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 12])
def test_extending_token_by_token_equals_hashing_at_once(algorithm: str, block_size: int) -> None:
    hasher = BlockHasher(block_size, algorithm)
    hashes: list[BlockHash] = []
    for end in range(len(TOKENS) + 1):
        hasher.extend(hashes, TOKENS[:end], (b"salt",))
        hasher.extend(hashes, TOKENS[:end], (b"salt",))  # nothing new: nothing added
    at_once = hash_all(TOKENS, block_size=block_size, algorithm=algorithm, extra_keys=(b"salt",))
    assert hashes == at_once
    assert len(hashes) == len(TOKENS) // block_size


@pytest.mark.parametrize(
    "token_ids",
    [
        tuple(TOKENS),
        array("i", TOKENS),
        array("q", TOKENS),
        np.array(TOKENS, dtype=np.int64),
        np.array(TOKENS, dtype=np.int32),
        [np.int64(token) for token in TOKENS],
    ],
    ids=["tuple", "array i", "array q", "numpy int64", "numpy int32", "list of numpy ints"],
)
def test_token_ids_from_anywhere_have_the_same_hashes(token_ids: Sequence[int]) -> None:
    assert hash_all(token_ids) == hash_all(TOKENS)


EXTRA_KEYS: list[tuple[bytes, ...]] = [
    (),
    (b"",),
    (b"", b""),
    (b"a",),
    (b"ab", b"c"),
    (b"a", b"bc"),
    (b"abc",),
    (b"a", b"b", b"c"),
    (b"b", b"a", b"c"),
    (b"a\x01\x00\x00\x00b",),  # looks like two keys once framed carelessly
    (b"a", b"b"),
]


@every_algorithm
def test_different_extra_keys_never_share_a_hash(algorithm: str) -> None:
    every = [hash_all(TOKENS, algorithm=algorithm, extra_keys=keys) for keys in EXTRA_KEYS]
    assert len({block_hash for hashes in every for block_hash in hashes}) == 3 * len(EXTRA_KEYS)


def test_a_salt_names_blocks_apart_and_no_salt_is_no_key() -> None:
    assert extra_keys_of(b"") == ()
    every = [hash_all(TOKENS, extra_keys=extra_keys_of(salt)) for salt in (b"", b"one", b"two")]
    assert len({block_hash for hashes in every for block_hash in hashes}) == 9


def test_the_block_size_is_part_of_a_hash_by_the_tokens_it_covers() -> None:
    assert not set(hash_all(TOKENS, block_size=4)) & set(hash_all(TOKENS, block_size=6))


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_an_error_and_not_another_token(token_id: int) -> None:
    with pytest.raises(struct.error):
        hash_all([1, 2, 3, token_id])


def test_an_unknown_algorithm_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"^prefix_hash: must be one of blake2b, sha256, xxh3_128, got 'md5'$"
    ):
        BlockHasher(4, "md5")


def test_a_short_hash_is_the_first_8_bytes_low_ones_first() -> None:
    hashes = hash_all(TOKENS)
    expected = tuple(int.from_bytes(block_hash[:8], "little") for block_hash in hashes)
    assert shorten(hashes) == expected
    assert len(set(expected)) == 3
    assert shorten([]) == ()


def test_adapters_separate_cached_content() -> None:
    """Salt and adapter are told apart even where their bytes are equal."""
    one, two = "1" * 64, "2" * 64
    keys = [
        extra_keys_of(salt, adapter)
        for salt in (b"", b"salt", one.encode())
        for adapter in ("", one, two)
    ]
    every = [hash_all(TOKENS, extra_keys=key) for key in keys]
    assert len({hashes[0] for hashes in every}) == len(keys)
    assert extra_keys_of(b"", "") == ()


def with_images(*spans: tuple[int, int, bytes]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    images = [ImageSpan(first, num, digest) for first, num, digest in spans]
    BlockHasher(4).extend(hashes, TOKENS, (), images)
    return hashes


def test_a_block_is_named_after_the_images_that_lie_in_it() -> None:
    plain, image = hash_all(TOKENS), with_images((5, 2, b"A" * 16))
    assert with_images() == plain
    assert image[0] == plain[0], "blocks before an image are text"
    assert image[1] != plain[1]
    assert image[2] != plain[2], "hashes are chained"
    tokens = struct.pack("<4I", *TOKENS[4:8])
    within = struct.pack("<I16si", 20, b"A" * 16, 1)
    assert image[1] == HASH_ALGORITHMS["blake2b"](plain[0] + tokens + within)


def test_other_images_and_other_places_of_an_image_have_other_names() -> None:
    spans = [
        (5, 2, b"A" * 16),
        (5, 2, b"B" * 16),
        (6, 2, b"A" * 16),
        (3, 4, b"A" * 16),  # begins in the block before
    ]
    assert len({with_images(span)[1] for span in spans}) == 4
    both = with_images((4, 1, b"A" * 16), (6, 1, b"B" * 16))
    assert both[1] != with_images((4, 1, b"B" * 16), (6, 1, b"A" * 16))[1]
    assert with_images((0, 8, b"A" * 16))[:1] == with_images((0, 4, b"A" * 16))[:1]


def test_images_are_named_alike_however_a_prompt_is_cut() -> None:
    images = [ImageSpan(2, 7, b"A" * 16)]
    whole, grown = list[BlockHash](), list[BlockHash]()
    BlockHasher(4).extend(whole, TOKENS, (), images)
    for end in (5, 9, 12):
        BlockHasher(4).extend(grown, TOKENS[:end], (), images)
    assert grown == whole
