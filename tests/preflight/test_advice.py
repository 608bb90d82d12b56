"""Advice for steps that do not fit."""

import pytest

from replicax._src.preflight.advice import DeviceContents, advise
from replicax._src.preflight.report import Memory

GIB = 1 << 30


def heads(contents, total, hbm=16):
    """The part of each advice before its details."""
    found = advise(contents, Memory(total=total * GIB), hbm * GIB)
    return [line.partition(":")[0].partition(" with ")[0] for line in found]


SHARDED, REMAT = 'variable_policy="sharded"', "rx.remat(layer)"


def test_mirrored_variables_come_first_where_they_fill_the_memory():
    contents = DeviceContents(variables=60 * GIB, mirrored=59 * GIB, rows=4, replicas=64)

    found = advise(contents, Memory(total=70 * GIB), 16 * GIB)

    assert found[0].startswith(f"{SHARDED}: each of 64 replicas stores 1/64 of the variables")
    assert "58.08 GiB less" in found[0]
    assert "2 of the 4 rows" not in found[0]


def test_activations_come_first_where_they_fill_the_memory():
    contents = DeviceContents(variables=8 * GIB, mirrored=8 * GIB, rows=32, replicas=8)

    # 32 GiB of activations, and 8 GiB are free for them: 4 parts.
    assert heads(contents, total=40)[:2] == ["rx.accumulate(fn, 4)", REMAT]


@pytest.mark.parametrize(("rows", "parts"), [(6, 6), (12, 6), (7, 7), (5, 5), (10, 5), (2, 2)])
def test_the_parts_of_a_batch_are_equal(rows, parts):
    contents = DeviceContents(variables=8 * GIB, mirrored=0, rows=rows, replicas=8)

    # 40 GiB of activations, of which 8 GiB would fit: 5 parts.
    assert heads(contents, total=48)[0] == f"rx.accumulate(fn, {parts})"


def test_nothing_is_said_that_does_not_help():
    sharded = DeviceContents(variables=40 * GIB, mirrored=0, rows=1, replicas=8)

    # One row cannot be divided, and the variables are already in shards.
    assert heads(sharded, total=41) == [
        REMAT,
        'devices_per_replica={"tensor"',
        "twice as many devices",
    ]
    assert (
        heads(DeviceContents(variables=40 * GIB, mirrored=40 * GIB, rows=1, replicas=1), 41)[0]
        == REMAT
    )


def test_what_fits_and_what_has_no_strategy_needs_no_advice():
    assert heads(DeviceContents(variables=GIB, mirrored=GIB, rows=8, replicas=8), total=2) == []
    assert heads(DeviceContents(), total=99) == []
