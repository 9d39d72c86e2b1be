"""Hashes of strings: published values, and those of the packages pyfarmhash 0.4 and mmh3."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

MASK = 2**64 - 1
PATTERN = bytes(i * 37 % 127 + 1 for i in range(400))


def packed(strings: list[bytes], dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    values = torch.tensor(list(b"".join(strings)), dtype=torch.uint8).view(dtype)
    return values, torch.tensor([0, *map(len, strings)]).cumsum(0)


def farmhash(strings: list[bytes]) -> list[int]:
    values, offsets = packed(strings)
    return ops.farmhash([values], [offsets])[0].tolist()


def unsigned(words: list[int]) -> list[int]:
    return [word & MASK for word in words]


def test_farmhash_of_the_documentation_of_bigquery() -> None:
    """FARM_FINGERPRINT(CONCAT(CAST(x AS STRING), y, CAST(z AS STRING)))."""
    rows = [b"1footrue", b"2applefalse", b"3true"]
    assert farmhash(rows) == [-1541654101129638711, 2794438866806483259, -4880158226897771312]


def test_farmhash_of_guava() -> None:
    """Facts of its FarmHashFingerprint64Test: strings of 4, 32 and 256 bytes."""
    strings = [b"test" * times for times in (1, 8, 64)]
    assert farmhash(strings) == [8581389452482819506, -4196240717365766262, 3500507768004279527]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 11160318154034397263),
        (1, 5161771770385946686),
        (3, 1607075183454259142),
        (4, 10195846075994977757),
        (8, 8138550742861515042),
        (16, 8928001952893332136),
        (17, 9298876255329932063),
        (32, 14276361766287259384),
        (33, 18090456053618788480),
        (64, 17229328529593507614),
        (65, 4355710407183383341),
        (128, 6279227666163672351),
    ],
)
def test_farmhash_at_the_bounds_of_its_formulas(length: int, expected: int) -> None:
    assert unsigned(farmhash([PATTERN[:length]])) == [expected]


def test_farmhash_of_every_length_to_400() -> None:
    """At every alignment, too; the sum is pyfarmhash's."""
    hashes = unsigned(farmhash([PATTERN[:length] for length in range(401)]))
    assert sum(hashes) & MASK == 1604503395481181001


def reference_murmur(data: bytes, seed: int) -> tuple[int, int]:
    """MurmurHash3_x64_128, both halves."""
    a, b = 0x87C37B91114253D5, 0x4CF5AD432745937F

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & MASK

    def scrambled(word: bytes, first: int, bits: int, second: int) -> int:
        return rotated(int.from_bytes(word, "little") * first & MASK, bits) * second & MASK

    def mixed(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor & MASK
        return x ^ x >> 33

    h, g = seed, seed
    whole = len(data) // 16 * 16
    for i in range(0, whole, 16):
        h ^= scrambled(data[i : i + 8], a, 31, b)
        h = ((rotated(h, 27) + g) * 5 + 0x52DCE729) & MASK
        g ^= scrambled(data[i + 8 : i + 16], b, 33, a)
        g = ((rotated(g, 31) + h) * 5 + 0x38495AB5) & MASK
    g ^= scrambled(data[whole + 8 :], b, 33, a)
    h ^= scrambled(data[whole : whole + 8], a, 31, b)
    h, g = h ^ len(data), g ^ len(data)
    h = (h + g) & MASK
    h, g = mixed(h), mixed((g + h) & MASK)
    h = (h + g) & MASK
    return h, (g + h) & MASK


def test_the_reference_has_the_verification_value_of_smhasher() -> None:
    """Hashes of {0}, {0, 1}, ... with seed 256 - length, hashed again: its VerificationTest."""

    def digest(data: bytes, seed: int) -> bytes:
        return b"".join(word.to_bytes(8, "little") for word in reference_murmur(data, seed))

    hashes = b"".join(digest(bytes(range(i)), 256 - i) for i in range(256))
    assert int.from_bytes(digest(hashes, 0)[:4], "little") == 0x6384BA69


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 2**32 - 1))
def test_murmurhash_is_the_first_half(strings: list[bytes], seed: int) -> None:
    values, offsets = packed(strings)
    hashes = ops.murmurhash([values], [offsets], seed=seed)[0].tolist()
    assert unsigned(hashes) == [reference_murmur(data, seed)[0] for data in strings]


