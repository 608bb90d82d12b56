import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.collectives.packing import (
    BETWEEN_PROCESSES,
    WITHIN_PROCESS,
    packed,
    plan_packs,
)

SIZES = st.lists(
    st.tuples(st.sampled_from(["float32", "int32", "bfloat16"]), st.integers(0, 3_000_000)),
    max_size=30,
)
BYTES = st.sampled_from([0, 0, 1, 1000, 1_000_000])
PACKS = st.integers(0, 5)
PACKINGS = st.sampled_from([WITHIN_PROCESS, BETWEEN_PROCESSES])


@given(SIZES, BYTES, PACKS)
def test_every_array_is_in_exactly_one_pack(sizes, bytes_per_pack, num_packs):
    packs = plan_packs(sizes, bytes_per_pack, num_packs)

    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    assert all(packs)


@given(SIZES, BYTES, PACKS)
def test_a_pack_has_one_dtype_and_keeps_the_order(sizes, bytes_per_pack, num_packs):
    for pack in plan_packs(sizes, bytes_per_pack, num_packs):
        assert len({sizes[i][0] for i in pack}) == 1
        assert pack == sorted(pack)


@given(SIZES, st.integers(1, 1_000_000), PACKS)
def test_a_pack_is_not_larger_than_asked_unless_one_array_is(sizes, bytes_per_pack, num_packs):
    for pack in plan_packs(sizes, bytes_per_pack, num_packs):
        assert len(pack) == 1 or sum(sizes[i][1] for i in pack) <= bytes_per_pack


@given(SIZES, st.integers(1, 1_000_000))
def test_two_neighbouring_packs_of_one_dtype_would_not_fit_into_one(sizes, bytes_per_pack):
    packs = plan_packs(sizes, bytes_per_pack, 1)
    total = lambda pack: sum(sizes[i][1] for i in pack)  # noqa: E731

    for dtype in ("float32", "int32", "bfloat16"):
        own = [p for p in packs if sizes[p[0]][0] == dtype]
        for one, next_one in itertools.pairwise(own):
            assert total(one) + sizes[next_one[0]][1] > bytes_per_pack


@given(SIZES, PACKINGS)
def test_by_default_large_arrays_travel_alone(sizes, packing):
    for pack in plan_packs(sizes, 0, 1, packing):
        assert len(pack) == 1 or all(sizes[i][1] <= packing.small_bytes for i in pack)
        assert len(pack) == 1 or sum(sizes[i][1] for i in pack) <= packing.pack_bytes


@given(SIZES)
def test_no_packs_means_no_packing(sizes):
    assert plan_packs(sizes, 0, 0) == [[i] for i in range(len(sizes))]


@given(st.integers(1, 40), st.integers(2, 6))
def test_equal_arrays_are_split_into_as_many_packs_as_asked(arrays, num_packs):
    packs = plan_packs([("float32", 1000)] * arrays, 0, num_packs)

    assert len(packs) <= num_packs
    assert len(packs) == num_packs or arrays % num_packs


def test_nothing_needs_no_pack():
    assert plan_packs([], 0, 1) == []
    assert packed(lambda flat: flat, []) == []


@pytest.mark.parametrize("bytes_per_pack", [0, 16, 1 << 20])
@pytest.mark.parametrize("num_packs", [0, 1, 3])
@pytest.mark.parametrize("packing", [WITHIN_PROCESS, BETWEEN_PROCESSES])
def test_what_comes_out_has_the_shapes_that_went_in(bytes_per_pack, num_packs, packing):
    leaves = [
        jnp.arange(6.0).reshape(2, 3),
        jnp.arange(4),
        jnp.float32(7),
        jnp.zeros((0, 2)),
        jnp.arange(100_000.0),
    ]
    seen = []

    def double(flat):
        seen.append(len(flat))
        return [x * 2 for x in flat]

    results = packed(
        double, leaves, bytes_per_pack=bytes_per_pack, num_packs=num_packs, packing=packing
    )

    assert len(seen) == 1
    for result, leaf in zip(results, leaves, strict=True):
        assert result.dtype == leaf.dtype
        np.testing.assert_array_equal(result, np.asarray(leaf) * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "complex64"])
def test_what_comes_out_is_what_went_in(dtype):
    arrays = [jnp.arange(n, dtype=dtype) - 1 for n in (3, 0, 1, 7)]

    for made in (packed, jax.jit(packed, static_argnums=0)):
        for x, y in zip(arrays, made(lambda packs: packs, arrays), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_pack_of_nothing_gives_nothing():
    arrays = [jnp.zeros((0, 2)), jnp.zeros((3, 0))]

    assert [x.shape for x in packed(lambda packs: packs, arrays)] == [(0, 2), (3, 0)]


def test_gradients_go_through_a_pack():
    arrays = [jnp.arange(3.0), jnp.arange(4.0)]

    def loss(arrays):
        a, b = packed(lambda packs: [3 * x for x in packs], arrays)
        return (a**2).sum() + b.sum()

    a, b = jax.grad(loss)(arrays)
    np.testing.assert_allclose(a, 18 * arrays[0])
    np.testing.assert_allclose(b, [3, 3, 3, 3])


def test_what_is_done_with_equal_arrays_of_a_pack_is_one_program():
    def step(state, arrays):
        cut = packed(lambda packs: [2 * x for x in packs], arrays)
        return [0.9 * s + jnp.sin(x) for s, x in zip(state, cut, strict=True)]

    arrays = [jnp.arange(16.0) + i for i in range(8)]
    text = jax.jit(step).lower(arrays, arrays).compile().as_text()

    # With its place in it, each would be a program of its own.
    assert "f32[16]{0} dynamic-slice(" in text
    assert "f32[16]{0} slice(" not in text


def test_places_beyond_32_bits_are_right():
    sizes = [2**31 - 5, 10, 10]
    arrays = [jax.ShapeDtypeStruct((n,), jnp.uint8) for n in sizes]
    pack = lambda xs: packed(lambda packs: packs, xs, bytes_per_pack=2**40)  # noqa: E731

    jaxpr = jax.make_jaxpr(pack)(arrays).jaxpr

    cuts = [e.params for e in jaxpr.eqns if e.primitive.name == "slice"]
    assert [p["start_indices"] for p in cuts] == [(0,), (2**31 - 5,), (2**31 + 5,)]
