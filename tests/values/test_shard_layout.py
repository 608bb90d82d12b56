import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from replicax._src.topology.mesh import REPLICA_AXIS, Topology, lines_of
from replicax._src.values.sharded import ShardLayout


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
    st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]),
)
def test_each_replica_has_its_part_of_the_sum_whatever_the_dimensions_of_the_slice(shape, lines):
    cut = ShardLayout(shape, 8, lines if len(lines) > 1 else ())
    x = np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype("f4")
    mesh = Mesh(np.asarray(jax.devices()[:8]), (REPLICA_AXIS,))
    spec = PartitionSpec(REPLICA_AXIS)
    reduce_scatter = jax.shard_map(
        lambda x: cut.reduce_scatter(x[0]),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )

    found = jax.jit(reduce_scatter)(x)

    np.testing.assert_array_equal(cut.whole(found), jnp.sum(x, axis=0))


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("shape", [(8, 3), (5, 7), (3, 16, 64)])
def test_groups_of_replicas_each_gather_and_reduce_the_whole(shape, groups):
    layout = ShardLayout(shape, 8 // groups, groups=groups)
    rng = np.random.default_rng(0)
    x, whole = rng.integers(-99, 99, (8, *shape)).astype("f4"), rng.normal(size=shape)
    mesh = Mesh(np.asarray(jax.devices()[:8]), (REPLICA_AXIS,))

    def body(x, part):
        own = layout.local_shard(layout.gathered(part))
        return layout.reduce_scatter(x[0]), layout.gathered(part)[None], own

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(REPLICA_AXIS), layout.spec),
        out_specs=(layout.spec, PartitionSpec(REPLICA_AXIS), layout.spec),
        check_vma=False,
    )
    stored = layout.stored(whole.astype("f4"))
    sums, gathered, again = jax.jit(mapped)(x, stored)

    np.testing.assert_array_equal(layout.whole(sums), x.sum(axis=0))
    np.testing.assert_array_equal(sums, layout.stored(x.sum(axis=0)))
    np.testing.assert_array_equal(gathered, np.stack([whole] * 8).astype("f4"))
    np.testing.assert_array_equal(again, stored)
    np.testing.assert_array_equal(stored, layout.stored(jnp.asarray(whole, "f4")))


@pytest.mark.parametrize(
    ("shape", "cores", "lines"),
    [
        ((4, 2, 1, 1), 1, (2, 4)),
        ((2, 2, 1, 2), 1, (2, 2, 2)),
        ((8, 1, 1, 1), 1, ()),  # one line
        ((4, 4, 1, 1), 1, ()),  # not filled
        ((4, 2, 1, 1), 2, ()),
    ],
)
def test_the_dimensions_of_a_slice_count_if_replicas_fill_several(shape, cores, lines):
    assert lines_of(shape, Topology(tuple(jax.devices()), cores)) == lines


def test_other_devices_lie_on_no_lines():
    assert Topology(tuple(jax.devices())).lines == ()