def test_murmurhash_of_mmh3() -> None:
    strings = [b"foo", b"", b"hello, world"]
    values, offsets = packed(strings)
    plain = [16316970633193145697, 0, 3760413751763713166]
    seeded = [17606432766137750514, 17305828677633410339, 13337521173585111382]
    assert unsigned(ops.murmurhash([values], [offsets])[0].tolist()) == plain
    assert unsigned(ops.murmurhash([values], [offsets], seed=42)[0].tolist()) == seeded


def reference_murmur64a(data: bytes, seed: int) -> int:
    """MurmurHash64A."""
    factor = 0xC6A4A7935BD1E995
    whole = len(data) // 8 * 8
    h = seed ^ len(data) * factor & MASK
    for i in range(0, whole, 8):
        word = int.from_bytes(data[i : i + 8], "little") * factor & MASK
        h = (h ^ (word ^ word >> 47) * factor & MASK) * factor & MASK
    if data[whole:]:
        h = (h ^ int.from_bytes(data[whole:], "little")) * factor & MASK
    h = (h ^ h >> 47) * factor & MASK
    return h ^ h >> 47


def test_the_reference_of_64a_has_the_verification_value_of_smhasher() -> None:
    hashes = [reference_murmur64a(bytes(range(i)), 256 - i) for i in range(256)]
    whole = b"".join(word.to_bytes(8, "little") for word in hashes)
    assert reference_murmur64a(whole, 0) & 0xFFFFFFFF == 0x1F0D3804


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(-(2**63), 2**63 - 1))
def test_murmurhash64a(strings: list[bytes], seed: int) -> None:
    values, offsets = packed(strings)
    hashes = ops.murmurhash64a([values], [offsets], seed=seed)[0].tolist()
    assert unsigned(hashes) == [reference_murmur64a(data, seed & MASK) for data in strings]


@given(st.lists(st.lists(st.binary(max_size=70), max_size=5), min_size=1, max_size=4))
def test_features_and_signed_bytes_do_not_matter(features: list[list[bytes]]) -> None:
    lists = [packed(strings, torch.int8) for strings in features]
    values, offsets = [list(part) for part in zip(*lists, strict=True)]
    results = ops.farmhash(values, offsets)
    assert [result.tolist() for result in results] == [farmhash(strings) for strings in features]


TEXT = torch.tensor(list(b"foobar"), dtype=torch.uint8)


def test_other_wrong_arguments() -> None:
    offsets = torch.tensor([0, 6])
    with pytest.raises(RuntimeError, match=r"values\[0\] has dtype int64, expected uint8 or int8"):
        ops.farmhash([TEXT.long()], [offsets])
    with pytest.raises(RuntimeError, match="offsets has 1 entries, expected one for each of 2"):
        ops.farmhash([TEXT, TEXT], [offsets])
    with pytest.raises(RuntimeError, match="seed is -1, expected 0 to 4294967295"):
        ops.murmurhash([TEXT], [offsets], seed=-1)
    for hash_and_seed, message in (
        ((3, 0), r"hash is 3, expected 0 \(FarmHash\), 1 \(MurmurHash3\) or 2"),
        ((-1, 0), "hash is -1, expected 0"),
        ((0, 5), "seed is 5, expected 0: FarmHash has none"),
        ((1, 2**32), "seed is 4294967296, expected 0 to 4294967295"),
    ):
        for text, edges in ((TEXT, offsets), (TEXT.to("meta"), offsets.to("meta"))):
            with pytest.raises(RuntimeError, match=f"string_hash: {message}"):
                torch.ops.dynemb.string_hash([text], [edges], *hash_and_seed)
    assert ops.farmhash([], []) == ops.murmurhash([], []) == ops.murmurhash64a([], []) == []
