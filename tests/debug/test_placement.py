"""Where variables are, against what JAX says of their shards."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx

POLICIES = ("mirrored", "sharded")


def strategy_of(replicas=4, policy="mirrored"):
    return rx.distribute.MirroredStrategy(jax.devices()[:replicas], variable_policy=policy)


def shard_bytes(arrays):
    """An independent count: the shards that each device really has."""
    sums = {}
    for array in arrays:
        for shard in array.addressable_shards:
            name = f"CPU:{shard.device.id}"
            sums[name] = sums.get(name, 0) + shard.data.nbytes
    return sums


@given(
    shapes=st.lists(st.lists(st.integers(1, 70), max_size=3), min_size=1, max_size=4),
    replicas=st.sampled_from([1, 2, 3, 8]),
    policy=st.sampled_from(POLICIES),
    on_read=st.booleans(),
)
def test_bytes_per_device_are_those_of_the_shards(shapes, replicas, policy, on_read):
    kind = "ON_READ" if on_read else "ON_WRITE"
    with strategy_of(replicas, policy).scope():
        tree = rx.variables(
            {f"v{i}": np.zeros(shape, "f") for i, shape in enumerate(shapes)},
            synchronization=rx.VariableSynchronization[kind],
            aggregation=rx.VariableAggregation.SUM,
        )

    held = [v.cell.array() for v in tree.values()]  # new copies are spread when first used

    found = rx.debug.placement(tree)

    assert found.bytes_per_device == shard_bytes(held)
    assert [p.shape for p in found.placed] == [tuple(shape) for shape in shapes]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_keras_model_shows_its_weights_and_its_optimizers_state(policy):
    with strategy_of(policy=policy).scope():
        model = keras.Sequential([keras.layers.Input((128,)), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 128), "f"), np.ones((8, 64), "f"), verbose=0)

    of_model, of_optimizer = rx.debug.placement(model), rx.debug.placement(model.optimizer)

    names = {p.name for p in of_model.placed}
    assert {v.path for v in (*model.variables, *model.optimizer.variables)} <= names
    assert {p.name for p in of_optimizer.placed} == {v.path for v in model.optimizer.variables}
    kernel = next(p for p in of_model.placed if p.name.endswith("/kernel"))
    assert kernel.most_bytes == 128 * 64 * 4 // (4 if policy == "sharded" else 1)


def test_nnx_variables_are_found_in_a_scope_and_outside_of_one():
    with strategy_of().scope():
        inside = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    outside = nnx.Linear(3, 5, rngs=nnx.Rngs(0))

    assert len(rx.debug.placement(inside).bytes_per_device) == 4
    assert rx.debug.placement(outside).bytes_per_device == {"CPU:0": 80}
    assert {p.name for p in rx.debug.placement(inside).placed} == {"kernel", "bias"}


def test_random_keys_and_per_replica_values_have_a_place_too():
    strategy = strategy_of(2)
    keys = strategy.run(lambda: jax.random.key(0))

    assert rx.debug.placement({"keys": keys}).bytes_per_device == {"CPU:0": 8, "CPU:1": 8}


def test_looking_reads_no_value_and_gives_nothing_away():
    with strategy_of(2).scope():
        v = rx.Variable(jnp.zeros((1024, 64)))
    step = rx.function(lambda: v.assign_add(jnp.ones((1024, 64))))
    step()
    before = v.cell.owned
    array = v.cell.value

    str(rx.debug.placement(v)), rx.debug.placement(v).svg(), v._repr_html_()

    assert v.cell.owned is before
    assert array._npy_value is None  # JAX keeps what was brought to the host there


def test_a_planned_variable_has_a_place_without_a_value():
    with rx.tpu.planning(), strategy_of(2, "sharded").scope():
        v = rx.Variable(jnp.zeros((4096, 4096)))

    assert rx.debug.placement(v).bytes_per_device == dict.fromkeys(("CPU:0", "CPU:1"), 1 << 25)


def test_a_part_is_drawn_where_it_lies_in_the_whole():
    with strategy_of(4, "sharded").scope():
        v = rx.Variable(jnp.zeros((64, 256)))

    parts = rx.debug.placement(v).placed[0].parts

    assert [parts[d][:2] for d in jax.devices()[:4]] == [(i / 4, (i + 1) / 4) for i in range(4)]


def test_names_are_escaped_and_pictures_bounded():
    evil = "</svg><script>alert(1)</script>"
    tree = {evil: jnp.ones(1), **{f"v{i}": jnp.ones(1) for i in range(500)}}
    found = rx.debug.placement(tree)

    for page in (found.svg(), found._repr_html_()):
        assert "<script" not in page
        assert len(page) < 100_000
    assert "460 variables" in found.svg() or "461 variables" in found.svg()
    assert "rows more" in str(found)
