"""CRC-32C in NumPy against the definition, one bit at a time."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.data.records import wire_format
from replicax._src.data.records.wire_format import checksum, checksums, masked

# From RFC 3720, B.4, and the customary check value.
KNOWN = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def by_definition(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_values(data, expected):
    assert checksum(data) == expected == by_definition(data)


@given(pieces=st.lists(st.binary(max_size=400), max_size=12))
def test_many_pieces_at_once_are_each_by_definition(pieces):
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    starts = np.cumsum(lengths) - lengths

    got = checksums(b"".join(pieces), starts, lengths)

    assert got.tolist() == [by_definition(piece) for piece in pieces]


@given(
    length=st.integers(0, 300), count=st.integers(0, 9), gap=st.integers(0, 20), odd=st.booleans()
)
def test_pieces_of_one_length_are_each_by_definition(length, count, gap, odd):
    data = np.random.default_rng(length).bytes((length + gap) * count + 40)
    starts = np.arange(count) * (length + gap) + (np.arange(count) % 3 if odd else 0)

    got = checksums(data, starts, np.full(count, length))

    assert got.tolist() == [by_definition(data[k : k + length]) for k in starts.tolist()]


@pytest.mark.parametrize("length", [4, 63, 64, 65, 127, 128, 4095, 65_537])
def test_lengths_around_the_segments(length):
    data = np.random.default_rng(length).bytes(length)

    assert checksum(data) == by_definition(data)


def test_the_mask_is_that_of_tfrecord():
    assert masked(np.array([0xE3069283], np.uint32)).tolist() == [
        (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    ]


@pytest.fixture
def fake_library(monkeypatch):
    module = types.ModuleType("google_crc32c")
    module.value = by_definition
    module.implementation = "c"
    monkeypatch.setitem(sys.modules, "google_crc32c", module)
    wire_format._native.cache_clear()
    yield module
    wire_format._native.cache_clear()


def test_the_fast_library_is_used_where_it_is_installed(fake_library):
    assert wire_format._native() is by_definition
    assert checksum(b"123456789") == 0xE3069283


def test_its_own_slow_fallback_is_not_used(fake_library):
    fake_library.implementation = "python"
    wire_format._native.cache_clear()

    assert wire_format._native() is None
    assert checksum(b"123456789") == 0xE3069283
